"""Makes an accelerator and says what came of it. Arguments: EngineSettings as JSON; "partial", "parts"."""

import json
import sys

import torch
from accelerate import Accelerator, ParallelismConfig, PartialState
from torch.distributed.device_mesh import init_device_mesh

from ctxext.training.launch import EngineSettings, data_parallel, make_accelerator, on_my_part


def parts(accelerator: Accelerator) -> dict[str, dict]:
    """What each rank reads of two rows of 8 tokens, by sequence-parallel engine.

    accelerate refuses parallel sizes on CPUs because attention cannot run there; batches are cut there all the same.
    """
    positions = torch.arange(8).expand(2, -1)  # rows that share their storage must survive a cut in place
    tokens = positions + torch.tensor([[0], [100]])
    batch = {"input_ids": tokens, "position_ids": positions, "shift_labels": tokens + 1}
    found = {}
    for name in "cp", "sp":
        accelerator.state.parallelism_config = ParallelismConfig(**{f"{name}_size": 2})
        accelerator.state.device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(name,))
        if name == "cp":
            accelerator._prepare_cp()
        with on_my_part(accelerator, batch) as part:
            found[name] = {key: tensor.tolist() for key, tensor in part.items()} | {"data": data_parallel(accelerator)}
    assert batch["input_ids"].equal(tokens)
    assert positions.shape == (2, 8)
    return found


if "partial" in sys.argv:
    PartialState()  # as a script does that forgets cpu=True: each process takes itself to be alone
accelerator = make_accelerator(EngineSettings(**json.loads(sys.argv[1])), mixed_precision="no")
answer = {
    "rank": accelerator.process_index,
    "data": data_parallel(accelerator),
    "sum": accelerator.reduce(torch.tensor(10.0**accelerator.process_index)).item(),
}
if "parts" in sys.argv:
    answer["parts"] = parts(accelerator)
sys.stdout.write(f"probe {json.dumps(answer)}\n")  # one write, so that processes do not mix their lines
accelerator.end_training()
