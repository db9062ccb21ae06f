"""ALiBi in a live model: BLOOM, MPT, Falcon, and custom modules that hold their slopes in a buffer.

The three families store no slopes: each recomputes its bias in every forward pass (BLOOM on two paths) in module-level
    functions. So the bias is scaled where the blocks receive it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from ctxext.core.edit import Edit
from ctxext.core.encoding import ModuleEncoding, stated_length
from ctxext.core.patch import FormulaProof, Patch
from ctxext.core.probing import probe_inputs, run, seen_by
from ctxext.encodings.alibi import alibi_bias, alibi_slopes
from ctxext.methods import ContextMethod, SlopeScaling

PROBE = 64  # tokens
LONGEST_PROBE = 4096  # tokens; longest pass run to check beyond a limit


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
            self.bias_ratios = self.bias_ratios.to(bias.device)  # not a buffer, so that it is never cast
        by_head = bias.reshape(-1, len(self.bias_ratios), *bias.shape[-2:])
        scaled = (by_head * self.bias_ratios[:, None, None]).to(bias.dtype).view_as(bias)
        # Falcon's bias includes the mask: masked entries must keep the lowest value.
        return torch.where(bias == torch.finfo(bias.dtype).min, bias, scaled)


@dataclass(frozen=True)
class AlibiEncoding(ModuleEncoding):
    """ALiBi of a family, whose bias is scaled as each block receives it.

    Attributes:
        readers: the attention modules, which receive the bias from the blocks.
        n_heads: number of heads, which determines the trained slopes in these families.
        length_field: the config field with the trained length, or None.
    """

    name: ClassVar[str] = "alibi"
    default_method: ClassVar[str] = "alibi_scaling"
    why_not_portable: ClassVar[str | None] = "its slopes follow from the number of heads alone"

    readers: tuple[str, ...]
    n_heads: int
    model_type: str
    length_field: str | None

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    def updates(self, method: ContextMethod, target_length: int) -> dict[str, Any]:
        return {} if self.length_field is None else {self.length_field: target_length}

    def notes(self, method: ContextMethod) -> tuple[str, ...]:
        if self.family.dtype == torch.float32:
            return ()
        return ("This family computes its bias in bfloat16 before it is scaled, whatever the model's dtype.",)

    def patch(self, method: ContextMethod, target_length: int) -> Patch:
        assert isinstance(method, SlopeScaling)
        return ScaleBias(self, method, target_length)


@dataclass(frozen=True)
class ScaleBias(Patch):
    """Each block scales the bias that it receives."""

    encoding: AlibiEncoding
    method: SlopeScaling
    target_length: int

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

    def observe(self, model: nn.Module) -> Tensor:
        return run(model, probe_inputs(model, self._n_probe))

    def prove(self, model: nn.Module, before: Tensor) -> FormulaProof:
        slopes = self.method.slopes(alibi_slopes(self.encoding.n_heads))
        short = probe_inputs(model, self._n_probe)
        masked = {**short, "attention_mask": torch.ones_like(short["input_ids"])}
        errors, effects = [], []
        for inputs in (short, masked):  # The two paths on which BLOOM computes its bias.
            with self._seen(model) as seen:
                effects.append(float((run(model, inputs) - before).abs().max()))
            errors.append(self._error(model, seen, slopes, self._n_probe))
        n_tokens = self._n_probe
        limit = self.encoding.limit
        if limit is not None and limit < LONGEST_PROBE and self.method.factor > 1:
            n_tokens = limit + 1
            with self._seen(model) as seen:
                run(model, probe_inputs(model, n_tokens))
            errors.append(self._error(model, seen, slopes, n_tokens))
        return FormulaProof(max(errors), min(effects), n_tokens)

    @property
    def _n_probe(self) -> int:
        return min(PROBE, self.encoding.limit or PROBE)

    @contextmanager
    def _seen(self, model: nn.Module) -> Iterator[dict[tuple[str, str], list[Any]]]:
        with ExitStack() as stack:
            yield {
                (path, keyword): stack.enter_context(seen_by(model, path, keyword))
                for path in self.encoding.readers
                for keyword in self.encoding.family.keywords
            }

    def _error(
        self, model: nn.Module, seen: dict[tuple[str, str], list[Any]], slopes: Float64[Tensor, " head"], n_tokens: int
    ) -> float:
        """Largest error of the bias that any attention received for the last query, beyond the dtype's rounding."""
        positions = torch.arange(n_tokens)
        want = alibi_bias(slopes, positions[-1:], positions)[:, 0]
        worst = 0.0
        for (path, keyword), calls in seen.items():
            (received,) = calls
            # Added after the logits are divided by sqrt(head_dim), and itself divided by it.
            scale: Any = model.get_submodule(path).inv_norm_factor if keyword == "attention_mask" else 1.0
            got = received.flatten(0, -3)[:, -1, -n_tokens:].double().cpu()
            got = got - got[:, -1:]  # Softmax ignores an additive constant, which differs between families.
            eps = max(torch.finfo(self.encoding.family.dtype).eps, torch.finfo(received.dtype).eps)
            beyond = (got - scale * want).abs() - eps * (scale * want).abs().max()
            worst = max(worst, float(beyond.max()))
        return worst


