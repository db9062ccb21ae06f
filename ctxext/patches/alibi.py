"""ALiBi in a live model: BLOOM, MPT, Falcon, and custom modules that hold their slopes in a buffer.

The three families store no slopes: each recomputes its bias in every forward pass in module-level functions, BLOOM
in two ways. So the bias is scaled where the blocks receive it.
"""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from ctxext.core.edit import Edit
from ctxext.core.encoding import ModuleEncoding
from ctxext.core.patch import FormulaProof
from ctxext.encodings.alibi import alibi_bias, alibi_slopes
from ctxext.methods import ContextMethod, SlopeScaling
from ctxext.patches.module_patch import ModulePatch, published_length, stated_length

LONGEST_PROBE = 4096  # tokens; the longest pass run to check beyond a limit


class Family(NamedTuple):
    """How a model type passes its bias on.

    Attributes:
        keywords: the keyword arguments of its blocks and their attention that carry the bias.
        length: the config field with the trained length, and the published length if it is absent.
        limit: whether that length is also a limit.
        dtype: the lowest precision in which the family computes the bias.
    """

    keywords: tuple[str, ...]
    length: str
    published: str
    limit: bool = False
    dtype: torch.dtype = torch.float32


FAMILIES = {
    "bloom": Family(("alibi",), "seq_length", "bigscience/bloom, sequence length 2048"),
    # Under sdpa its attention reads only the mask; eager attention adds both, so the bias counts twice.
    "falcon": Family(
        ("alibi", "attention_mask"), "max_position_embeddings", "tiiuae/falcon-rw, 2048", dtype=torch.bfloat16
    ),
    "mpt": Family(("position_bias",), "max_seq_len", "mosaicml/mpt-7b, 2048", limit=True),
}


class ScaledBias:
    """Mixin for a block's class: multiplies each head's bias by the ratio of its new to its trained slope.

    A class, not a hook: a model compiled earlier never calls a new hook, but notices a changed class.
    """

    bias_keywords: tuple[str, ...]
    bias_ratios: Float[Tensor, " head"]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        scaled = {name: self.scaled(kwargs[name]) for name in self.bias_keywords}
        return super().forward(*args, **{**kwargs, **scaled})  # type: ignore[misc]

    def scaled(self, bias: Float[Tensor, "*batch heads query key"]) -> Float[Tensor, "*batch heads query key"]:
        """The batch may be merged into the heads, batch first. Half precision is multiplied in float32."""
        if self.bias_ratios.device != bias.device:
            self.bias_ratios = self.bias_ratios.to(bias.device)  # not a buffer, so it is never cast
        by_head = bias.reshape(-1, len(self.bias_ratios), *bias.shape[-2:])
        scaled = (by_head * self.bias_ratios[:, None, None]).to(bias.dtype).view_as(bias)
        # Falcon's bias includes the mask: masked entries must keep the lowest value.
        return torch.where(bias == torch.finfo(bias.dtype).min, bias, scaled)


class ScaleBias(ModulePatch["AlibiEncoding", SlopeScaling]):
    """Each block scales the bias that it receives."""

    @property
    def n_probe(self) -> int:
        return min(super().n_probe, self.encoding.limit or LONGEST_PROBE)

    def write(self, edit: Edit, before: Any) -> None:
        trained, family = alibi_slopes(self.encoding.n_heads), self.encoding.family
        ratios = (self.method.slopes(trained) / trained).float()
        for path in self.encoding.paths:
            edit.exchange_class(path, ScaledBias)
            edit.set_attribute(path, "bias_keywords", family.keywords)
            edit.set_attribute(path, "bias_ratios", ratios.clone())
        if family.limit:
            for path in self.encoding.readers:
                edit.set_attribute(path, "max_seq_length", self.target_length)

    def watched(self, model: nn.Module) -> list[tuple[str, str | None]]:
        return list(itertools.product(self.encoding.readers, self.encoding.family.keywords))

    def prove(self, model: nn.Module, before: Any) -> FormulaProof:
        _, stock = before
        short = self.inputs(model, self.n_probe)
        # With a mask, BLOOM computes its bias in another way.
        probes = [short, {**short, "attention_mask": torch.ones_like(short["input_ids"])}]
        limit = self.encoding.limit
        if limit is not None and limit < LONGEST_PROBE and self.method.factor > 1:
            probes.append(self.inputs(model, limit + 1))
        errors, effects = [], []
        for inputs in probes:
            seen, output = self.look(model, inputs)
            n_tokens = inputs["input_ids"].shape[1]
            errors.append(self._error(model, seen, n_tokens))
            if n_tokens == self.n_probe:
                effects.append(float((output - stock).abs().max()))
        return FormulaProof(max(errors), min(effects), n_tokens)

    def _error(self, model: nn.Module, seen: list[list[Any]], n_tokens: int) -> float:
        """Largest error of the bias that any attention received for the last query, beyond the dtype's rounding."""
        positions = torch.arange(n_tokens)
        formula = alibi_bias(self.method.slopes(alibi_slopes(self.encoding.n_heads)), positions[-1:], positions)[:, 0]
        worst = 0.0
        for (path, keyword), (received,) in zip(self.watched(model), seen):
            # Falcon adds its mask after dividing the logits by sqrt(head_dim), and divides it by that too.
            scale: Any = model.get_submodule(path).inv_norm_factor if keyword == "attention_mask" else 1.0
            want, got = scale * formula, received.flatten(0, -3)[:, -1, -n_tokens:].double().cpu()
            got = got - got[:, -1:]  # Softmax ignores an additive constant, which differs between families.
            eps = max(torch.finfo(self.encoding.family.dtype).eps, torch.finfo(received.dtype).eps)
            worst = max(worst, float(((got - want).abs() - eps * want.abs().max()).max()))
        return worst


