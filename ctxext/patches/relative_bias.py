"""Relative positions in a live model: T5's bucketed bias, XLNet's sines of distances, and Shaw's distance vectors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float64, Int, Shaped
from torch import Tensor, nn

from ctxext.core.edit import Edit
from ctxext.core.encoding import ModuleEncoding
from ctxext.encodings.learned import rows_at
from ctxext.encodings.relative_bias import clipped_distance, relative_position_bucket
from ctxext.encodings.sinusoidal import sinusoidal_table
from ctxext.methods import BucketScaling, ContextMethod, DistanceScaling
from ctxext.patches.module_patch import ModulePatch, published_length, stated_length

LONGEST_PROBE = 1024  # tokens

# --------------------------------------------------------------------------------------------------- T5

MAX_DISTANCE = "relative_attention_max_distance"
BIASES = ("relative_attention_bias", "global_relative_attention_bias")
# The default of fields that configs mostly omit.
PUBLISHED = {
    "t5": (512, "Raffel et al., 2020, section 3.1.2"),
    "mt5": (1024, "Xue et al., 2021, section 3.2"),
    "longt5": (4096, "Guo et al., 2022, section 4.1"),
}


class WidenBuckets(ModulePatch["BucketEncoding", BucketScaling]):
    """The buckets cover a larger distance."""

    @property
    def n_probe(self) -> int:
        """Enough for distances to change buckets."""
        return min(2 * self.encoding.max_distance, LONGEST_PROBE)

    @property
    def _max_distance(self) -> int:
        return self.method.max_distance(self.encoding.max_distance)

    def write(self, edit: Edit, before: Any) -> None:
        for path in self.encoding.paths:
            edit.set_attribute(path, MAX_DISTANCE, self._max_distance)

    def watched(self, model: nn.Module) -> list[tuple[str, str | None]]:
        paths = self.encoding.paths
        return [
            (f"{path}.{name}", None) for path in paths for name in BIASES if hasattr(model.get_submodule(path), name)
        ]

    def error(self, model: nn.Module, seen: list[list[Any]], held: Any) -> float:
        worst = 0.0
        for (table, _), calls in zip(self.watched(model), seen):
            if not calls:
                return float("inf")  # a bias that no module reads
            path, _, name = table.rpartition(".")
            module: Any = model.get_submodule(path)
            looked_up = calls[0].reshape(-1, *calls[0].shape[-3:])[0]
            relative = _relative_position(module, name, *looked_up.shape[:2])
            both_sides = not getattr(module, "is_decoder", True)  # Pix2Struct has only a decoder.
            errors = []
            # The family computes logarithms in float32, so a bucket may begin one token early or late.
            for off in (-1, 0, 1):
                bucket = relative_position_bucket(
                    relative + off, both_sides, module.relative_attention_num_buckets, self._max_distance
                )
                bias = getattr(module, name).weight[bucket.to(looked_up.device)]
                errors.append((looked_up - bias).abs().amax(-1))
            worst = max(worst, float(torch.stack(errors).amin(0).max()))
        return worst


@dataclass(frozen=True)
class BucketEncoding(ModuleEncoding):
    """Attention modules that look up a bias by the bucket of the distance.

    Attributes:
        paths: every module that holds the maximum distance, including those without their own bias.
        max_distance: the trained one, in tokens.
    """

    name: ClassVar[str] = "t5"
    mechanism = WidenBuckets

    max_distance: int

    def updates(self, method: ContextMethod, target_length: int) -> dict[str, Any]:
        assert isinstance(method, BucketScaling)
        return {MAX_DISTANCE: method.max_distance(self.max_distance), **super().updates(method, target_length)}


def _relative_position(module: Any, name: str, n_queries: int, n_keys: int) -> Int[Tensor, "query key"]:
    """key - query for each pair of the bias at `name`, in tokens or in LongT5's global blocks."""
    query, key = torch.arange(n_queries)[:, None], torch.arange(n_keys)
    if name == "global_relative_attention_bias":
        block: int = module.global_block_size
        return key - query // block
    # LongT5's local attention: a block of queries and, as keys, the block before it, itself and the one after it.
    before: int = getattr(module, "block_len", 0)
    return key - query - before


