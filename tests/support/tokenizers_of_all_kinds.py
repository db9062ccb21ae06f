"""Three tokenizers of different kinds, two of them trained here on *Persuasion*."""

from __future__ import annotations

from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ctxext.assets import MODEL, PERSUASION

KINDS = ("bundled", "sentencepiece", "merging")


@cache
def tokenizer_of_kind(kind: str) -> PreTrainedTokenizerFast:
    """`bundled`: byte-level BPE with BOS, digits apart. `sentencepiece`: unigram over ▁ with BOS. `merging`:
    byte-level BPE without BOS that joins punctuation with line breaks and cuts numbers into unequal tokens, as
    the tokenizers of Qwen and GPT-4 and of GPT-2 do."""
    if kind == "bundled":
        return AutoTokenizer.from_pretrained(MODEL)
    text = PERSUASION.read_text(encoding="utf-8")[:200_000] + " ".join(str(n * n) for n in range(400, 1200))
    if kind == "sentencepiece":
        made = Tokenizer(models.Unigram())
        made.normalizer = normalizers.Replace(Regex(" {2,}"), " ")
        made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
        made.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="first")
        alphabet = sorted({*text, *"0123456789"})
        trainer = trainers.UnigramTrainer(
            vocab_size=1500, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", initial_alphabet=alphabet,
            show_progress=False,
        )  # fmt: skip
        made.train_from_iterator(text.split("\n"), trainer)
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made = Tokenizer(models.BPE())
    pattern = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["</s>"],
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
