"""How much a method that rotates inside attention changes, from its formula alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ctxext.encodings.rope import RopeGeometry
from ctxext.methods.contract import Branch, PositionRemapping, RopeMethod, RopeScaling

# Float64 angles at a million tokens are exact to this.
ROUNDING = 1e-9


def score_change(method: RopeMethod, rope: RopeGeometry, target_length: int) -> float:
    """The largest change of what one pair of dimensions contributes to an attention score, relative to its size.

    Over a grid of queries and keys within `target_length` tokens, and all pairs; 0 if the method changes nothing.
    """
    times, method = method.query_scaling, method.untempered
    start = method.start_tokens if isinstance(method, RopeScaling) else 0
    trained = rope.original_max_position_embeddings
    edges = torch.tensor([1, start - 1, start, trained - 1, trained])
    spread = torch.linspace(0, target_length - 1, 64).long()
    places = torch.cat([spread, edges.clamp(0, target_length - 1)]).sort().values
    query, key = places[:, None], places[None, :]
    angle = (query - key)[..., None] * rope.inv_freq
    queries = times(rope, places)
    size = torch.ones(len(places), 1, 1).double() if queries is None else queries.double()[:, None, None]
    if isinstance(method, PositionRemapping):
        turned = method.distance(rope, query, key)[..., None] * rope.inv_freq
    else:
        assert isinstance(method, RopeScaling)
        rungs = method.ladder(rope)
        lengths = rungs[torch.searchsorted(rungs, places + 1).clamp(max=len(rungs) - 1)]
        inv_freq, scaling = method.scaled(
            rope, torch.full_like(places, target_length) if method.of_the_call else lengths
        )
        inv_freq, scaling = inv_freq[:, None], scaling[:, None, None] / rope.attention_factor
        first_query, first_key = (query < start)[..., None], (key < start)[..., None]
        one = torch.ones_like(scaling)
        size = size * torch.where(first_query, one, scaling) * torch.where(first_key, one, scaling)
        turned = query[..., None] * torch.where(first_query, rope.inv_freq, inv_freq)
        turned = turned - key[..., None] * torch.where(first_key, rope.inv_freq, inv_freq)
    change = torch.polar(size.expand_as(turned).contiguous(), turned) - torch.polar(torch.ones_like(angle), angle)
    return float(change.abs()[key.expand(len(places), -1) <= query].max())


@dataclass(frozen=True, kw_only=True)
class _Unscaled(RopeScaling):
    """The ladder and start tokens of a method, with its λ and multiplier at 1."""

    name: ClassVar[str] = "unscaled"
    of: RopeScaling

    @property
    def of_the_call(self) -> bool:  # type: ignore[override]
        return self.of.of_the_call

    @property
    def start_tokens(self) -> int:
        return self.of.start_tokens

    def ladder(self, rope: RopeGeometry) -> Tensor:
        return self.of.ladder(rope)

    def rescale_factors(self, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
        return torch.ones_like(self.of.rescale_factors(rope, length))


@dataclass(frozen=True, kw_only=True)
class _Unmapped(PositionRemapping):
    """The branches of a method, with every token at its own position."""

    name: ClassVar[str] = "unmapped"
    of: PositionRemapping

    def branches(self, rope: RopeGeometry) -> tuple[Branch, ...]:
        return tuple(replace(each, query=_as_it_is, key=_as_it_is) for each in self.of.branches(rope))

    def reach(self, rope: RopeGeometry) -> float:
        return self.of.reach(rope)

    def query_scaling(self, rope: RopeGeometry, positions: Tensor) -> Tensor | None:
        times = self.of.query_scaling(rope, positions)
        return None if times is None else torch.ones_like(times)


def _as_it_is(positions: Tensor) -> Tensor:
    return positions


def neutral(method: RopeMethod) -> RopeMethod:
    """A method that changes nothing and is computed like `method`, so that a difference is the method's effect."""
    if method.untempered is not method:
        return replace(method, base=neutral(method.untempered), beta=0.0)  # type: ignore[call-arg]
    if isinstance(method, PositionRemapping):
        return _Unmapped(factor=method.factor, of=method)
    assert isinstance(method, RopeScaling)
    return _Unscaled(factor=method.factor, of=method)
