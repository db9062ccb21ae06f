"""Key tokens by LongPPL's rule beside those of the authors' `longppl` on the same texts (in authors.json)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from fidelity.frequencies import golden
from fidelity.row import Row
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ctxext.assets import MODEL, PERSUASION
from ctxext.evals.engine import Engine
from ctxext.evals.haystack import Haystack
from ctxext.evals.needle import Passkey
from ctxext.evals.perplexity import KeyTokens, Window, unpacked
from ctxext.evals.prompts import Prompter
from ctxext.evals.samples import Place

# Half of SHORT is LongPPL's trunc_len and its sliding_window: the short context is between half of SHORT and SHORT.
LONG, SHORT, TEXTS = 512, 128, 12
# LongPPL reads blocks of SHORT / 2 tokens. A text of whole blocks, and one whose last block is short.
LENGTHS = {"whole blocks": LONG, "a short last block": LONG - 16}


def model_and_tokenizer(bos: bool) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The bundled model, and its tokenizer with or without BOS before a text."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    if not bos:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    return AutoModelForCausalLM.from_pretrained(MODEL).eval(), tokenizer


def texts(tokenizer: PreTrainedTokenizerBase, length: int) -> Iterator[str]:
    """Pages of *Persuasion* of `length` tokens; two of three hide a number and ask for it, so that it is a key."""
    haystack, prompter = Haystack.from_file(PERSUASION, tokenizer), Prompter(tokenizer)
    for trial in range(TEXTS):
        if trial % 3 == 2:
            start = 9_000 * trial
            ids: Sequence[int] = haystack.token_ids[start : start + length + 16]
        else:
            place = Place("passkey", length + 16, 0.1 + 0.07 * trial, trial, 0)
            ids = Passkey().sample(place, prompter, haystack).input_ids
        text = str(tokenizer.decode(list(ids), skip_special_tokens=True))
        # Its beginning is cut off, as far as `length` tokens are left.
        starts = (a for a, _ in tokenizer(text, return_offsets_mapping=True, verbose=False)["offset_mapping"])
        yield next(text[a:] for a in starts if len(tokenizer(text[a:], verbose=False)["input_ids"]) == length)


def key_tokens(text: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[tuple[int, int]]:
    """The key tokens of a text, each as its interval of characters."""
    encoded = tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True)
    n_bos = sum(encoded["special_tokens_mask"])
    window = Window(tuple(encoded["input_ids"]), n_bos, max(1, n_bos), len(text.encode()))
    assert len(window.input_ids) <= LONG, "the judge reads the whole text"
    mask = unpacked(KeyTokens(long=LONG, short=SHORT).record(window, Engine(model)), "mask")
    offsets = encoded["offset_mapping"]
    # The first token has no loss, unless BOS stands before it.
    return {tuple(offsets[k + max(1, n_bos)]) for k in mask.nonzero()[0]}


def theirs(text: str, intervals: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase) -> set[tuple[int, int]]:
    """The tokens within their intervals, which join neighbours."""
    offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    return {(a, b) for a, b in offsets if b > a and any(start <= a and b <= end for start, end in intervals)}


def differing(bos: bool, ends: str, tiny: bool) -> tuple[int, int, int, int]:
    """Key tokens that differ, those of them before the last block, all key tokens of either, and texts."""
    model, tokenizer = model_and_tokenizer(bos)
    cases = [case for case in golden()["longppl"]["cases"] if (case["bos"], case["ends"]) == (bos, ends)]
    differ = before = either = 0
    for text, case in islice(zip(texts(tokenizer, LENGTHS[ends]), cases), 3 if tiny else None):
        a, b = key_tokens(text, model, tokenizer), theirs(text, case["intervals"], tokenizer)
        offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        last_block = offsets[(len(offsets) - 1) // (SHORT // 2) * (SHORT // 2)][0]
        differ, either = differ + len(a ^ b), either + len(a | b)
        before += sum(start < last_block for start, _ in a ^ b)
    assert either, "no key token in any text, so nothing was compared"
    return differ, before, either, len(cases)


def rows(tiny: bool = False) -> Iterator[Row]:
    differ, _, either, n = differing(False, "whole blocks", tiny)
    yield Row("key tokens that differ, texts of whole blocks", differ, 0, "longppl", f"{either} key tokens, {n} texts")
    differ, before, either, n = differing(False, "a short last block", tiny)
    of = f"{either} key tokens, {n} texts"
    yield Row("key tokens that differ, texts with a short last block [1]", differ, None, "longppl", of)
    yield Row("those of them before the last block", before, 0, "longppl", of)
    differ, _, either, n = differing(True, "whole blocks", tiny)
    yield Row(
        "key tokens that differ, texts of whole blocks with BOS [2]",
        differ,
        None,
        "longppl",
        f"{either} key tokens, {n} texts",
    )
