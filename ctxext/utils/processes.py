"""The processes of `accelerate launch`, if any."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Processes:
    """This process's rank and the world size; a single process without `accelerate launch`."""

    rank: int = 0
    world: int = 1

    @classmethod
    def here(cls) -> Processes:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        from accelerate import PartialState

        state = PartialState(cpu=not torch.cuda.is_available())
        return cls(state.process_index, state.num_processes)

    def wait(self) -> None:
        """Wait for all processes."""
        if self.world > 1:
            from accelerate import PartialState

            PartialState().wait_for_everyone()

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.world == 1:
            return tensor
        from accelerate import PartialState
        from accelerate.utils import reduce

        # nccl only sums tensors on its GPUs.
        return reduce(tensor.to(PartialState().device), "sum").to(tensor.device)


ALONE = Processes()
