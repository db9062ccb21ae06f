"""Relative positions in a live model: T5's bucketed bias, XLNet's sines of distances, and Shaw's distance vectors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float64, Int, Shaped
from torch import Tensor, nn

from ctxext.core.edit import Edit
from ctxext.core.encoding import ModuleEncoding, stated_length
from ctxext.core.patch import FormulaProof, Patch
from ctxext.core.probing import probe_inputs, run, seen_by
from ctxext.encodings.learned import rows_at
from ctxext.encodings.relative_bias import clipped_distance, relative_position_bucket
from ctxext.encodings.sinusoidal import sinusoidal_table
from ctxext.methods import BucketScaling, ContextMethod, DistanceScaling

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


@dataclass(frozen=True)
class BucketEncoding(ModuleEncoding):
    """Attention modules that look up a bias by the bucket of the distance.

    Attributes:
        paths: every module that holds the maximum distance, including those without their own bias.
        max_distance: the trained one, in tokens.
        length_field: the config field with the trained length; None where the config has none.
    """

    name: ClassVar[str] = "t5"
    default_method: ClassVar[str] = "bucket_scaling"

    max_distance: int
    length_field: str | None

    def updates(self, method: ContextMethod, target_length: int) -> dict[str, Any]:
        assert isinstance(method, BucketScaling)
        length = {} if self.length_field is None else {self.length_field: target_length}
        return {MAX_DISTANCE: method.max_distance(self.max_distance), **length}

    def patch(self, method: ContextMethod, target_length: int) -> Patch:
        assert isinstance(method, BucketScaling)
        return WidenBuckets(self, method)


@dataclass(frozen=True)
class WidenBuckets(Patch):
    """The buckets cover a larger distance."""

    encoding: BucketEncoding
    method: BucketScaling

    def write(self, edit: Edit, before: Any) -> None:
        for path in self.encoding.paths:
            edit.set_attribute(path, MAX_DISTANCE, self._max_distance)

    def observe(self, model: nn.Module) -> Tensor:
        return run(model, probe_inputs(model, self._n_probe))

    def prove(self, model: nn.Module, before: Tensor) -> FormulaProof:
        paths = self.encoding.paths
        tables = [(path, name) for path in paths for name in BIASES if hasattr(model.get_submodule(path), name)]
        with ExitStack() as stack:
            seen = [stack.enter_context(seen_by(model, f"{path}.{name}")) for path, name in tables]
            effect = float((run(model, probe_inputs(model, self._n_probe)) - before).abs().max())
        error = 0.0
        for (path, name), calls in zip(tables, seen):
            module: Any = model.get_submodule(path)
            if not calls:
                return FormulaProof(float("inf"), effect, self._n_probe)  # A bias that no module reads.
            looked_up = calls[0].reshape(-1, *calls[0].shape[-3:])[0]
            relative = _relative_position(module, name, *looked_up.shape[:2])
            # The family computes logarithms in float32, so a bucket may begin one token early or late.
            both_sides = not getattr(module, "is_decoder", True)  # Pix2Struct has only a decoder.
            near = [
                getattr(module, name).weight[
                    relative_position_bucket(
                        relative + off, both_sides, module.relative_attention_num_buckets, self._max_distance
                    ).to(looked_up.device)
                ]
                for off in (-1, 0, 1)
            ]
            off = torch.stack([(looked_up - bias).abs().amax(-1) for bias in near]).amin(0)
            error = max(error, float(off.max()))
        return FormulaProof(error, effect, self._n_probe)

    @property
    def _max_distance(self) -> int:
        return self.method.max_distance(self.encoding.max_distance)

    @property
    def _n_probe(self) -> int:
        """Long enough for distances to change buckets."""
        return min(2 * self.encoding.max_distance, LONGEST_PROBE)


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
            f"{type(model).__name__} adds up biases of the distance in the text and on the page in its encoder "
            "(relative_bias_args), which this patch does not know."
        )
    stated = stated_length(text_config, "n_positions", "max_position_embeddings")
    published, paper = PUBLISHED.get(text_config.model_type, (512, "T5; none is known for this family"))
    return BucketEncoding(
        paths=tuple(path for path, _ in holders),
        trained_length=published if stated is None else stated[1],
        source=f"as published: {paper}" if stated is None else f"{stated[0]} of the config",
        limit=None,
        max_distance=getattr(text_config, MAX_DISTANCE),
        length_field=None if stated is None else stated[0],
    )


# ------------------------------------------------------------------------------------- relative representations


def _seen_at(method: DistanceScaling, distances: Shaped[Tensor, "*batch"]) -> Float64[Tensor, "*batch"]:
    """Apply the method to signed distances."""
    return distances.sign().double() * method.distances(distances.abs().double())


@dataclass
class ScaledSines:
    """Replaces XLNet's `positional_embedding`: the sines of the method's distances."""

    method: DistanceScaling
    original: Callable[..., Tensor]

    def __call__(self, pos_seq: Tensor, inv_freq: Tensor, bsz: int | None = None) -> Tensor:
        return self.original(_seen_at(self.method, pos_seq).to(pos_seq.dtype), inv_freq, bsz)


@dataclass(frozen=True)
class RelativeSines(ModuleEncoding):
    """XLNet, which recomputes the sines of all distances in every forward pass.

    Attributes:
        readers: the layers, which receive the sines.
        clamp_len: the distance in tokens beyond which all are equal; -1 for none.
    """

    name: ClassVar[str] = "relative"
    default_method: ClassVar[str] = "distance_interpolation"
    why_not_portable: ClassVar[str | None] = "its sines are made again in every forward pass, from no parameter"

    readers: tuple[str, ...]
    clamp_len: int

    def updates(self, method: ContextMethod, target_length: int) -> dict[str, Any]:
        return {}

    def patch(self, method: ContextMethod, target_length: int) -> Patch:
        assert isinstance(method, DistanceScaling)
        return ScaleDistances(self, method, target_length)


@dataclass(frozen=True)
class ScaleDistances(Patch):
    """The sines are those of the method's distances."""

    encoding: RelativeSines
    method: DistanceScaling
    target_length: int

    def write(self, edit: Edit, before: Any) -> None:
        (path,) = self.encoding.paths
        module: Any = edit.model.get_submodule(path)
        edit.set_attribute(path, "positional_embedding", ScaledSines(self.method, type(module).positional_embedding))
        if self.encoding.clamp_len > 0:
            edit.set_attribute(path, "clamp_len", self._clamp_len)

    def observe(self, model: nn.Module) -> Tensor:
        return run(model, probe_inputs(model, self._n_probe))

    def prove(self, model: nn.Module, before: Tensor) -> FormulaProof:
        n_tokens = self._n_probe
        with ExitStack() as stack:
            seen = [stack.enter_context(seen_by(model, path, "r")) for path in self.encoding.readers]
            effect = float((run(model, probe_inputs(model, n_tokens)) - before).abs().max())
        error = 0.0
        for (received,) in seen:
            # From the number of keys down to 1 - queries, or to 0 for causal attention.
            distances = n_tokens - torch.arange(len(received))
            if self.encoding.clamp_len > 0:
                distances = distances.clamp(-self._clamp_len, self._clamp_len)
            want = sinusoidal_table(_seen_at(self.method, distances), received.shape[-1], layout="halves")
            error = max(error, float((received[:, 0].double().cpu() - want.to(received.dtype)).abs().max()))
        return FormulaProof(error, effect, n_tokens)

    @property
    def _clamp_len(self) -> int:
        return round(self.encoding.clamp_len * self.target_length / self.encoding.trained_length)

    @property
    def _n_probe(self) -> int:
        return 64 if self.encoding.clamp_len < 1 else min(2 * self.encoding.clamp_len, LONGEST_PROBE)


