"""Part 3: LoRA at length on Llama-3.1-8B's shape: tokens a second, peak memory, and the longest sequence that fits.

    python benchmarks/at_scale/run.py --only training
    python benchmarks/at_scale/training.py --trainer ours --length 32768 --shape llama-8b    # one measurement

Every measurement is a process of its own: a short step that is not counted, then whole ones on random tokens. The model
has random weights in bfloat16 (float32 on a CPU) and LoRA of rank 16 on q, k, v and o, trained with AdamW.

- stock: `Trainer` and PEFT with `bf16=True, gradient_checkpointing=True`.
- trl: `SFTTrainer` with the same and `use_liger_kernel=True`, if both are installed.
- ours: the same model, recomputed layer by layer, with ctxext's chunked loss; in tiles: with its tiled MLP too;
  offloaded: with the kept layer inputs in the memory of the CPU besides.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from at_scale.cells import Cell, Part
from at_scale.models import forward_cost
from at_scale.speed import LLAMA_8B
from report import Report, kept
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from ctxext import extend_context
from ctxext.assets import MODEL
from ctxext.training.estimate import PeakMemory
from ctxext.training.loss import use_chunked_loss
from ctxext.training.tiled import use_tiled_mlp

STOCK, TRL, OURS, TILED, OFFLOADED = "stock", "trl", "ours", "ours in tiles", "ours in tiles, offloaded"
TRAINERS = (STOCK, TRL, OURS, TILED, OFFLOADED)
NEEDS = {TRL: ("peft", "trl", "datasets", "liger_kernel")}  # the others PEFT alone, which brings accelerate
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": LLAMA_8B,
    "tiny": {
        "hidden_size": 64, "intermediate_size": 224, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": False,
    },
    # An eighth of the 8B's width, with its proportions.
    "llama-8b/8": {
        "hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 2, "vocab_size": 16_032, "tie_word_embeddings": False,
    },
}  # fmt: skip
TRAINED = 8192  # tokens; longer sequences are trained under YaRN
SHORT = 256  # tokens of the step that is not counted
CLIP, LEARNING_RATE = 1.0, 1e-4
LADDER = tuple(8192 * n for n in (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64))
# Over stock.
LEAST_SPEED, MOST_MEMORY = 1.0, 0.5
# What a step costs in forward passes: forward, recomputed, and backward, which is as much where the weights are frozen.
PASSES = 3


def lora_model(shape: dict[str, Any], length: int, device: str) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LlamaConfig(
        **shape, max_position_embeddings=TRAINED, attn_implementation="sdpa", use_cache=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    if length > TRAINED:
        extend_context(model, target_length=length, method="yarn")
    return get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))


def rows_of(lengths: Sequence[int], vocab_size: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, vocab_size, (length,), generator=generator) for length in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


class Meter(TrainerCallback):
    """Seconds, loss and peak memory of each step; memory is that of the GPU, or of this process on a CPU."""

    def __init__(self, device: str) -> None:
        self.device, self.steps = device, []
        self.memory = PeakMemory(torch.device(device))

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.memory.restart()
        self.held, self.begun = self.memory.now, self._now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        seconds = self._now() - self.begun
        self.steps.append({"seconds": seconds, "held": self.held, "peak": self.memory.at_most, "loss": None})

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" in logs:
            self.steps[-1]["loss"] = logs["loss"]

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


class Rows(torch.utils.data.IterableDataset):
    """Rows in the order given; Trainer would shuffle a list."""

    def __init__(self, rows: list[dict[str, Tensor]]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def arguments(folder: str, steps: int, device: str) -> dict[str, Any]:
    return dict(
        output_dir=folder, per_device_train_batch_size=1, max_steps=steps, learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant", max_grad_norm=CLIP, gradient_checkpointing=True, bf16=device == "cuda",
        gradient_checkpointing_kwargs={"use_reentrant": False}, use_cpu=device == "cpu", report_to="none",
        save_strategy="no", logging_steps=1, disable_tqdm=True, dataloader_pin_memory=device == "cuda",
    )  # fmt: skip


def train_stock(model: Any, rows: list[dict[str, Tensor]], meter: Meter) -> None:
    with tempfile.TemporaryDirectory() as folder:
        given = TrainingArguments(**arguments(folder, len(rows), meter.device))
        Trainer(model, given, train_dataset=Rows(rows), callbacks=[meter]).train()


def train_trl(model: Any, rows: list[dict[str, Tensor]], meter: Meter) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    liger = importlib.util.find_spec("liger_kernel") is not None
    with tempfile.TemporaryDirectory() as folder:
        given = SFTConfig(
            **arguments(folder, len(rows), meter.device), use_liger_kernel=liger, max_length=None, packing=False,
            shuffle_dataset=False, dataset_kwargs={"skip_prepare_dataset": True}, train_sampling_strategy="sequential",
        )  # fmt: skip
        data = Dataset.from_list([{name: values.tolist() for name, values in row.items()} for row in rows])
        SFTTrainer(
            model, given, train_dataset=data, callbacks=[meter], processing_class=AutoTokenizer.from_pretrained(MODEL)
        ).train()


def train_ours(model: Any, rows: list[dict[str, Tensor]], meter: Meter, tiled: bool, offloaded: bool) -> None:
    """The loop of recipes/finetune.py in miniature."""
    use_chunked_loss(model)
    if tiled:
        use_tiled_mlp(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    saving = partial(torch.autograd.graph.save_on_cpu, meter.device == "cuda") if offloaded else nullcontext
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    model.train()
    for row in rows:
        meter.on_step_begin()
        batch = {name: values[None].to(meter.device) for name, values in row.items()}
        with saving(), torch.autocast(meter.device, torch.bfloat16, enabled=meter.device == "cuda"):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        meter.on_step_end()
        meter.steps[-1]["loss"] = loss.item()


TRAIN: dict[str, Callable[..., None]] = {
    STOCK: train_stock,
    TRL: train_trl,
    OURS: partial(train_ours, tiled=False, offloaded=False),
    TILED: partial(train_ours, tiled=True, offloaded=False),
    OFFLOADED: partial(train_ours, tiled=True, offloaded=True),
}


def measure(trainer: str, length: int, shape: str, device: str, steps: int) -> dict[str, Any]:
    """Train in this process: `fits`, and seconds, bytes and nats of the whole steps."""
    meter = Meter(device)
    try:
        model = lora_model(SHAPES[shape], length, device)
        rows = rows_of([min(SHORT, length), *[length] * steps], SHAPES[shape]["vocab_size"])
        TRAIN[trainer](model, rows, meter)
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not (isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)):
            raise
        return {"fits": False, "why": str(error).splitlines()[0][:300]}
    whole = meter.steps[1:]
    seconds = whole[-1]["seconds"]  # the first one allocates
    return {
        "fits": True, "seconds": seconds, "tokens_per_second": length / seconds, "steps": meter.steps,
        "held": whole[0]["held"], "peak": max(step["peak"] for step in whole),
    }  # fmt: skip


def measured(trainer: str, length: int, shape: str, device: str, steps: int) -> dict[str, Any]:
    """`measure` in a process of its own; one that is killed for its memory does not fit.

    Raises RuntimeError with the end of its output if it failed otherwise.
    """
    command = [
        sys.executable, __file__, "--trainer", trainer, "--length", str(length), "--shape", shape, "--device", device,
        "--steps", str(steps),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == -9:
        return {"fits": False, "why": "killed for its memory"}
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def longest(fits: Callable[[int], bool], ladder: Sequence[int]) -> int:
    """The last length of `ladder` that fits, by bisection, given that all shorter ones do; 0 if none."""
    low, high = 0, len(ladder)
    while low < high:
        middle = (low + high) // 2
        if fits(ladder[middle]):
            low = middle + 1
        else:
            high = middle
    return ladder[low - 1] if low else 0


@dataclass
class Training(Part):
    """A cell is one trainer at one length, or the longest sequence that it can train."""

    name = "training"
    title = "LoRA at length beside Trainer with PEFT and TRL with Liger"

    @property
    def missing(self) -> str | None:
        if self.lacking("peft"):
            return "peft is not installed"
        return None if self.tiny or self.device == "cuda" else "no GPU"

    @property
    def shape(self) -> str:
        return "tiny" if self.tiny else "llama-8b"

    @property
    def lengths(self) -> tuple[int, ...]:
        return (512,) if self.tiny else (32_768, 65_536, 131_072)

    @property
    def ladder(self) -> tuple[int, ...]:
        return self.lengths if self.tiny else LADDER

    def trainers(self) -> dict[str, str | None]:
        """Those of the plan, with what each lacks here."""
        lacking = {
            name: self.lacking(*NEEDS.get(name, ("peft",)))
            for name in (STOCK, TRL, TILED) if not self.tiny or name != TRL
        }  # fmt: skip
        lacking |= {} if self.tiny else {OURS: [], OFFLOADED: []}
        return {
            name: f"{', '.join(packages)} not installed" if packages else None for name, packages in lacking.items()
        }

    def cells(self) -> Sequence[Cell]:
        config = LlamaConfig(**SHAPES[self.shape])

        def cost(length: int, steps: int) -> float:
            return PASSES * steps * forward_cost(config, length)

        here = [name for name, lacks in self.trainers().items() if lacks is None]
        cells = [
            Cell(f"{name} {length}", cost(length, 2), lambda name=name, length=length: self.measured(name, length, 2))
            for length in self.lengths
            for name in here
        ]
        middle = self.ladder[len(self.ladder) // 2]
        return cells + [Cell(f"{name} longest", cost(middle, 3), lambda name=name: self.longest(name)) for name in here]

    def measured(self, trainer: str, length: int, steps: int) -> dict[str, Any]:
        """From a file where the same measurement, or one of more steps, was made before."""
        paths = [self.folder / f"{trainer} {length} {n} steps.json" for n in range(2, steps - 1, -1)]
        made = next((path for path in paths if path.is_file()), paths[-1])
        return kept(made, lambda: measured(trainer, length, self.shape, self.device, steps))

    def longest(self, trainer: str) -> int:
        return longest(lambda length: self.measured(trainer, length, 1)["fits"], self.ladder)

    def speed(self) -> float:
        """Of products of matrices, at half of which a step runs."""
        size = 512 if self.tiny else 8192
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        matrix = torch.ones(size, size, dtype=dtype, device=self.device)
        float((matrix @ matrix)[0, 0])
        begun = time.perf_counter()
        float((matrix @ matrix @ matrix)[0, 0])
        return 0.5 * 4 * size**3 / (time.perf_counter() - begun)

    def record(self, kept: dict[str, Any]) -> dict[str, Any]:
        report = Report(self.name, seed=0, rehearsal=self.tiny)
        for length in self.lengths:
            cells = {name: kept.get(f"{name} {length}") or {"fits": False} for name in TRAINERS}
            for name, cell in cells.items():
                for base in (STOCK, TRL) if cell["fits"] and name not in (STOCK, TRL) else ():
                    if cells[base]["fits"]:
                        faster = cell["tokens_per_second"] / cells[base]["tokens_per_second"]
                        report.add(f"{length}: tokens a second, {name} over {base}", faster, at_least=LEAST_SPEED)
                        smaller = cell["peak"] / cells[base]["peak"]
                        report.add(f"{length}: peak memory, {name} over {base}", smaller, at_most=MOST_MEMORY)
        lacking = {name: lacks for name, lacks in self.trainers().items() if lacks}
        return {"shape": SHAPES[self.shape], "figures": report.figures, "measured": kept, "not run": lacking}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trainer", choices=TRAINERS, required=True)
    parser.add_argument("--length", type=int, required=True, help="tokens a step")
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=2, help="that are counted; the last is timed")
    options = parser.parse_args()
    print(json.dumps(measure(options.trainer, options.length, options.shape, options.device, options.steps)))


if __name__ == "__main__":
    main()
