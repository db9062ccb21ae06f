"""MLPs that run on a few tokens at a time, forward and backward, and keep only their input (ALST, arXiv 2506.13996).

An MLP treats every token by itself, yet holds some five intermediate tensors of all of them, each 3.5 times as wide as
the model in Llama-3: 3.5 GiB each for an 8B at 131,072 tokens. Recomputing layer by layer does not avoid that.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from ctxext.core.apply import transformers_model
from ctxext.core.edit import Edit

BAR = 1e-5  # of the largest output, in float32; products of fewer rows may round otherwise


def use_tiled_mlp(model: nn.Module, tokens: int = 4096) -> Edit:
    """Make the MLP of every layer run on `tokens` tokens at a time, until `undo` of the result. Exact but for rounding.

    Under gradient checkpointing this costs no time where the MLP is the last of a layer: the layer is recomputed up to
    the MLP's input, and the MLP once, tile by tile, in the backward pass. Call it after PEFT has wrapped the model, and
    under autocast if it is trained so. FSDP2 may shard the model afterwards; ZeRO-3 is not supported, since it would
    gather the weights for each tile.

    Raises:
        ValueError: the layers have no `mlp`, or one with dropout, or one that is not a function of each token alone
            (a mixture of experts with a router's output). The model is unchanged.
    """
    layers = getattr(transformers_model(model).base_model, "layers", [])
    mlps = [layer.mlp for layer in layers if isinstance(getattr(layer, "mlp", None), nn.Module)]
    if not mlps or len(mlps) != len(layers):
        raise ValueError(f"{type(model).__name__} has no module named mlp in each of its layers, so none was tiled.")
    embeddings: Any = transformers_model(model).get_input_embeddings()
    for mlp in mlps:
        _check(mlp, embeddings.weight)
    edit, tiled = Edit(model), {id(mlp) for mlp in mlps}
    for path, module in model.named_modules():
        if id(module) in tiled:
            forward = functools.partial(_forward, module, module.forward, tokens)
            edit.set_attribute(path, "forward", forward)
    return edit


@torch.no_grad()
def _check(mlp: nn.Module, embeddings: Tensor) -> None:
    if getattr(mlp.__dict__.get("forward"), "func", None) is _forward:
        raise ValueError("the MLPs are tiled already. Call undo() of what use_tiled_mlp returned first.")
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in mlp.modules()):
        raise ValueError("an MLP with dropout cannot be tiled, since it is run twice. Set its dropout to 0.")
    inputs = torch.randn(1, 8, embeddings.shape[1], generator=torch.Generator().manual_seed(0))
    # The MLP's own weights may be of four bits.
    inputs = inputs.to(next(mlp.parameters()).device, embeddings.dtype)
    whole = mlp(inputs)
    if not (
        isinstance(whole, Tensor)
        and whole.shape == inputs.shape
        and (torch.cat([mlp(tile) for tile in inputs.split(3, dim=1)], 1) - whole).abs().max()
        <= (BAR if whole.dtype.itemsize >= 4 else 3e-2) * whole.abs().max()
    ):
        raise ValueError(f"{type(mlp).__name__} is not a function of each token alone, so it cannot be tiled.")


def _forward(mlp: nn.Module, own: Any, tokens: int, hidden: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return _tiles(own, hidden, tokens)
    # Read in every pass: FSDP2 replaces the parameters, and has the whole ones in place now and in the backward pass.
    trained = [parameter for parameter in mlp.parameters() if parameter.requires_grad]
    return _Run.apply(_Keep.apply(hidden, own, tokens, *trained), own, tokens)


def _tiles(own: Any, hidden: Tensor, tokens: int) -> Tensor:
    return torch.cat([own(tile) for tile in hidden.split(tokens, dim=1)], dim=1)


class _Keep(torch.autograd.Function):
    """The identity in the forward pass, which keeps the MLP's input; the MLP's own gradient in the backward pass.

    Two functions, so that the input is saved before the MLP runs: checkpointing recomputes a layer only up to the last
    tensor that was saved, which spares it the MLP.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, own: Any, tokens: int, *trained: Tensor) -> Tensor:
        device = hidden.device.type
        ctx.own, ctx.tokens, ctx.trained = own, tokens, trained
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.save_for_backward(hidden)
        return hidden.view_as(hidden)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (hidden,), found = ctx.saved_tensors, []
        sums: list[Any] = [None for _ in ctx.trained]
        for tile, above in zip(hidden.split(ctx.tokens, dim=1), grad.split(ctx.tokens, dim=1)):
            inputs = tile.detach().requires_grad_()
            with torch.enable_grad(), torch.autocast(*ctx.autocast):
                output = ctx.own(inputs)
            below, *gradients = torch.autograd.grad(output, [inputs, *ctx.trained], above.to(output.dtype))
            found.append(below)
            sums = [new if old is None else old.add_(new) for old, new in zip(sums, gradients)]
        return torch.cat(found, dim=1), None, None, *sums


class _Run(torch.autograd.Function):
    """The MLP tile by tile without a graph; its output's gradient passes to `_Keep` as it is."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, own: Any, tokens: int) -> Tensor:
        return _tiles(own, hidden, tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, None, None
