"""Train the small bundled model from scratch, on a CPU.

A LLaMA of 4.2 million parameters reads five novels of Jane Austen, 512 tokens at a time, and learns
on the way to find a passkey anywhere in those 512 tokens. *Persuasion* is held out.

    apt-get download r-cran-janeaustenr && dpkg -x r-cran-janeaustenr_*.deb books
    python recipes/pretrain.py --books books/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb \
        --output runs/austen-4m

Three choices let so small a model retrieve (each was found to matter):
- most sequences carry a key that is stated twice: the second mention teaches copying at a short
  distance, and the question asks for it at a long one;
- sequences grow from 128 to 256 to 512 tokens at a constant number of tokens per step: short ones carry
  four times the keys, and copying appears early; the distance between key and question grows with them;
- the first mention is random, so it carries no loss, and the answer carries more than prose does.

Without `--books` it reads the copies that the repository keeps. `--position alibi|learned|sinusoidal|t5` trains the
same model with another position encoding (positions.py); benchmarks/train_short_test_long.py compares them.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import re
import struct
import sys
import time
import zlib
from pathlib import Path
from random import Random

import torch
import transformers
from positions import POSITIONS, PositionedConfig, PositionedLlama
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ctxext.assets import PERSUASION
from ctxext.evals.engine import Engine
from ctxext.evals.haystack import Haystack
from ctxext.evals.needle import Passkey
from ctxext.evals.prompts import Prompter
from ctxext.evals.samples import Place
from ctxext.utils.machine import slow_in_bfloat16

TITLES = ["emma", "mansfieldpark", "northangerabbey", "persuasion", "prideprejudice", "sensesensibility"]
HELD_OUT = "persuasion"
# The output of read_books, one file per novel.
KEPT = {title: Path(__file__).parent / f"data/austen/{title}.txt" for title in TITLES} | {HELD_OUT: PERSUASION}


def read_books(rdb: Path) -> dict[str, str]:
    """The six novels in the data file of Debian's `r-cran-janeaustenr`, by title.

    The file is a sequence of chunks, in the order of TITLES: four bytes with the unpacked size, then a
    zlib stream of one serialised R character vector (XDR format), with one string per line.
    """
    raw = rdb.read_bytes()
    books = {}
    for title in TITLES:
        unpack = zlib.decompressobj()
        data = unpack.decompress(raw[4:])
        raw = unpack.unused_data
        position = 14  # "X\n" and three version numbers
        if struct.unpack_from(">i", data, 6 - 4)[0] == 3:  # version 3 names its encoding
            position += 4 + struct.unpack_from(">i", data, position)[0]
        n_lines = struct.unpack_from(">i", data, position + 4)[0]
        position += 8
        lines = []
        for _ in range(n_lines):
            size = struct.unpack_from(">i", data, position + 4)[0]
            lines.append(data[position + 8 : position + 8 + size].decode("utf-8"))
            position += 8 + size
        books[title] = unwrap("\n".join(lines))
    return books


def unwrap(text: str) -> str:
    """Paragraphs on one line each, blank lines between them, underscores of emphasis dropped."""
    paragraphs = (" ".join(block.split()) for block in re.split(r"\n\s*\n", text.replace("_", "")))
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph) + "\n"


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which every digit is a token of its own; `<s>` opens every sequence."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    bpe.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bpe.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="</s>", clean_up_tokenization_spaces=False
    )


def sequence_length(step: int, args) -> int:
    """Tokens per sequence at this step: a quarter of the full length, then half, then all of it."""
    progress = step / args.steps
    return args.length // (4 if progress < args.grow[0] else 2 if progress < args.grow[1] else 1)


def make_batch(prompter, haystack, args, length: int, rng: Random):
    """`(input_ids, weights)`, both `(batch, length)`: prose, or prose with a key to find."""
    rows, weights = [], []
    for _ in range(args.batch_tokens // length):
        weight = torch.ones(length)
        if rng.random() < args.needle_share:
            place = Place("passkey", length, rng.random(), rng.randrange(2**31), args.seed)
            sample = Passkey().sample(place, prompter, haystack)
            row = list(sample.input_ids)
            key = row[sample.n_prompt :]
            first, *rest = [k for k in range(length) if row[k : k + len(key)] == key]
            weight[first : first + len(key)] = 0.0  # it cannot be predicted
            for again in rest:
                weight[again : again + len(key)] = args.answer_weight
        else:
            start = rng.randrange(haystack.n_tokens - length)
            row = [*prompter.special, *haystack.token_ids[start : start + length - len(prompter.special)]]
        rows.append(row)
        weights.append(weight)
    return torch.tensor(rows), torch.stack(weights)


def weighted_loss(model, ids: torch.Tensor, weights: torch.Tensor, dropout: float) -> torch.Tensor:
    """Mean cross-entropy in nats over the next tokens, each with its weight."""
    embeddings = torch.nn.functional.dropout(model.get_input_embeddings()(ids), dropout)
    logits = model(inputs_embeds=embeddings).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    weights = weights[:, 1:].flatten()
    return (loss * weights).sum() / weights.sum()


def found(model, prompter, haystack, length: int) -> float:
    """The share of 40 passkeys that the model finds in prompts of `length` tokens."""
    task = Passkey()
    depths = (0.0, 0.25, 0.5, 0.75, 1.0)
    places = task.places([length], depths, trials=8, seed=0)
    samples = [task.sample(place, prompter, haystack) for place in places]
    rows = [samples[k : k + len(depths)] for k in range(0, len(samples), len(depths))]
    answers = [a.guess.tolist() == list(s.input_ids[s.n_prompt :]) for s, a in Engine(model).forced(rows)]
    return sum(answers) / len(answers)


def new_model(args, tokenizer) -> LlamaForCausalLM:
    body = {
        "vocab_size": len(tokenizer),
        "hidden_size": args.hidden_size,
        "intermediate_size": args.hidden_size * 43 // 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": args.length,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if args.position == "rope":
        rope = {"rope_type": "default", "rope_theta": args.rope_theta}
        return LlamaForCausalLM(LlamaConfig(rope_parameters=rope, **body))
    return PositionedLlama(PositionedConfig(position=args.position, **body))


def learning_rate(step: int, args) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    if step < args.warmup:
        return args.learning_rate * (step + 1) / args.warmup
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--books", type=Path, help="Rdata.rdb of r-cran-janeaustenr; default: the repository's copies")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--position", choices=POSITIONS, default="rope", help="the position encoding")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--length", type=int, default=512, help="tokens per sequence")
    # For 512 tokens what 10000 is for LLaMA 2's 4096: few pairs rotate too slowly to matter.
    parser.add_argument("--rope-theta", type=float, default=1250.0)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument(
        "--grow", type=float, nargs=2, default=[0.3, 0.55], help="when the length doubles, as fractions of the steps"
    )
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens per step")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=100, help="steps")
    parser.add_argument("--needle-share", type=float, default=0.7)
    parser.add_argument("--answer-weight", type=float, default=4.0)
    parser.add_argument(
        "--dropout", type=float, default=0.1, help="dropout of the embeddings, as five novels are little text"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rng = Random(args.seed)
    books = read_books(args.books) if args.books else {t: path.read_text("utf-8") for t, path in KEPT.items()}
    prose = [text for title, text in books.items() if title != HELD_OUT]
    tokenizer = train_tokenizer(prose, args.vocab_size)
    tokenizer.model_max_length = args.length
    prompter = Prompter(tokenizer)
    haystack = Haystack.from_text("\n".join(prose), tokenizer)
    held_out = Haystack.from_text(books[HELD_OUT], tokenizer)

    model = new_model(args, tokenizer)
    print(f"{model.num_parameters():,} parameters, {haystack.n_tokens:,} tokens to train on", flush=True)
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=args.learning_rate,
        betas=(0.9, 0.95),
    )

    def save(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "persuasion.txt").write_text(books[HELD_OUT], encoding="utf-8")
        record = {
            "arguments": {k: v for k, v in vars(args).items() if k not in ("books", "output")},
            "parameters": model.num_parameters(),
            "train_tokens_in_books": haystack.n_tokens,
            "steps": step + 1,
            "last_loss": loss.item(),
            "seconds": round(time.time() - started),
            "precision": "bfloat16 autocast" if half else "float32",
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }
        (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n")

    half = not slow_in_bfloat16("cpu")
    started = time.time()
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns) as progress:
        bar = progress.add_task("", total=args.steps)
        for step in range(args.steps):
            length = sequence_length(step, args)
            ids, weights = make_batch(prompter, haystack, args, length, rng)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args)
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = weighted_loss(model, ids, weights, args.dropout)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            progress.update(bar, advance=1, description=f"loss {loss.item():.3f}")
            if (step + 1) % 100 == 0 or step + 1 == args.steps:
                said = f"step {step + 1}: loss {loss.item():.3f}"
                if args.needle_share > 0:
                    model.eval()
                    said += f", passkey at {length} {found(model, prompter, held_out, length):.2f}"
                    model.train()
                progress.console.print(f"{said}, {time.time() - started:.0f} s")
                sys.stdout.flush()
                save(args.output)


if __name__ == "__main__":
    main()
