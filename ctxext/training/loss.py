"""Chunked cross-entropy of a causal language model, which never holds all logits.

At 32,768 tokens and a vocabulary of 128,256 one float32 copy of the logits takes 16.8 GB, and the stock
loss holds several. The gradient of a summed loss is linear in the incoming scalar, so it can be computed in the
forward pass, chunk by chunk of tokens, and each chunk's logits forgotten at once (Wijmans et al. 2024, "Cut Your
Losses in Large-Vocabulary Language Models", arXiv 2411.09009, does the same inside one GPU kernel).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn.functional import cross_entropy, pad
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from ctxext.core.apply import transformers_model
from ctxext.models.text_config import text_config_of

IGNORED = -100
# Bytes of logits held at once, by device. Measured on a CPU with 49,152 entries: matrix products reach full speed from
# 24 MiB on; glibc maps allocations above 32 MiB anew each time.
ROOM = {"cpu": 2**25}
ROOM_ELSEWHERE = 2**29
# With fewer rows, the products wait for the weight, for any vocabulary.
LEAST_CHUNK = 128
REMEDY = "Use the stock loss (`loss: stock` in a recipe's config)."


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    chunk: int | None = None,
    reference: Reference | None = None,
) -> Tensor:
    """Σ -log softmax(z)[target] in nats, with z = scale (hidden weightᵀ + bias), or softcap · tanh(z / softcap).

    Products are computed in the dtype of `hidden` or autocast, everything after them in float32 (float64 if the
    products are). A frozen head is not differentiated, ignored targets are not projected, and without gradients only
    the value is computed.

    Args:
        hidden: of shape (..., hidden).
        weight: of shape (vocabulary, hidden); a sharded one is gathered, and its gradient averaged over the shards.
        targets: of shape (...), -100 for ignored tokens.
        bias: of shape (vocabulary,).
        softcap: Gemma-2's bound on logits.
        scale: the multiplier of the logits.
        chunk: tokens per chunk of logits; by default as many as fit in 32 MiB on a CPU, 512 MiB elsewhere.
        reference: another model, to whose probabilities a share of the loss is the divergence.

    Returns:
        A scalar, float32 (or float64): 0 if every target is ignored.

    Raises:
        ValueError: the shapes do not match.
    """
    if hidden.shape[:-1] != targets.shape or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"expected hidden (..., hidden), targets (...) and weight (vocabulary, hidden), got {tuple(hidden.shape)}, "
            f"{tuple(targets.shape)} and {tuple(weight.shape)}. Pass one target per token, with labels already shifted."
        )
    weight, bias = _whole(weight), _whole(bias)
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device)
    how = _How(
        dtype=torch.get_autocast_dtype(device) if autocast else hidden.dtype,
        scale=scale,
        softcap=softcap,
        chunk=chunk or chunk_tokens(device, len(weight)),
        reference=reference and reference.flattened(),
    )
    hidden, targets = hidden.flatten(0, -2), targets.flatten().to(hidden.device)
    if torch.is_grad_enabled():
        return _LinearCrossEntropy.apply(hidden, weight, bias, targets, how)
    return _compute(hidden, weight, bias, targets, how, (False, False, False))[0]


def chunk_tokens(device: str, vocab_size: int) -> int:
    """Tokens per chunk of logits on a type of device, such as "cuda"."""
    return max(LEAST_CHUNK, ROOM.get(device, ROOM_ELSEWHERE) // (4 * vocab_size))


class Reference(NamedTuple):
    """Another model's probabilities q for the same tokens, by its hidden states and head, without gradients.

    The loss of a token becomes (1 - share) · -log p[target] + share · Σ q log(q / p).

    Attributes:
        hidden: of shape (..., hidden).
        weight, bias: of its head; scale and softcap are those of the model in training.
        share: of shape (...), between 0 and 1.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    share: Tensor

    def flattened(self) -> Reference:
        hidden, share = self.hidden.flatten(0, -2), self.share.flatten()
        return Reference(hidden, _whole(self.weight).detach(), _whole(self.bias), share)


class _How(NamedTuple):
    dtype: torch.dtype
    scale: float
    softcap: float | None
    chunk: int
    reference: Reference | None


def _whole(parameter: Any) -> Any:
    if not isinstance(parameter, DTensor):
        return parameter
    # Each process has the gradient of its own tokens; FSDP averages them, full_tensor alone does not.
    return parameter.full_tensor(grad_placements=[Partial("avg")] * parameter.device_mesh.ndim)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, how: _How) -> Tensor:
        loss, *gradients = _compute(hidden, weight, bias, targets, how, ctx.needs_input_grad[:3])
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [like.dtype if like is not None else None for like in (hidden, weight, bias)]
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Not in place: the graph may be retained for a second pass.
        gradients = (
            gradient if gradient is None else torch.mul(gradient, grad, out=torch.empty_like(gradient, dtype=dtype))
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes)
        )
        return (*gradients, None, None)