SIDES = ("left_max_position_embeddings", "right_max_position_embeddings")


@dataclass(frozen=True)
class DistanceTable(ModuleEncoding):
    """Shaw's vectors in speech encoders, one for each distance up to a number of frames to the left and right.

    Its length is the distance to the left from which all share a vector.
    """

    name: ClassVar[str] = "relative"
    default_method: ClassVar[str] = "distance_interpolation"
    changes_weights: ClassVar[bool] = True

    n_right: int

    def updates(self, method: ContextMethod, target_length: int) -> dict[str, Any]:
        return dict(self.reach(target_length))

    def reach(self, target_length: int) -> dict[str, int]:
        """The largest distances with their own vector."""
        return dict(zip(SIDES, (target_length, round(self.n_right * target_length / self.trained_length))))

    def patch(self, method: ContextMethod, target_length: int) -> Patch:
        assert isinstance(method, DistanceScaling)
        return GrowDistances(self, method, target_length)


@dataclass(frozen=True)
class GrowDistances(Patch):
    """A vector for each distance up to the target."""

    encoding: DistanceTable
    method: DistanceScaling
    target_length: int

    def write(self, edit: Edit, before: Any) -> None:
        for path in self.encoding.paths:
            table = f"{path}.distance_embedding"
            rows = self._rows(edit.model.get_submodule(table).get_parameter("weight").detach())
            edit.set_tensor(table, "weight", rows)
            edit.set_attribute(table, "num_embeddings", len(rows))
            for side in SIDES:
                edit.set_attribute(path, side, self._reach[side])

    @property
    def _reach(self) -> dict[str, int]:
        return self.encoding.reach(self.target_length)

    def _rows(self, trained: Shaped[Tensor, "distance dim"]) -> Float64[Tensor, "longer dim"]:
        left, right = (self._reach[side] for side in SIDES)
        return rows_at(trained, _seen_at(self.method, torch.arange(-left, right + 1)) + self.encoding.trained_length)

    def observe(self, model: nn.Module) -> Any:
        tables = [
            model.get_parameter(f"{path}.distance_embedding.weight").detach().clone() for path in self.encoding.paths
        ]
        return tables, run(model, _frames(model, self._n_probe))

    def prove(self, model: nn.Module, before: Any) -> FormulaProof:
        trained, output = before
        with ExitStack() as stack:
            seen = [stack.enter_context(seen_by(model, f"{path}.distance_embedding")) for path in self.encoding.paths]
            effect = float((run(model, _frames(model, self._n_probe)) - output).abs().max())
        error = 0.0
        for old, calls in zip(trained, seen):
            frames = torch.arange(len(calls[0]))
            index = clipped_distance(frames, frames, *(self._reach[side] for side in SIDES))
            want = self._rows(old).to(old.dtype)[index.to(old.device)]
            error = max(error, float((calls[0] - want).abs().max()))
        return FormulaProof(error, effect, self._n_probe)

    @property
    def _n_probe(self) -> int:
        return min(2 * self.encoding.trained_length, LONGEST_PROBE)


