"""How much a λ for each layer would gain over one λ for all layers, which is all that a config can express.

    python benchmarks/fit_by_layer.py

The fit of `ctxext fit` with four numbers per layer, beside the fits of benchmarks/fit.py with the same seeds, which
are reused from runs/fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from fit import (
    SEED,
    SETTINGS,
    Part,
    add_part,
    key_difference,
    learned_as,
    measure,
    measured_file,
    ready,
    run,
    text_difference,
    trials_to,
)
from report import Report, kept, options
from rich.progress import track
from torch import Tensor

from ctxext.encodings.rope import RopeGeometry
from ctxext.fitting import gradient
from ctxext.fitting.episodes import split
from ctxext.fitting.gradient import GradientSettings, fit_by_gradient
from ctxext.fitting.live import LiveFactors, frozen
from ctxext.methods import RopeScaling


def main() -> None:
    parser = options(__doc__, "docs/fit/by_layer.json")
    parser.add_argument("--factors", type=int, nargs="*", default=[4, 8])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    args = parser.parse_args()
    tries = [(factor, seed) for factor in args.factors for seed in args.seeds]
    parts: list[Part] = [(factor, f"fitted, seed {seed}", {"seed": seed}, factor) for factor, seed in tries]
    parts += [(factor, "none", None, factor) for factor in args.factors]
    one = run(parts)
    each = {
        (factor, seed): kept(
            measured_file(factor, f"by layer, seed {seed}", factor, True), partial(by_layer, factor, seed)
        )
        for factor, seed in track(tries, "λ by layer")
    }
    report = Report("fit, by layer", seed=SEED)
    for (factor, seed), layered in each.items():
        base, same = one[factor, "none", factor], one[factor, f"fitted, seed {seed}", factor]
        for name, result in (("one λ", same), ("λ for each layer", layered)):
            add_part(report, f"×{factor} {name}, seed {seed}", result, base)
    differences = {
        f"×{factor}, seed {seed}": {
            "keys": key_difference(layered, one[factor, f"fitted, seed {seed}", factor])._asdict(),
            "text": text_difference(layered, one[factor, f"fitted, seed {seed}", factor])._asdict(),
        }
        for (factor, seed), layered in each.items()
    }
    report.finish(args.output, against_one=differences, settings=SETTINGS)


def by_layer(factor: int, seed: int) -> dict[str, Any]:
    """One fit and what it measures."""
    model, prompter, seen, text = ready()
    live = LayeredFactors(model)
    learnt, held_out = split(seen, prompter, 512, 512 * factor)
    with learned_by_layer(len(model.model.layers)), live, frozen(model):
        fit = fit_by_gradient(model, live, learnt, held_out, GradientSettings(seed=seed))
        live.use(fit.method)
        result = measure(model, prompter, text, trials_to(512 * factor))
    return {**result, "start": fit.start, "kept_start": fit.kept_start, "tried": fit.tried}


@dataclass(frozen=True)
class Layered:
    """A fitted method: λ of shape (layer, pair), and an attention factor for each layer."""

    factors: Tensor
    attention: Tensor

    def rescale_factors(self, rope: RopeGeometry) -> Tensor:
        return self.factors

    def attention_scaling(self, rope: RopeGeometry) -> Tensor:
        return self.attention


class LayeredFactors(LiveFactors):
    """Passes the cos and sin of its own λ to each layer."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.layers = model.model.layers

    def __enter__(self) -> LayeredFactors:
        super().__enter__()
        self._hooks = [
            layer.register_forward_pre_hook(partial(self._before, index), with_kwargs=True)
            for index, layer in enumerate(self.layers)
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(kind, error, trace)

    def put(self, rescale_factors: Tensor, attention_factor: Tensor | float) -> None:
        shape = (len(self.layers), len(self.rope.inv_freq))
        self._inv_freq = (self.rope.inv_freq / rescale_factors).expand(shape).float()
        self._scaling = torch.as_tensor(attention_factor).expand(shape[:1]).float()

    def use(self, method: RopeScaling | Layered | None) -> None:
        if method is None:
            self.put(torch.ones_like(self.rope.inv_freq), 1.0)
        else:
            self.put(method.rescale_factors(self.rope), method.attention_scaling(self.rope))

    def _before(self, index: int, layer: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        angles = kwargs["position_ids"][..., None].float() * self._inv_freq[index]
        angles = torch.cat([angles, angles], dim=-1)
        cos_sin = angles.cos() * self._scaling[index], angles.sin() * self._scaling[index]
        return args, {**kwargs, "position_embeddings": cos_sin}


@contextmanager
def learned_by_layer(n_layers: int) -> Iterator[None]:
    """The fit with four numbers for each layer."""

    class ByLayer(gradient.Ramp):
        def __init__(self, rope: RopeGeometry, start: RopeScaling) -> None:
            super().__init__(rope, start)
            self.numbers = torch.zeros(n_layers, 4, dtype=torch.float64, requires_grad=True)

    former = gradient._as_method
    gradient._as_method = lambda factors, attention, rope, factor: Layered(factors, attention)  # type: ignore[assignment]
    try:
        with learned_as(ByLayer):
            yield
    finally:
        gradient._as_method = former


if __name__ == "__main__":
    main()