def _compute(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, how: _How, wanted: tuple[bool, ...]
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The summed loss, and its gradients with respect to hidden (token, hidden), weight and bias if `wanted`."""
    dtype, scale, softcap, chunk, reference = how
    exact = torch.promote_types(dtype, torch.float32)
    rows = (targets != IGNORED).nonzero()[:, 0]
    losses = torch.empty(len(rows), 1, dtype=exact, device=hidden.device)
    by_hidden = torch.zeros_like(hidden) if wanted[0] else None
    by_weight = torch.zeros_like(weight, dtype=exact) if wanted[1] else None
    by_bias = torch.zeros_like(bias, dtype=exact) if bias is not None and wanted[2] else None
    weight = weight.to(dtype)
    if reference is not None:
        reference = reference._replace(weight=reference.weight.to(dtype))
    room = torch.empty(min(chunk, len(rows)), len(weight), dtype=dtype, device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        for part, loss in zip(rows.split(chunk), losses.split(chunk)):
            inputs, target = hidden[part].to(dtype), targets[part, None]
            share: Any = 0
            if reference is not None:  # before the logits, which take the same room
                share = reference.share[part, None].to(exact)
                other = reference.hidden[part].to(dtype)
                log_q = _logits(other, reference.weight, reference.bias, how, room).log_softmax(-1)
            logits = _logits(inputs, weight, bias, how, room)  # from here on in place
            slope = None
            if softcap is not None and any(wanted):
                slope = 1 - (logits / softcap).square_()
            top = logits.amax(-1, keepdim=True)
            of_target = logits.gather(-1, target)
            if reference is not None:
                q = log_q.exp()
                of_target = torch.lerp(of_target, (q * (logits - log_q)).sum(-1, keepdim=True), share)
            total = logits.sub_(top).exp_().sum(-1, keepdim=True)
            loss.copy_(total.log().add_(top).sub_(of_target))
            if not any(wanted):
                continue
            # softmax - one_hot, or minus its mean with q
            logits.div_(total).scatter_add_(-1, target, (share - 1) * torch.ones_like(total))
            if reference is not None:
                logits -= q.mul_(share)
            if slope is not None:
                logits *= slope
            if scale != 1:
                logits *= scale
            if by_bias is not None:
                by_bias += logits.sum(0)
            error = room[: len(part)].copy_(logits)
            if by_hidden is not None:
                by_hidden[part] = (error @ weight).to(by_hidden.dtype)
            if by_weight is not None and dtype == exact:
                by_weight.addmm_(error.T, inputs)
            elif by_weight is not None:
                by_weight += error.T @ inputs
    return losses.sum(), by_hidden, by_weight, by_bias


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, how: _How, room: Tensor) -> Tensor:
    """In float32 or float64; the product of `hidden` and `weight` is written to `room`."""
    product = torch.mm(hidden, weight.T, out=room[: len(hidden)])
    if bias is not None:
        product += bias
    logits = product.to(torch.promote_types(how.dtype, torch.float32))
    if how.scale != 1:
        logits *= how.scale
    if how.softcap is not None:
        logits.div_(how.softcap).tanh_().mul_(how.softcap)
    return logits


def use_chunked_loss(model: nn.Module) -> None:
    """Make a causal language model compute its loss from `labels` with `linear_cross_entropy`, and verify it.

    Replaces the forward of this instance, not of its class. Without labels, forward is unchanged. With `labels`
    (unshifted, as in transformers) or `shift_labels`, the output has the loss in nats per token, summed and divided by
    `num_items_in_batch` or else the number of targets, and no logits. The head is looked up in every pass: PEFT may
    wrap the model before or after.

    Raises:
        RuntimeError: it is already patched, or the loss differs from that of the model's logits (a non-linear head,
            LoRA on the head, an added router loss). The model is unchanged.
    """
    inner = transformers_model(model)
    if chunked_loss_of(inner) is not None:
        raise RuntimeError("this model already has the chunked loss. Call restore_loss(model) to undo it.")
    if getattr(text_config_of(inner.config), "output_router_logits", False):
        raise RuntimeError(
            f"output_router_logits is set, but the chunked loss cannot add the router's loss. Set it to False. {REMEDY}"
        )
    # A class, not a closure, so that the model can be copied and pickled.
    patch: Any = functools.partial(_forward, inner, inner.forward)
    patch.__wrapped__ = inner.forward  # Trainer reads the signature
    patch.former = inner.__dict__.get("forward")
    patch.reference = None
    inner.forward = patch
    try:
        prove_loss(model)
    except BaseException:
        restore_loss(model)
        raise


def restore_loss(model: nn.Module) -> None:
    """Undo `use_chunked_loss`.

    Raises:
        RuntimeError: the model has no chunked loss.
    """
    inner = transformers_model(model)
    patch = chunked_loss_of(inner)
    if patch is None:
        raise RuntimeError("this model has no chunked loss, so there is nothing to restore.")
    del inner.forward
    if patch.former is not None:
        inner.forward = patch.former


@torch.no_grad()
def prove_loss(model: nn.Module) -> None:
    """Compare the chunked loss with that of the model's own logits, on a few random tokens.

    The model may be wrapped (PEFT, DDP, FSDP, autocast); both passes use the same dropout, mode and wrappers. They may
    differ by 1e-4 relative, or by 2e-3 if the model rounds its logits to 16 bits, due to the summation order.

    Raises:
        RuntimeError: the losses differ, or the loss in use is not the chunked one.
    """
    inner = transformers_model(model)
    device, vocabulary = inner.device, text_config_of(inner.config).vocab_size
    ids = torch.randint(0, vocabulary, (2, 64), generator=torch.Generator().manual_seed(0)).to(device)
    labels = ids.clone()
    labels[:, ::3] = IGNORED
    passes = []
    for given in ({"labels": labels}, {}):
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            passes.append(model(input_ids=ids, use_cache=False, return_dict=True, **given))
    chunked, own = passes
    if chunked.get("logits") is not None:
        raise RuntimeError("this model's loss is not the chunked one. Call use_chunked_loss(model) first.")
    ours = chunked.loss.item()
    logits = own.logits[:, :-1].flatten(0, 1).float()
    stock = cross_entropy(logits, labels[:, 1:].flatten()).item()
    # Autocast returns float32 regardless of the compute dtype.
    rounded = any(torch.equal(logits.to(dtype).float(), logits) for dtype in (torch.bfloat16, torch.float16))
    if not abs(ours - stock) <= (2e-3 if rounded else 1e-4) * stock:  # `not`, so that NaN fails
        raise RuntimeError(
            f"the chunked loss of {type(inner).__name__} is {ours:.6f} nats where its own logits give {stock:.6f}: "
            f"its head is more than a linear layer. {REMEDY}"
        )


@can_return_tuple
def _forward(
    model: PreTrainedModel,
    original: Any,
    /,
    *args: Any,
    labels: Any = None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    **kwargs: Any,
) -> Any:
    if labels is None and shift_labels is None:
        return original(*args, **kwargs)
    decoder, head = model.base_model, head_of(model)
    if decoder is model:
        raise RuntimeError(f"{type(model).__name__} has no decoder under its head. {REMEDY}")
    refer = chunked_loss_of(model).reference
    reference = refer(*args, **kwargs) if refer and model.training else None  # while no activations are held
    if shift_labels is None:
        shift_labels = pad(labels, (0, 1), value=IGNORED)[..., 1:]
    output = decoder(*args, **{**kwargs, "use_cache": False})
    config = text_config_of(model.config)
    total = linear_cross_entropy(
        output.last_hidden_state,
        head.weight,
        shift_labels,
        bias=head.bias,
        softcap=getattr(config, "final_logit_softcapping", None),  # Gemma-2
        # Cohere multiplies, Granite divides.
        scale=(getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0),
        reference=reference,
    )
    if num_items_in_batch is None:
        num_items_in_batch = (shift_labels != IGNORED).sum().clamp(min=1)
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return CausalLMOutputWithPast(
        loss=total / num_items_in_batch, hidden_states=output.hidden_states, attentions=output.attentions
    )


def chunked_loss_of(model: nn.Module) -> Any:
    """The patch of `use_chunked_loss`, or None.

    Its attribute `reference` is called with the arguments of the decoder in training mode, and returns a `Reference` or
    None.
    """
    forward = transformers_model(model).__dict__.get("forward")
    return forward if isinstance(forward, functools.partial) and forward.func is _forward else None


def head_of(model: PreTrainedModel) -> nn.Linear:
    """The current linear head: PEFT's trained copy if that is in use."""
    head = model.get_output_embeddings()
    if hasattr(head, "modules_to_save"):
        copies = [] if head.disable_adapters else head.active_adapters
        head = head.modules_to_save[copies[0]] if copies else head.original_module
    if not isinstance(head, nn.Linear):
        raise RuntimeError(
            f"the head is {type(head).__name__}, not a linear layer: its weight alone does not give the logits. "
            f"Remove it from LoRA's target_modules (modules_to_save is fine). {REMEDY}"
        )
    return head
