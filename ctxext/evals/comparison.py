"""Several methods on one model and one text: passkey by length and depth, perplexity by position."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ctxext.api import temporarily_extended
from ctxext.evals.haystack import Haystack
from ctxext.evals.passkey import passkey_hits
from ctxext.evals.perplexity import perplexity, position_losses
from ctxext.methods import RopeScaling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

UNEXTENDED = "none"


@dataclass
class MethodResult:
    """What one method did.

    Attributes:
        hits: passkey hits at [length][depth], out of `Comparison.trials`.
        perplexity: by band of positions: up to the first length, then from each length to the next.
        curve: perplexity in equal bins of positions, for the figure.
    """

    method: str
    hits: list[list[int]] = field(default_factory=list)
    perplexity: list[float] = field(default_factory=list)
    curve: list[float] = field(default_factory=list)


@dataclass
class Comparison:
    """Every method on the same prompts and the same windows of text."""

    model: str
    factor: float
    trained_length: int
    lengths: list[int]
    depths: list[float]
    trials: int
    windows: int
    bin_tokens: int
    seed: int
    results: list[MethodResult]
    machine: str
    versions: dict[str, str]

    def passkey(self, result: MethodResult, length: int) -> float:
        """Share of the prompts of `length` tokens that were answered, pooled over depths; needs `trials` > 0."""
        return sum(result.hits[self.lengths.index(length)]) / (self.trials * len(self.depths))

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def n_steps(methods: Sequence[Any], lengths: Sequence[int], depths: Sequence[float], trials: int, windows: int) -> int:
    """How often `compare` calls `advance`."""
    return (1 + len(methods)) * (len(lengths) * len(depths) * trials + windows)


def compare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    methods: Sequence[str | RopeScaling],
    *,
    name: str,
    trained_length: int,
    factor: float,
    lengths: Sequence[int],
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    trials: int = 8,
    windows: int = 12,
    batch_size: int = 4,
    seed: int = 0,
    advance: Callable[[str], None] = lambda method: None,
) -> Comparison:
    """Measure the unextended model, then the model extended by each of `methods`, restoring it each time.

    Args:
        lengths: in tokens, ascending; the last one is the length of the windows of text.
        trials: passkey prompts for each length and depth; 0 leaves passkey out.
        advance: called with the method's name after every prompt and window, for a progress bar.
    """
    haystack = Haystack.from_text(text, tokenizer)
    longest = lengths[-1]
    bin_tokens = max(1, longest // 32)
    comparison = Comparison(
        model=name,
        factor=factor,
        trained_length=trained_length,
        lengths=list(lengths),
        depths=list(depths),
        trials=trials,
        windows=windows,
        bin_tokens=bin_tokens,
        seed=seed,
        results=[],
        machine=f"{platform.machine()}, {torch.get_num_threads()} threads, {model.device.type}",
        versions=_versions(),
    )
    for method in (UNEXTENDED, *methods):
        label = method.name if isinstance(method, RopeScaling) else method
        result = MethodResult(label)
        extended = nullcontext() if method == UNEXTENDED else temporarily_extended(model, factor, method)
        with extended:
            for length in lengths:
                hits = dict.fromkeys(depths, 0)
                for depth, _, hit in passkey_hits(
                    model, tokenizer, haystack, length, depths, trials, seed=seed, batch_size=batch_size
                ):
                    hits[depth] += hit
                    advance(label)
                result.hits.append(list(hits.values()))
            losses = position_losses(
                model, tokenizer, haystack.ids, longest, windows, advance=lambda label=label: advance(label)
            )
        edges = [0, *lengths]
        result.perplexity = [perplexity(losses[:, low:high]) for low, high in pairwise(edges)]
        result.curve = [perplexity(part) for part in losses.split(bin_tokens, dim=1)]
        comparison.results.append(result)
    return comparison


def _versions() -> dict[str, str]:
    import transformers

    from ctxext import __version__

    return {
        "ctxext": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
