"""The memory of a fine-tune, per process, from a config alone: no weights are loaded and nothing is computed.

The model is built of fake tensors, which have shapes and no values, and runs a forward and a backward pass with the
settings' checkpointing, offloading, tiles and loss. The sizes of all tensors alive are summed at every operation.
Weights, gradients and AdamW's moments are counted, and divided by the processes that shard them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig

from ctxext.core.apply import transformers_model
from ctxext.hub.checkpoint import checkpoint_folder, extended_json, read_config
from ctxext.models.text_config import text_config_of
from ctxext.training.estimate import gib
from ctxext.training.loss import chunk_tokens, linear_cross_entropy
from ctxext.training.settings import Settings, read_settings
from ctxext.training.tiled import use_tiled_mlp
from ctxext.training.trainable import attach_trainable
from ctxext.utils.screen import console

CARDS = (24, 48, 80, 141)  # GB of a GPU
ROOM = 0.9  # of them: the driver, fragments and the libraries' own buffers take the rest
FUSED = "ctxext_memory"  # the name of an attention function that computes nothing
NF4 = 0.5 + 4 / 64  # bytes per weight: four bits, and a float32 scale for 64 of them
# Tried one by one by `report`.
SAVINGS = (
    "training.loss=chunked", "training.gradient_checkpointing=recompute", "training.gradient_checkpointing=offload",
    "training.mlp_tokens=4096", "training.micro_batch_size=1", "training.precision=bf16",
    "trainable.quantization=nf4", "trainable={kind: lora}", "engine={kind: fsdp2, processes: 8}",
)  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """Bytes of one process.

    Attributes:
        weights, gradients, optimizer: what the process holds of them.
        gathered: whole weights and gradients of the layers in use, where the engine shards them.
        activations: the most that a forward and a backward pass hold besides, the logits among them.
        update: temporary tensors of the optimizer's step, when there are no activations.
        offloaded: what `gradient_checkpointing: offload` moves to CPU memory.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    update: int
    offloaded: int = 0

    @property
    def peak(self) -> int:
        held = self.weights + self.gradients + self.optimizer
        return held + max(self.gathered + self.activations, self.update)

    def fits(self, card: float) -> bool:
        """Whether it fits in a GPU of `card` GB."""
        return self.peak <= ROOM * card * 1e9


def report(path: Path, changes: Sequence[str], say: Callable[[str], object] = print) -> None:
    """Say what each run of a config file would need on GPUs, what that fits in, and what other settings would save.

    Downloads at most the model's config. Raises as `read_settings` and `memory_of`.
    """
    others = [_changed(path, [*changes, change]) for change in SAVINGS]
    for number, settings in enumerate(read_settings(path, changes)):
        for line in _report(settings, {change: other[number] for change, other in zip(SAVINGS, others) if other}):
            say(line)


def _changed(path: Path, changes: Sequence[str]) -> list[Settings]:
    try:
        return read_settings(path, changes)
    except ValueError:  # the last change does not go with the other settings
        return []


def _report(settings: Settings, others: dict[str, Settings]) -> Iterator[str]:
    base = checkpoint_folder(settings.model, settings.revision, config_only=True)
    config = read_config(base)
    plan, _ = extended_json(base, **settings.extension.arguments())
    length = settings.row_length(plan.target_length)
    now = memory_of(config, settings, length)
    yield f"{settings.output}: modelled memory per process of {settings.model}, for rows of {length:,} tokens:"
    sizes = asdict(now) | {"peak": now.peak}
    offloaded = sizes.pop("offloaded")
    yield from (f"  {part:<12}{gib(size):>12}" for part, size in sizes.items())
    if plan.in_attention:
        yield f"Without what {settings.extension.method} holds to rotate in attention. Measure that with --dry-run."
    yield f"{_fitting(now)} Up to {100 * ROOM:.0f}% of a card is used.{_on_cpu(offloaded)}"
    yield "To save memory, each alone (minutes for a large model):"
    savings = []
    bar: Any = {"console": console, "transient": True, "disable": not console.is_terminal}
    for change, changed in track(others.items(), "modelling", total=len(others), **bar):
        if change.startswith("trainable={") and settings.trainable.kind == changed.trainable.kind:
            continue  # it would only drop the trained embeddings or norms
        try:
            other = memory_of(config, changed, length)
        except ValueError:
            continue
        if other.peak < 0.99 * now.peak:
            said = f"  {change} saves {gib(now.peak - other.peak)}. {_fitting(other)}{_on_cpu(other.offloaded)}"
            savings.append((other.peak, said))
    yield from (line for _, line in sorted(savings)) if savings else ("  nothing that was tried saves 1%",)