def _find_buckets(model: nn.Module, text_config: Any) -> BucketEncoding | None:
    holders = [(path, module) for path, module in model.named_modules() if hasattr(module, MAX_DISTANCE)]
    if not any(getattr(module, "has_relative_attention_bias", False) for _, module in holders):
        return None
    if getattr(text_config, "relative_bias_args", None):
        raise ValueError(
            f"{type(model).__name__} sums biases for text and page distances in its encoder (relative_bias_args), "
            "which ctxext does not support."
        )
    published = PUBLISHED.get(text_config.model_type, (512, "T5; none is known for this family"))
    stated = stated_length(text_config, "n_positions", "max_position_embeddings") or published_length(*published)
    paths = tuple(path for path, _ in holders)
    return BucketEncoding(paths=paths, max_distance=getattr(text_config, MAX_DISTANCE), **stated)


# ------------------------------------------------------------------------------------- relative representations


def _seen_at(method: DistanceScaling, distances: Shaped[Tensor, "*batch"]) -> Float64[Tensor, "*batch"]:
    """Apply the method to signed distances."""
    return distances.sign().double() * method.distances(distances.abs().double())


def _scaled_sines(
    method: DistanceScaling, original: Callable[..., Tensor], pos_seq: Tensor, inv_freq: Tensor, bsz: int | None = None
) -> Tensor:
    """Replaces XLNet's `positional_embedding`: the sines of the method's distances."""
    return original(_seen_at(method, pos_seq).to(pos_seq.dtype), inv_freq, bsz)


class ScaleDistances(ModulePatch["RelativeSines", DistanceScaling]):
    """The sines are those of the method's distances."""

    @property
    def n_probe(self) -> int:
        clamp_len = self.encoding.clamp_len
        return super().n_probe if clamp_len < 1 else min(2 * clamp_len, LONGEST_PROBE)

    @property
    def _clamp_len(self) -> int:
        return round(self.encoding.clamp_len * self.target_length / self.encoding.trained_length)

    def write(self, edit: Edit, before: Any) -> None:
        (path,) = self.encoding.paths
        stock: Any = type(edit.model.get_submodule(path))
        scaled = functools.partial(_scaled_sines, self.method, stock.positional_embedding)
        edit.set_attribute(path, "positional_embedding", scaled)
        if self.encoding.clamp_len > 0:
            edit.set_attribute(path, "clamp_len", self._clamp_len)

    def watched(self, model: nn.Module) -> list[tuple[str, str | None]]:
        return [(path, "r") for path in self.encoding.readers]

    def error(self, model: nn.Module, seen: list[list[Any]], held: Any) -> float:
        worst = 0.0
        for (received,) in seen:
            # From the number of keys down to 1 - queries, or to 0 for causal attention.
            distances = self.n_probe - torch.arange(len(received))
            if self.encoding.clamp_len > 0:
                distances = distances.clamp(-self._clamp_len, self._clamp_len)
            want = sinusoidal_table(_seen_at(self.method, distances), received.shape[-1], layout="halves")
            worst = max(worst, float((received[:, 0].double().cpu() - want.to(received.dtype)).abs().max()))
        return worst


@dataclass(frozen=True)
class RelativeSines(ModuleEncoding):
    """XLNet, which recomputes the sines of all distances in every forward pass.

    Attributes:
        readers: the layers, which receive the sines.
        clamp_len: the distance in tokens beyond which all are equal; -1 for none.
    """

    name: ClassVar[str] = "relative"
    mechanism = ScaleDistances
    why_not_portable: ClassVar[str | None] = "its sines are recomputed in every forward pass and depend on no parameter"

    readers: tuple[str, ...]
    clamp_len: int


def _find_sines(model: nn.Module) -> RelativeSines | None:
    names = ("relative_positional_encoding", "positional_embedding", "clamp_len")
    found = [(path, module) for path, module in model.named_modules() if all(hasattr(module, n) for n in names)]
    if len(found) != 1:
        return None
    ((path, module),) = found
    start = f"{path}." if path else ""
    return RelativeSines(
        paths=(path,),
        readers=tuple(f"{start}layer.{i}" for i in range(len(module.get_submodule("layer")._modules))),
        clamp_len=int(module.clamp_len),
        **published_length(512, "Yang et al., 2019"),
    )


