"""Dynamic scaling side by side: by in-attention RoPE, a static scale, and transformers' own with and without its cache.

    python benchmarks/dynamic.py                                                      # the bundled model
    python benchmarks/dynamic.py --model runs/SmolLM2-135M-Instruct --trained-length 256 --windows 4 --texts 4

Loss by position on *Persuasion*, the same windows for every way, and passkey prompts answered by `generate`. Every way
but one is read in one forward pass; transformers' `dynamic` under its cache is read as a decoder reads: the trained
length at once, then token by token. What in-attention RoPE gives token by token is compared with its own forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from report import Report, options
from rich.progress import Progress
from torch import Tensor

from ctxext import extend_context
from ctxext.assets import MODEL
from ctxext.evals.loading import load, load_text
from ctxext.evals.needle import Passkey
from ctxext.evals.prompts import Prompter
from ctxext.evals.samples import Sample
from ctxext.evals.statistics import paired_loss_difference, wilson

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class Way:
    """A way to run the model.

    Attributes:
        arguments: of `extend_context`; None for the stock model.
        native: transformers' own `dynamic`, configured as one would in config.json.
        use_cache: whether answers are decoded under a cache.
        steps: whether the loss is read token by token beyond the trained length, under the cache.
    """

    name: str
    arguments: dict[str, Any] | None = None
    native: bool = False
    use_cache: bool = True
    steps: bool = False


WAYS = (
    Way("not extended"),
    Way("static YaRN", {"method": "yarn"}),
    Way("static NTK-aware", {"method": "ntk"}),
    Way("dynamic_ntk, in attention", {"method": "dynamic_ntk"}),
    Way("dynamic_yarn, in attention", {"method": "dynamic_yarn"}),
    Way("transformers' dynamic, no cache", native=True, use_cache=False),
    Way("transformers' dynamic, its cache", native=True, steps=True),
)


def as_way(folder: Path, way: Way, trained: int, factor: float) -> Any:
    """The model, loaded to run in one way."""
    model, _ = load(folder)
    if way.native:
        from transformers import AutoModelForCausalLM

        config = model.config
        theta = config.rope_parameters["rope_theta"]
        config.rope_parameters = {"rope_type": "dynamic", "factor": factor, "rope_theta": theta}
        config.max_position_embeddings = trained  # what transformers counts the length from
        state = model.state_dict()
        model = AutoModelForCausalLM.from_config(config, dtype=model.dtype).eval()
        model.load_state_dict(state)
    elif way.arguments is not None:
        extend_context(model, factor, original_max_position_embeddings=trained, **way.arguments)
    return model


@torch.inference_mode()
def losses(model: Any, ids: Tensor, way: Way, trained: int) -> Tensor:
    """Loss of every token but the first, in nats, of shape (tokens - 1,)."""
    if not way.steps:
        return _loss(model(input_ids=ids[None], use_cache=False).logits[0, :-1], ids[1:])
    return _loss(token_by_token(model, ids, trained)[:-1], ids[1:])


def token_by_token(model: Any, ids: Tensor, prefill: int) -> Tensor:
    """Logits of a prefill and of single steps behind it, of shape (tokens, vocabulary)."""
    output = model(input_ids=ids[None, :prefill], use_cache=True)
    parts, cache = [output.logits[0]], output.past_key_values
    for token in ids[prefill:]:
        output = model(input_ids=token.view(1, 1), past_key_values=cache, use_cache=True)
        parts.append(output.logits[0])
    return torch.cat(parts)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")


@torch.inference_mode()
def answered(model: Any, sample: Sample, prompter: Prompter, use_cache: bool) -> bool:
    """Whether the greedy answer holds the passkey."""
    from transformers import GenerationConfig

    prompt = torch.tensor([sample.input_ids[: sample.n_prompt]])
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=sample.answer_tokens, repetition_penalty=1.0, use_cache=use_cache,
        pad_token_id=0, eos_token_id=model.generation_config.eos_token_id,
    )  # fmt: skip
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
    written = output[0, prompt.shape[1] :].tolist()
    said = prompter.answer_text(sample.input_ids[: sample.n_prompt], written, sample.answer_tokens)
    return sample.score(said) == 1.0


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--trained-length", type=int, help="pretend that the model was trained at this many tokens")
    parser.add_argument("--factor", type=int, default=4)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--texts", type=int, default=8, help="passkey texts for each length, five depths each")
    args = parser.parse_args()

    model, tokenizer = load(args.model)
    trained = args.trained_length or model.config.max_position_embeddings
    lengths = [trained * 2**power for power in range((args.factor - 1).bit_length() + 1)]
    prompter, haystack = Prompter(tokenizer), load_text(None, tokenizer, lengths[-1])
    text = torch.tensor(haystack.token_ids)
    step = (len(text) - lengths[-1] - 1) // max(1, args.windows - 1)
    windows = [text[k * step : k * step + lengths[-1] + 1] for k in range(args.windows)]
    task = Passkey()
    samples = {
        length: [task.sample(place, prompter, haystack) for place in task.places([length], DEPTHS, args.texts, seed=0)]
        for length in lengths
    }

    report = Report("dynamic", seed=0)
    curves: dict[str, list[Tensor]] = {}
    rows: dict[str, dict[str, Any]] = {}
    gaps: dict[str, float] = {}
    with Progress() as progress:
        each = len(windows) + sum(map(len, samples.values()))
        bar = progress.add_task("", total=each * len(WAYS))
        for way in WAYS:
            progress.update(bar, description=way.name)
            extended = as_way(args.model, way, trained, args.factor)
            curves[way.name] = []
            for window in windows:
                curves[way.name].append(losses(extended, window, way, trained))
                progress.advance(bar)
            hits = {}
            for length, prompts in samples.items():
                found = 0
                for sample in prompts:
                    found += answered(extended, sample, prompter, way.use_cache)
                    progress.advance(bar)
                hits[length] = (found, len(prompts))
            if "in attention" in way.name:
                short = windows[0][: 2 * trained]
                with torch.inference_mode():
                    whole = extended(input_ids=short[None], use_cache=False).logits[0]
                    gap = (token_by_token(extended, short, trained // 2) - whole).abs().max().item()
                gaps[way.name] = gap
            rows[way.name] = measured(curves[way.name], hits, lengths)

    base = curves["static YaRN"]
    for name, row in rows.items():
        for band, loss in row["loss"].items():
            report.add(f"{name}: loss at {band}", loss)
        if name != "static YaRN":
            beyond, against = ([curve[trained:].sum().item() for curve in each] for each in (curves[name], base))
            counts = [len(curve[trained:]) for curve in base]
            row["against static YaRN"] = paired_loss_difference(beyond, against, counts)._asdict()
        for length, share in row["passkey"].items():
            report.add(f"{name}: passkey at {length}", share["value"])
    for name, gap in gaps.items():
        report.add(f"{name}: token by token against one pass, largest difference in logits", gap, at_most=1e-3)
    output = args.output or Path("docs/dynamic") / f"{args.model.name}.json"
    report.finish(
        output, model=args.model.name, trained_length=trained, factor=args.factor, windows=len(windows), ways=rows
    )


def measured(curves: list[Tensor], hits: dict[int, tuple[int, int]], lengths: list[int]) -> dict[str, Any]:
    bands = pairwise([0, *lengths])
    return {
        "loss": {f"{a}-{b}": torch.stack([curve[a:b].mean() for curve in curves]).mean().item() for a, b in bands},
        "passkey": {str(n): {**wilson(found, total)._asdict(), "n": total} for n, (found, total) in hits.items()},
    }


if __name__ == "__main__":
    main()