def _fitting(memory: Memory) -> str:
    fitting = [str(card) for card in CARDS if memory.fits(card)]
    if not fitting:
        return f"Does not fit in {CARDS[-1]} GB."
    return f"Fits in {' and '.join(filter(None, (', '.join(fitting[:-1]), fitting[-1])))} GB."


def _on_cpu(offloaded: int) -> str:
    return f" {gib(offloaded)} per process are moved to CPU memory." if offloaded else ""


def memory_of(config: PreTrainedConfig, settings: Settings, length: int, *, device: str = "cuda") -> Memory:
    """The modelled memory of training the model of `config` on rows of `length` tokens.

    The engine and the number of processes are those of `settings.engine`; kind "any" is DDP, or one process. Not
    counted: the autocast's copies of weights on a CPU, kernels' own scratch memory, fragments, the one block of a
    sliding window in use, and the masks of models that `use_document_attention` refuses.

    Args:
        device: "cuda", or "cpu", where frozen weights are float32 and chunks of logits smaller.

    Raises:
        ValueError: the model's code needs the values of tensors, so that they cannot be fake; attention is eager; or a
            sequence-parallel engine cannot split `length` tokens.
    """
    training, engine = settings.training, settings.engine
    processes = engine.processes or engine.group_size
    if training.attention == "eager":
        raise ValueError(
            "training.attention: eager holds scores of tokens × tokens, which are not modelled. Set it to sdpa, or "
            "measure with --dry-run."
        )
    if length % engine.pieces:
        raise ValueError(f"{engine.kind} needs a length divisible by {engine.pieces}, got {length} tokens.")
    sharded = engine.kind in ("fsdp2", "zero3", "context_parallel", "ulysses")
    shards = processes if sharded else 1
    half = training.precision == "bf16"
    exact = settings.trainable.kind == "full" or not half or device == "cpu"

    try:
        with torch.device("meta"):
            dtype = torch.float32 if exact else torch.bfloat16
            model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=FUSED, dtype=dtype)
            model = attach_trainable(model, settings.trainable)
        if sharded and half:  # FSDP2 and DeepSpeed cast all parameters
            model.to(torch.bfloat16)
        with FakeTensorMode(), _Alive() as alive:
            _leave_meta(model)
            activations, offloaded = _activations(model, settings, length // engine.group_size, device, alive)
    except (KeyError, NotImplementedError, RuntimeError) as error:
        why = f"needs the values of tensors ({str(error).splitlines()[0]})"
        if FUSED in str(error):
            why = "runs for known attention implementations alone"
        raise ValueError(
            f"the memory of a {config.model_type} model cannot be estimated without weights: its code {why}. Measure "
            "it with --dry-run."
        ) from error
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    weights, largest = 4.0 * trained, 0
    linear = {id(module.weight) for module in model.modules() if type(module) is nn.Linear}
    head = id(transformers_model(model).get_output_embeddings().weight)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            four_bit = settings.trainable.quantization and id(parameter) in linear - {head}
            weights += parameter.numel() * (NF4 if four_bit else 4 if exact else 2)
            largest = max(largest, parameter.numel() if four_bit else 0)
    layers = _layers(model)
    gathered = 0
    if sharded:
        each = max(_numel(layer) for layer in layers)
        rest = _numel(model) - sum(map(_numel, layers))
        # The layer in use and the next; embeddings and head; a layer's whole gradients in float32.
        gathered = (2 if half else 4) * (2 * each + rest) + 4 * max(_trained(layer) for layer in layers)
    if training.distillation:  # the last hidden states of the model without its adapter
        width = text_config_of(config).hidden_size
        activations += training.micro_batch_size * length // engine.group_size * width * (2 if half else 4)
    copies = 2 if engine.kind == "ddp" or (engine.kind == "any" and processes > 1) else 1  # DDP's buckets
    activations += 2 * largest  # one four-bit weight at a time in 16 bits
    return Memory(
        weights=round(weights / shards),
        gradients=4 * trained * copies // shards,
        optimizer=8 * trained // shards,
        gathered=gathered,
        activations=activations,
        update=4 * (trained // shards if device == "cuda" else max(map(_trained, _leaves(model)))),
        offloaded=offloaded,
    )


def _leave_meta(model: nn.Module) -> None:
    """Put fake tensors of the CPU where `model` has tensors of the meta device, which has no autocast."""
    made: dict[Tensor, Tensor] = {}  # tied parameters stay tied
    for module in model.modules():
        parts: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for held in parts:
            for tensor in held.values():
                if tensor is not None and tensor not in made:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                    parameter = isinstance(tensor, nn.Parameter)
                    made[tensor] = nn.Parameter(fake, tensor.requires_grad) if parameter else fake
            held.update((name, made[tensor]) for name, tensor in held.items() if tensor is not None)


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _trained(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _leaves(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if not [*module.children()]]


def _layers(model: nn.Module) -> list[nn.Module]:
    """The modules that an engine gathers one after the other."""
    names = transformers_model(model)._no_split_modules or ()
    return [module for module in model.modules() if type(module).__name__ in names]


def _activations(model: Any, settings: Settings, tokens: int, device: str, alive: _Alive) -> tuple[int, int]:
    """Bytes of all tensors but the parameters and their gradients, at the peak of a forward and backward pass, and of
    those that are offloaded."""
    training, inner = settings.training, transformers_model(model)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=training.precision == "bf16")
    if training.mlp_tokens:
        with autocast:
            use_tiled_mlp(model, training.mlp_tokens)
    if training.gradient_checkpointing != "none":
        inner.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    ids = torch.zeros(training.micro_batch_size, tokens, dtype=torch.long)
    moved: list[int] = []
    saving = _offloaded(moved) if training.gradient_checkpointing == "offload" else nullcontext()
    model.train()
    alive.start(model)
    with saving, autocast:
        if training.loss == "chunked":
            hidden = inner.base_model(input_ids=ids, use_cache=False).last_hidden_state
            weight = inner.get_output_embeddings().weight
            loss = linear_cross_entropy(hidden, weight, ids, chunk=chunk_tokens(device, len(weight)))
            del hidden
        else:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return alive.peak, sum(moved)


class _Alive(TorchDispatchMode):
    """The bytes of all storages made since `start` that are still in use, and their most."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}

    def start(self, model: nn.Module) -> None:
        """Count from here on. Parameters and their gradients are counted elsewhere."""
        self.now = self.peak = 0
        held = [*model.parameters(), *model.buffers()]
        held += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        self.held = [each.untyped_storage() for each in held]  # so that no other storage gets their ids
        self.sizes = {id(storage): 0 for storage in self.held}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.nonzero.default:  # every token is a target
            result: Any = torch.empty(args[0].numel(), args[0].ndim, dtype=torch.long)
        elif func is torch.ops.aten._local_scalar_dense.default:  # a length or a condition in the model's code
            result = 1
        else:
            result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result) if self.sizes else ():
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: Any) -> None:
        if id(storage) in self.sizes:
            return
        self.sizes[id(storage)] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, id(storage))

    def _drop(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


class _Attention(torch.autograd.Function):
    """The memory of a fused kernel, from tensors (row, head, token, channel)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, heads, tokens, _ = query.shape
        output = query.new_empty(rows, tokens, heads, value.shape[-1])
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors[:3])


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    return _Attention.apply(query, key, value), None


# It has no masks, so that none is made.
AttentionInterface.register(FUSED, _attention)


@contextmanager
def _offloaded(moved: list[int]) -> Iterator[None]:
    """`save_on_cpu`, with nothing kept but the bytes of each tensor in `moved`."""

    def pack(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
        moved.append(tensor.nbytes)
        return tensor.shape, tensor.dtype

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: torch.empty(kept[0], dtype=kept[1])):
        yield