@dataclass(frozen=True)
class SlopeEncoding(ModuleEncoding):
    """Modules that hold one slope per head in a persistent buffer; `buffers` names it for each of `paths`."""

    name: ClassVar[str] = "alibi"
    default_method: ClassVar[str] = "alibi_scaling"
    changes_weights: ClassVar[bool] = True

    buffers: tuple[str, ...]
    length_field: str

    def updates(self, method: ContextMethod, target_length: int) -> dict[str, Any]:
        return {self.length_field: target_length}

    def patch(self, method: ContextMethod, target_length: int) -> Patch:
        assert isinstance(method, SlopeScaling)
        return WriteSlopes(self, method)


@dataclass(frozen=True)
class WriteSlopes(Patch):
    """The buffers hold the scaled slopes."""

    encoding: SlopeEncoding
    method: SlopeScaling

    def write(self, edit: Edit, before: Any) -> None:
        for path, name in self._where:
            edit.set_tensor(path, name, self.method.slopes(self._slopes(edit.model, path, name)))

    def observe(self, model: nn.Module) -> Any:
        slopes = [self._slopes(model, path, name) for path, name in self._where]
        return slopes, run(model, probe_inputs(model, PROBE))

    def prove(self, model: nn.Module, before: Any) -> FormulaProof:
        trained, output = before
        error = max(
            float((self._slopes(model, path, name) - self.method.slopes(old)).abs().max())
            for (path, name), old in zip(self._where, trained)
        )
        return FormulaProof(error, float((run(model, probe_inputs(model, PROBE)) - output).abs().max()), PROBE)

    @property
    def _where(self) -> list[tuple[str, str]]:
        return list(zip(self.encoding.paths, self.encoding.buffers))

    @staticmethod
    def _slopes(model: nn.Module, path: str, name: str) -> Float64[Tensor, " head"]:
        return model.get_submodule(path).get_buffer(name).double().clone()


def find(model: nn.Module, text_config: Any) -> ModuleEncoding | None:
    """ALiBi of a BLOOM, MPT or Falcon, or of any model with a buffer `slopes` or `alibi_slopes`, one per head."""
    family = FAMILIES.get(text_config.model_type)
    if family is None:
        return _find_buffers(model, text_config)
    if text_config.model_type == "falcon" and not text_config.alibi:
        return None
    takers = [path for path, module in model.named_modules() if _takes(module, family.keywords)]
    blocks = tuple(path for path in takers if not any(path.startswith(f"{other}.") for other in takers))
    stated = stated_length(text_config, family.length)
    length = 2048 if stated is None else stated[1]
    return AlibiEncoding(
        paths=blocks,
        trained_length=length,
        source=f"as published: {family.published}" if stated is None else f"{family.length} of the config",
        limit=length if family.limit else None,
        readers=tuple(path for path in takers if path not in blocks),
        n_heads=text_config.num_attention_heads,
        model_type=text_config.model_type,
        length_field=None if stated is None else family.length,
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
    if not found or stated is None:
        return None
    return SlopeEncoding(
        paths=tuple(path for path, _ in found),
        trained_length=stated[1],
        source=f"{stated[0]} of the config",
        limit=None,
        buffers=tuple(name for _, name in found),
        length_field=stated[0],
    )
