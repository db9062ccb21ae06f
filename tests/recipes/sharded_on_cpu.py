"""Runs a program on CPU processes under the sharded engines that accelerate keeps for accelerators.

    accelerate launch --config_file FILE tests/recipes/sharded_on_cpu.py recipes/finetune.py --config …

torch's FSDP and DeepSpeed run over gloo; only accelerate's choice of device and backend is in the way.
"""

import runpy
import sys

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType

CPU = torch.device("cpu")


def set_device(state: PartialState) -> None:
    state.device = CPU


torch.accelerator.is_available = lambda: True
torch.accelerator.current_accelerator = lambda *_, **__: CPU
torch.Tensor.pin_memory = lambda tensor, *_: tensor
PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
PartialState.set_device = set_device
PartialState.default_device = property(lambda _: CPU)

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