SIDES = ("left_max_position_embeddings", "right_max_position_embeddings")


class GrowDistances(ModulePatch["DistanceTable", DistanceScaling]):
    """A vector for each distance up to the target."""

    @property
    def n_probe(self) -> int:
        return min(2 * self.encoding.trained_length, LONGEST_PROBE)

    @property
    def _reach(self) -> dict[str, int]:
        return self.encoding.updates(self.method, self.target_length)

    def inputs(self, model: nn.Module, n_tokens: int) -> dict[str, Any]:
        """Random frames."""
        config: Any = model.config
        generator, parameter = torch.Generator().manual_seed(0), next(model.parameters())
        features = torch.randn(1, n_tokens, config.feature_projection_input_dim, generator=generator)
        return {"input_features": features.to(parameter.device, parameter.dtype)}

    def held(self, model: nn.Module) -> list[Tensor]:
        """The tables."""
        paths = self.encoding.paths
        return [model.get_parameter(f"{path}.distance_embedding.weight").detach().clone() for path in paths]

    def _rows(self, trained: Shaped[Tensor, "distance dim"]) -> Float64[Tensor, "longer dim"]:
        left, right = self._reach.values()
        return rows_at(trained, _seen_at(self.method, torch.arange(-left, right + 1)) + self.encoding.trained_length)

    def write(self, edit: Edit, before: Any) -> None:
        trained, _ = before
        for path, old in zip(self.encoding.paths, trained):
            rows = self._rows(old)
            edit.set_tensor(f"{path}.distance_embedding", "weight", rows)
            edit.set_attribute(f"{path}.distance_embedding", "num_embeddings", len(rows))
            for side, reach in self._reach.items():
                edit.set_attribute(path, side, reach)

    def watched(self, model: nn.Module) -> list[tuple[str, str | None]]:
        return [(f"{path}.distance_embedding", None) for path in self.encoding.paths]

    def error(self, model: nn.Module, seen: list[list[Any]], held: list[Tensor]) -> float:
        worst = 0.0
        for old, calls in zip(held, seen):
            frames = torch.arange(len(calls[0]))
            index = clipped_distance(frames, frames, *self._reach.values())
            want = self._rows(old).to(old.dtype)[index.to(old.device)]
            worst = max(worst, float((calls[0] - want).abs().max()))
        return worst


@dataclass(frozen=True)
class DistanceTable(ModuleEncoding):
    """Shaw's vectors in speech encoders, one for each distance up to a number of frames to the left and right.

    Its length is the distance to the left from which all share a vector.
    """

    name: ClassVar[str] = "relative"
    mechanism = GrowDistances
    changes_weights: ClassVar[bool] = True

    n_right: int

    def updates(self, method: ContextMethod, target_length: int) -> dict[str, Any]:
        """The largest distances with their own vector."""
        return dict(zip(SIDES, (target_length, round(self.n_right * target_length / self.trained_length))))


def _find_table(model: nn.Module) -> DistanceTable | None:
    found = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(getattr(module, "distance_embedding", None), nn.Embedding)
        if all(hasattr(module, side) for side in SIDES)
    ]
    reaches = {tuple(int(getattr(module, side)) for side in SIDES) for _, module in found}
    if len(reaches) != 1 or getattr(model, "main_input_name", None) != "input_features":
        return None
    ((left, right),) = reaches
    return DistanceTable(
        paths=tuple(path for path, _ in found),
        trained_length=left,
        source=f"{SIDES[0]} of the config: the largest distance with its own vector",
        n_right=right,
    )


def find(model: nn.Module, text_config: Any) -> ModuleEncoding | None:
    """T5's buckets, XLNet's sines, or the distance vectors of a pure speech encoder.

    Search for sinusoidal tables first: SeamlessM4T-v2 has both, and its context is its text decoder's.

    Raises ValueError if the model has other relative encodings besides T5's buckets.
    """
    return _find_buckets(model, text_config) or _find_sines(model) or _find_table(model)