@dataclass(frozen=True)
class AlibiEncoding(ModuleEncoding):
    """ALiBi of a family, whose bias is scaled as each block receives it.

    Attributes:
        readers: the attention modules, which receive the bias from the blocks.
        n_heads: number of heads, which determines the trained slopes in these families.
    """

    name: ClassVar[str] = "alibi"
    mechanism = ScaleBias
    why_not_portable: ClassVar[str | None] = "its slopes follow from the number of heads alone"

    readers: tuple[str, ...]
    n_heads: int
    family: Family

    def notes(self, method: ContextMethod) -> tuple[str, ...]:
        if self.family.dtype == torch.float32:
            return ()
        return ("This family computes its bias in bfloat16 before it is scaled, whatever the model's dtype.",)


class WriteSlopes(ModulePatch["SlopeEncoding", SlopeScaling]):
    """The buffers hold the scaled slopes."""

    def write(self, edit: Edit, before: Any) -> None:
        trained, _ = before
        for path, name, slopes in zip(self.encoding.paths, self.encoding.buffers, trained):
            edit.set_tensor(path, name, self.method.slopes(slopes))

    def held(self, model: nn.Module) -> list[Float64[Tensor, " head"]]:
        """The slopes in the buffers."""
        where = zip(self.encoding.paths, self.encoding.buffers)
        return [model.get_submodule(path).get_buffer(name).double().clone() for path, name in where]

    def error(self, model: nn.Module, seen: list[list[Any]], held: list[Float64[Tensor, " head"]]) -> float:
        return max(float((now - self.method.slopes(old)).abs().max()) for now, old in zip(self.held(model), held))


@dataclass(frozen=True)
class SlopeEncoding(ModuleEncoding):
    """Modules that hold one slope per head in a persistent buffer; `buffers` names it for each of `paths`."""

    name: ClassVar[str] = "alibi"
    mechanism = WriteSlopes
    changes_weights: ClassVar[bool] = True

    buffers: tuple[str, ...]


def find(model: nn.Module, text_config: Any) -> ModuleEncoding | None:
    """ALiBi of a BLOOM, MPT or Falcon, or of any model with a buffer `slopes` or `alibi_slopes`, one per head."""
    family = FAMILIES.get(text_config.model_type)
    if family is None:
        return _find_buffers(model, text_config)
    if text_config.model_type == "falcon" and not text_config.alibi:
        return None
    takers = [path for path, module in model.named_modules() if _takes(module, family.keywords)]
    blocks = tuple(path for path in takers if not any(path.startswith(f"{other}.") for other in takers))
    stated = stated_length(text_config, family.length) or published_length(2048, family.published)
    return AlibiEncoding(
        paths=blocks,
        limit=stated["trained_length"] if family.limit else None,
        readers=tuple(path for path in takers if path not in blocks),
        n_heads=text_config.num_attention_heads,
        family=family,
        **stated,
    )


def _takes(module: nn.Module, keywords: tuple[str, ...]) -> bool:
    forwards = [vars(cls)["forward"] for cls in type(module).__mro__ if "forward" in vars(cls)]
    return any(set(keywords) <= set(inspect.signature(forward).parameters) for forward in forwards)


def _find_buffers(model: nn.Module, text_config: Any) -> SlopeEncoding | None:
    found = [
        (path, name)
        for path, module in model.named_modules()
        for name in ("slopes", "alibi_slopes")
        if name in module._buffers and name not in module._non_persistent_buffers_set
        if module.get_buffer(name).shape == (text_config.num_attention_heads,)
    ]
    stated = stated_length(text_config, "max_position_embeddings")
    if not found or not stated:
        return None
    paths, buffers = zip(*found)
    return SlopeEncoding(paths=paths, buffers=buffers, **stated)
