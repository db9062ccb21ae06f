"""Runs a program on CPU processes under the sharded engines that accelerate keeps for accelerators.

    accelerate launch --config_file FILE tests/recipes/sharded_on_cpu.py recipes/finetune.py --config …

torch's FSDP and DeepSpeed run over gloo; only accelerate's choice of device and backend is in the way. Context parallel
has no attention for CPUs: it gets a slow one here, which gathers the keys and values of all processes.
"""

import runpy
import sys

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.nn import functional

CPU = torch.device("cpu")
attention = functional.scaled_dot_product_attention


def set_device(state: PartialState) -> None:
    state.device = CPU


class Gather(torch.autograd.Function):
    """The keys or values of all processes, one after the other; each gets the sum of the gradients of its own."""

    @staticmethod
    def forward(ctx, own, dim, group):
        ctx.dim, ctx.group = dim, group
        parts = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(parts, own.contiguous(), group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), ctx.dim)[ctx.group.rank()], None, None


def gather(seq_dim: int, mesh: DeviceMesh) -> None:
    """Let each process attend with its part of a row, a head and a tail piece, to the whole row."""
    rank, size, group = mesh.get_local_rank(), mesh.size(), mesh.get_group()

    def over_all(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        assert attn_mask is None
        assert is_causal
        pieces = torch.arange(size * query.shape[seq_dim]).chunk(2 * size)
        places = [torch.cat([pieces[k], pieces[-1 - k]]) for k in range(size)]
        key, value = (Gather.apply(each, seq_dim, group) for each in (key, value))
        seen = places[rank][:, None] >= torch.cat(places)
        return attention(query, key, value, attn_mask=seen, dropout_p=dropout_p, **options)

    functional.scaled_dot_product_attention = over_all


def restore() -> None:
    functional.scaled_dot_product_attention = attention


ring._enable_context_parallel_dispatcher_impl = gather
ring._disable_context_parallel_dispatcher_impl = restore

torch.accelerator.is_available = lambda: True
torch.accelerator.current_accelerator = lambda *_, **__: CPU
torch.Tensor.pin_memory = lambda tensor, *_: tensor
PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
PartialState.set_device = set_device
PartialState.default_device = property(lambda _: CPU)

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