def _frames(model: nn.Module, n_frames: int) -> dict[str, Tensor]:
    config: Any = model.config
    generator = torch.Generator().manual_seed(0)
    parameter = next(model.parameters())
    features = torch.randn(1, n_frames, config.feature_projection_input_dim, generator=generator)
    return {"input_features": features.to(parameter.device, parameter.dtype)}


def _find_sines(model: nn.Module) -> RelativeSines | None:
    names = ("relative_positional_encoding", "positional_embedding", "clamp_len")
    found = [(path, module) for path, module in model.named_modules() if all(hasattr(module, n) for n in names)]
    if len(found) != 1:
        return None
    ((path, module),) = found
    return RelativeSines(
        paths=(path,),
        trained_length=512,
        source="as published: Yang et al., 2019",
        limit=None,
        readers=tuple(_join(path, f"layer.{i}") for i in range(len(module.get_submodule("layer")._modules))),
        clamp_len=int(module.clamp_len),
    )


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
        source=f"{SIDES[0]} of the config: the farthest distance with a vector of its own",
        limit=None,
        n_right=right,
    )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def find(model: nn.Module, text_config: Any) -> ModuleEncoding | None:
    """T5's buckets, XLNet's sines, or the distance vectors of a pure speech encoder.

    Search for sinusoidal tables first: SeamlessM4T-v2 has both, and its context is its text decoder's.

    Raises:
        ValueError: the model has other relative encodings besides T5's buckets.
    """
    return _find_buckets(model, text_config) or _find_sines(model) or _find_table(model)
