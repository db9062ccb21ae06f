"""Fine-tune a model at a longer context, and measure what that changed.

    accelerate launch recipes/finetune.py --config recipes/configs/tiny_yarn_4x.yaml
    accelerate launch recipes/finetune.py --config FILE training.steps=100 training.learning_rate=5e-5
    python recipes/finetune.py --config FILE --dry-run      # what it would take; trains nothing

The model is extended on disk first, so that an adapter trained on it names a base that brings its rope along. A run
is a function of its settings: the rows and the random numbers of a micro-batch follow from the seed, the step and its
number, whichever process reads it. So any number of processes gives the same losses but for rounding, and the same
command goes on from the last checkpoint, bit for bit, whenever it was stopped. In the output folder stand at the end:

    base/            the extended base: the config rewritten, the weights linked
    adapter/         what was trained, with ctxext.json and a model card (model/ where every parameter is trained)
    merged/          if `merge: true`: one plain checkpoint
    log.jsonl        a line a step
    glances.jsonl    what was measured now and then during training
    results.jsonl    the samples of the evaluation before and after (`ctxext report` makes a page of them)
    figures.json     every figure of the run, with settings, machine and versions
    checkpoints/     the last ones, to go on from
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DistributedType
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from transformers.utils import logging

import ctxext
from ctxext.assets import MODEL, PERSUASION
from ctxext.cli import measuring
from ctxext.core.apply import transformers_model
from ctxext.core.probing import in_eval_mode
from ctxext.data import CREAM, Collator, Mixture, Plain, PoSE, check_positions, pack, read_source
from ctxext.data.sources import find_file
from ctxext.evals.engine import Engine
from ctxext.evals.haystack import Haystack
from ctxext.evals.needle import Passkey
from ctxext.evals.perplexity import Perplexity, sliding_losses
from ctxext.evals.prompts import Prompter
from ctxext.evals.results import read_results
from ctxext.evals.runner import Grid, Runner, versions
from ctxext.evals.samples import Place
from ctxext.evals.statistics import paired_loss_difference
from ctxext.evals.summary import Summary
from ctxext.evals.targets import UNEXTENDED, LiveModel, Variant, known_lengths
from ctxext.extension.metadata_file import weights_fingerprint
from ctxext.hub.adapters import AdapterBase, check_all_saved, merge, save_trained, write_record
from ctxext.hub.checkpoint import checkpoint_folder, extend_folder, extended_json
from ctxext.models.text_config import text_config_of
from ctxext.training import checkpoints
from ctxext.training.estimate import PeakMemory, duration, estimate, gib
from ctxext.training.launch import data_parallel, engine_of, make_accelerator, on_my_part
from ctxext.training.loss import use_chunked_loss
from ctxext.training.settings import Settings, read_settings
from ctxext.training.shifted_sparse import use_shifted_sparse_attention
from ctxext.training.trainable import attach_trainable, check_no_dropout, check_rotary, trained_parameters
from ctxext.utils.processes import Processes

console = Console(stderr=True)
# The variants of results.jsonl: the base as it is, extended, and trained.
BASE, UNTRAINED, TRAINED = UNEXTENDED, "untrained", "trained"
GLANCE_SEED = 1_000  # other pass keys than those that are measured before and after


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="a YAML file, such as those in recipes/configs")
    parser.add_argument("--dry-run", action="store_true", help="say what it would take, and stop")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="changes to the config: training.steps=100")
    args = parser.parse_args(arguments)
    settings = read_settings(args.config, args.changes)
    training, output = settings.training, Path(settings.output)
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing", category=FutureWarning)

    # 1. The engine that was asked for, or an error.
    accelerator = make_accelerator(
        settings.engine,
        mixed_precision="bf16" if training.precision == "bf16" else "no",
        log_with=settings.tracker,
        project_dir=output,
    )
    settings.check_engine(engine_of(accelerator).kind)
    micro_batches = micro_batches_of(settings, accelerator)
    main_process = accelerator.is_main_process
    say = partial(console.print, highlight=False, soft_wrap=True) if main_process else lambda *_: None

    # 2. The base, extended on disk: an adapter that names it brings its rope along.
    with accelerator.main_process_first():
        base = MODEL if settings.model == "shipped" else checkpoint_folder(settings.model, settings.revision)
        extended = extended_base(base, output / "base", settings)
    tokenizer = AutoTokenizer.from_pretrained(extended)
    config = AutoConfig.from_pretrained(extended)
    (trained_length, _), (_, target_length) = known_lengths(AutoConfig.from_pretrained(base)), known_lengths(config)
    trained_length = settings.extension.original_max_position_embeddings or trained_length
    vocab_size = config.get_text_config(decoder=True).vocab_size
    length = settings.data.length or target_length
    if length > target_length:
        raise ValueError(
            f"data.length is {length:,}, beyond the {target_length:,} tokens that the extended model covers. Lower it, "
            "or raise extension.target_length."
        )
    if settings.data.positions != "plain" and length == target_length:
        raise ValueError(
            f"data.positions={settings.data.positions} skips positions up to the target, and rows of all its "
            f"{length:,} tokens leave none to skip. Set data.length below that, such as a quarter of it."
        )
    steps = training.steps_of(length)
    say(f"[bold]{base.name}[/], trained at {trained_length:,} tokens, extended to {target_length:,}.")

    # 3. The data, packed once.
    with accelerator.main_process_first():
        packed = [
            pack(
                source,
                read_source(source, args.config.parent),
                tokenizer,
                length,
                settings.data.documents,
                vocab_size=vocab_size,
                num_proc=settings.data.processes,
            )
            for source in settings.data.sources
        ]
    mixture = Mixture(packed, training.seed)
    collator = make_collator(settings, target_length)
    for part, epochs in zip(packed, mixture.epochs(steps * training.batch_size)):
        count = part.accounting
        say(
            f"  {part.source.name}: {count.documents:,} documents, {count.tokens_read:,} tokens in {len(part.rows):,} "
            f"rows ({count.padding:,} tokens of padding, {count.dropped:,} dropped), read {epochs:.2f} times"
        )
    binding = {**settings.binding(), "data": [part.fingerprint for part in packed]}
    if last := checkpoints.latest_checkpoint(output / "checkpoints"):
        checkpoints.check_binding(last, binding)
    measure = None
    if settings.evaluation:
        chosen = settings.evaluation.text
        text = PERSUASION if chosen == "shipped" else find_file(chosen, args.config.parent)
        measure = Measure(settings, accelerator, text, tokenizer, trained_length, target_length)
        if last is None and measure.path.is_file() and TRAINED in read_results(measure.path).header.variants:
            raise FileExistsError(
                f"{measure.path} holds the figures of a model that was trained before, and this run begins anew. Set "
                "another output, or remove that file."
            )

    # 4. The model: what is trained, how loss and attention are computed, and the proof that all of it is so.
    torch.manual_seed(training.seed)  # LoRA's first values
    model = AutoModelForCausalLM.from_pretrained(extended, **loading(settings, accelerator))
    model = attach_trainable(model, settings.trainable).to(accelerator.device)
    check_all_saved(model)
    if engine_of(accelerator).group_size > 1:
        check_no_dropout(model)
    with accelerator.autocast():  # as it will train: what is trained is float32, its base may not be
        if training.loss == "chunked":
            use_chunked_loss(model)
        if training.shifted_sparse_groups:
            use_shifted_sparse_attention(model, training.shifted_sparse_groups)
        check_positions(model, collator, length, vocab_size, batch_size=training.micro_batch_size)
    if training.gradient_checkpointing != "none":
        transformers_model(model).gradient_checkpointing_enable({"use_reentrant": False})
    trained = trained_parameters(model)
    n_trained = sum(parameter.numel() for parameter in trained.values())
    say(f"  {n_trained:,} of {sum(p.numel() for p in model.parameters()):,} parameters are trained")
    optimizer = torch.optim.AdamW(
        trained.values(), lr=training.learning_rate, betas=training.betas, weight_decay=training.weight_decay
    )
    model, optimizer = prepare(accelerator, model, optimizer, settings)
    check_rotary(model)

    # 5. What it will take.
    run = Run(settings, accelerator, model, optimizer, mixture, collator, steps)
    with on_my_part(accelerator, run.batch(mixture.read(0, training.micro_batch_size))):
        pass  # or an error: an engine that cuts rows cannot cut every batch
    expected = None
    if accelerator.distributed_type != DistributedType.DEEPSPEED:  # whose engine takes no step that leaves no trace
        expected = estimate(
            run.probe,
            length=length,
            micro_batches=steps * micro_batches,
            trained=sum(on_this_process(parameter) for parameter in trained_parameters(model).values()),
            memory=PeakMemory(accelerator.device),
            multiple=math.lcm(2 * (training.shifted_sparse_groups or 1), engine_of(accelerator).pieces),
        )
    say(f"[bold]Estimate[/]: {expected or 'none under DeepSpeed'}.")
    if expected and not expected.fits:
        say(
            f"[bold red]More than the {gib(expected.room)} that are free.[/] Lower data.length or "
            "training.micro_batch_size, or set training.gradient_checkpointing to recompute or offload."
        )
    if args.dry_run:
        return

    # 6. What the base does, as it is and extended.
    if measure:
        measure.before(base)

    # 7. Train, from the last checkpoint if there is one.
    accelerator.init_trackers("ctxext", {key: str(value) for key, value in settings.binding().items()})
    done = train(run, binding, measure)

    # 8. Save what was trained, with its base; measure what was saved.
    record = AdapterBase.of(extended, base if settings.model == "shipped" else settings.model, settings.revision)
    saved = save(run, record, tokenizer)
    del run, model, optimizer, trained
    accelerator.free_memory()
    figures = {
        "settings": settings.model_dump(mode="json"),
        "data": {part.source.name: asdict(part.accounting) for part in packed},
        "versions": versions(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, {accelerator.device.type}",
        "processes": accelerator.num_processes,
        "parameters_trained": n_trained,
        "estimated": expected and {"seconds": expected.seconds, "peak_bytes": expected.peak},
        "took": {"seconds": done.seconds, "peak_bytes": done.peak},
    }
    if measure:
        figures["measured"] = measure.after(saved)
    if main_process:
        written = output / ".figures.json"
        written.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        written.replace(output / "figures.json")
        provenance = {name: figures[name] for name in ("settings", "data", "versions", "machine", "took")}
        table = card_table(figures["measured"]["variants"]) if measure else None
        write_record(saved, replace(record, provenance=provenance), table)
        if settings.merge:
            shutil.rmtree(output / "merged", ignore_errors=True)  # of an earlier end of this run
            merge(saved, output / "merged")
    said = f", estimated {duration(expected.seconds)} and {gib(expected.peak)}" if expected else ""
    say(f"Saved {saved}. {steps:,} steps took {duration(done.seconds)} and {gib(done.peak)}{said}.")
    accelerator.end_training()


# ------------------------------------------------------------------------------------ setting up


def extended_base(base: Path, folder: Path, settings: Settings) -> Path:
    """The extended base in `folder`, written if it is not there.

    Raises:
        ValueError: no config can say the extension, or what is there is extended in another way.
    """
    arguments = settings.extension.arguments()
    plan, _ = extended_json(base, **arguments)
    if not plan.is_portable:
        raise ValueError(
            f"{plan.method.name} is what no config can say of {base.name}, as {plan.why_not_portable}: what is trained "
            "would not find its base again. Extend it untrained, by ctxext.extend_context or `ctxext extend`, or take "
            "another method, if `ctxext methods` has one for it."
        )
    if not folder.exists():
        extend_folder(base, folder, say=console.print, **arguments)
        return folder
    there = text_config_of(AutoConfig.from_pretrained(folder))
    if any(getattr(there, name, None) != value for name, value in plan.updates.items()):
        raise ValueError(
            f"{folder} was extended in another way than the settings say ({settings.extension.method}). Choose another "
            "output, or remove that folder."
        )
    # A longer table of positions is loaded, extended and saved anew, maybe by other names.
    if not plan.changes_weights and weights_fingerprint(folder) != weights_fingerprint(base):
        raise ValueError(f"{folder} holds other weights than {base}. Choose another output, or remove that folder.")
    return folder


def micro_batches_of(settings: Settings, accelerator: Accelerator) -> int:
    """Micro-batches that this process reads in a step.

    Raises:
        ValueError: the batch cannot be shared evenly.
    """
    training, (_, world) = settings.training, data_parallel(accelerator)
    share = training.micro_batch_size * world
    if training.batch_size % share:
        raise ValueError(
            f"training.batch_size is {training.batch_size}, which {world} processes cannot share in micro-batches of "
            f"{training.micro_batch_size}. Make it a multiple of {share}, or lower training.micro_batch_size."
        )
    return training.batch_size // share


def make_collator(settings: Settings, target_length: int) -> Collator:
    if settings.data.positions == "pose":
        return PoSE(target_length=target_length, chunks=settings.data.chunks, seed=settings.training.seed)
    if settings.data.positions == "cream":
        return CREAM(target_length=target_length, seed=settings.training.seed)
    return Plain()


def loading(settings: Settings, accelerator: Accelerator) -> dict[str, Any]:
    """How the base is loaded: in float32 where that is wanted, in its own type or four bits otherwise."""
    arguments: dict[str, Any] = {"attn_implementation": settings.training.attention}
    if settings.trainable.quantization:
        arguments["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=settings.trainable.quantization,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        arguments["device_map"] = {"": accelerator.device}
    whole = settings.trainable.kind == "full" or settings.training.precision == "fp32"
    return {**arguments, "dtype": torch.float32 if whole or accelerator.device.type == "cpu" else "auto"}


def prepare(accelerator: Accelerator, model: nn.Module, optimizer: Any, settings: Settings) -> tuple[nn.Module, Any]:
    """`accelerator.prepare`, with what DeepSpeed wants beside."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return accelerator.prepare(model, optimizer)
    accelerator.state.deepspeed_plugin.deepspeed_config |= {
        "gradient_clipping": settings.training.max_grad_norm,
        "train_micro_batch_size_per_gpu": settings.training.micro_batch_size,
    }
    rotary = {module: module.inv_freq.clone() for module in model.modules() if hasattr(module, "inv_freq")}
    prepared = accelerator.prepare(model, optimizer)
    for module, table in rotary.items():
        module.inv_freq = table.to(accelerator.device)  # which some of its versions cast
    return prepared


def on_this_process(parameter: torch.Tensor) -> int:
    """Numbers of a parameter that this process holds."""
    return parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()


# -------------------------------------------------------------------------------------- training


@dataclass
class Run:
    """Reads the rows of a step and trains on them. What a step does is a function of the seed and its number."""

    settings: Settings
    accelerator: Accelerator
    model: nn.Module
    optimizer: Any
    mixture: Mixture
    collator: Collator
    steps: int

    def __post_init__(self) -> None:
        self.rank, self.world = data_parallel(self.accelerator)
        offload = self.settings.training.gradient_checkpointing == "offload"
        pinned = self.accelerator.device.type == "cuda"
        self.saving = partial(torch.autograd.graph.save_on_cpu, pinned) if offload else nullcontext

    def learning_rate(self, number: int) -> float:
        training = self.settings.training
        if number < training.warmup_steps:
            return training.learning_rate * (number + 1) / training.warmup_steps
        gone = (number - training.warmup_steps) / max(1, self.steps - training.warmup_steps)
        left = {"constant": 1.0, "linear": 1 - gone, "cosine": (1 + math.cos(math.pi * gone)) / 2}[training.schedule]
        return training.learning_rate * (training.final_learning_rate * (1 - left) + left)

    def step(self, number: int) -> dict[str, float]:
        """Train one step. Its loss is the mean over all targets of the batch, in nats, whoever read them.

        Raises:
            FloatingPointError: the loss or the gradient is no number; names the rows. This step changed nothing (but
                under DeepSpeed, whose engine has stepped by then).
        """
        training = self.settings.training
        batch = self.mixture.read(number * training.batch_size, training.batch_size)
        # Rows may ask for nothing, as pieces of a long question do: then nothing is learned.
        targets = max(1, sum(int(row["n_targets"]) for row in batch))
        size = training.micro_batch_size
        micro_batches = [batch[first : first + size] for first in range(0, len(batch), size)]
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(number)
        self.model.train()
        loss = torch.zeros((), device=self.accelerator.device)
        for k in range(self.rank, len(micro_batches), self.world):
            # Dropout belongs to the micro-batch, whichever process reads it and whatever was drawn before. Hashed,
            # as a CPU generator takes the lowest 32 bits of a seed alone.
            torch.manual_seed(int(np.random.default_rng([training.seed, number, k]).integers(2**32)))
            last = k + self.world >= len(micro_batches)
            loss += self.forward_backward(self.batch(micro_batches[k]), targets, last)
        loss = float(self.accelerator.reduce(loss, "sum"))
        norm = float(self.accelerator.clip_grad_norm_(self.model.parameters(), training.max_grad_norm))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.optimizer.zero_grad()
            raise FloatingPointError(
                f"step {number + 1}: the loss is {loss}, the gradient's norm {norm}. The batch was "
                f"{', '.join(row['name'] for row in batch)}. The checkpoints before it stand: look at those rows, or "
                "lower training.learning_rate and begin in another output folder."
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": loss, "grad_norm": norm, "learning_rate": self.learning_rate(number), "targets": targets}

    def batch(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Rows as the model takes them, on its device."""
        batch = {name: tensor.to(self.accelerator.device) for name, tensor in self.collator(rows).items()}
        if engine_of(self.accelerator).group_size > 1:  # shifted before the row is cut
            batch["shift_labels"] = torch.nn.functional.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
        return batch

    def forward_backward(self, batch: dict[str, torch.Tensor], targets: int, last: bool) -> torch.Tensor:
        """One micro-batch, the `last` of a step or not: its part of the step's loss, in nats a target."""
        self.accelerator.sync_gradients = last  # DeepSpeed's engine steps when it is
        waiting = nullcontext() if last else self.accelerator.no_sync(self.model)
        with waiting, on_my_part(self.accelerator, batch) as part:
            with self.saving():
                loss = self.model(**part, num_items_in_batch=targets, use_cache=False).loss
            # The engines average over processes; a token's loss counts once.
            self.accelerator.backward(loss * self.accelerator.num_processes)
        return loss.detach()

    def probe(self, tokens: int) -> None:
        """Forward and backward through a micro-batch of random tokens, for the estimate."""
        ids = torch.randint(transformers_model(self.model).config.get_text_config(decoder=True).vocab_size, (tokens,))
        row = {"input_ids": ids, "labels": ids, "documents": [tokens], "index": 0}
        rows = [row] * self.settings.training.micro_batch_size
        self.model.train()
        self.forward_backward(self.batch(rows), tokens * len(rows), last=True)
        self.optimizer.zero_grad()


def train(run: Run, binding: dict[str, Any], measure: Measure | None) -> checkpoints.Progress:
    """Train to the end, from the last checkpoint on."""
    training, accelerator, output = run.settings.training, run.accelerator, Path(run.settings.output)
    done, folder = checkpoints.Progress(), output / "checkpoints"
    if last := checkpoints.latest_checkpoint(folder):
        done = checkpoints.load_checkpoint(last, run.model, run.optimizer, binding)
        accelerator.print(f"Going on from {last}.")
    log, glances = (
        Log(output / name, done.step, accelerator.is_main_process) for name in ("log.jsonl", "glances.jsonl")
    )
    glancing = measure is not None and measure.every is not None
    if glancing and done.step == 0:
        glances.add(measure.glance(run.model, done))
    memory = PeakMemory(accelerator.device)
    with bar(run.steps, done.step, accelerator.is_main_process) as advance:
        while done.step < run.steps:
            begin = time.perf_counter()
            outcome = run.step(done.step)
            passed = time.perf_counter() - begin
            read = training.batch_size * run.mixture.length
            done = checkpoints.Progress(
                step=done.step + 1,
                tokens=done.tokens + read,
                targets=done.targets + outcome.pop("targets"),
                seconds=done.seconds + passed,
                peak=max(done.peak, memory.at_most or 0),
            )
            log.add({"step": done.step, "tokens": done.tokens, "targets": done.targets, **outcome})
            speed = {"tokens_per_second": read / passed, "memory_gib": (memory.now or 0) / 2**30}
            accelerator.log({**outcome, **speed, "tokens": done.tokens}, step=done.step)
            advance(loss=outcome["loss"], left=(run.steps - done.step) * read, **speed)
            if glancing and (done.step % measure.every == 0 or done.step == run.steps):
                glances.add(measure.glance(run.model, done))
                memory.restart()  # what a glance takes is not the training's
            if done.step % training.checkpoint_every == 0 or done.step == run.steps:
                checkpoints.save_checkpoint(
                    folder,
                    run.model,
                    run.optimizer,
                    done,
                    binding,
                    keep=training.keep_checkpoints,
                    main=accelerator.is_main_process,
                    wait=accelerator.wait_for_everyone,
                )
    return done


class Log:
    """A file with a JSON line for each step; lines beyond step `done` are of a run that was stopped, and go."""

    def __init__(self, path: Path, done: int, writes: bool) -> None:
        self.path, self.writes = path, writes
        if writes and path.exists():
            lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            kept = path.with_suffix(".partial")
            kept.write_text("".join(line for line in lines if done and json.loads(line)["step"] <= done))
            kept.replace(path)

    def add(self, record: dict[str, Any]) -> None:
        if self.writes:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")


@contextmanager
def bar(total: int, done: int, shown: bool) -> Iterator[Callable[..., None]]:
    columns = (BarColumn(bar_width=12), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not shown) as progress:
        task = progress.add_task("", total=total, completed=done)

        def advance(loss: float, left: int, tokens_per_second: float, memory_gib: float) -> None:
            said = f"loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s, {left / 1e6:.2f}M left, {memory_gib:.1f} GiB"
            progress.update(task, advance=1, description=said)

        yield advance


# ------------------------------------------------------------------------- measuring and saving


class Measure:
    """Pass keys and perplexity before, during and after. It reads a text that was not trained on.

    Two figures stand beside those of `ctxext eval`: the loss of the last `trained_length` tokens of windows of the
    target length, and what the base loses on the same tokens when it sees as much as it was trained with.
    """

    def __init__(
        self, settings: Settings, accelerator: Accelerator, text: Path, tokenizer: Any, trained: int, target: int
    ) -> None:
        assert settings.evaluation is not None
        self.settings, self.accelerator, self.trained, self.target = settings, accelerator, trained, target
        self.every = settings.evaluation.every
        if self.every and engine_of(accelerator).kind not in ("single", "ddp"):
            raise ValueError(
                "evaluation.every looks at the model as it is trained, which must then be whole on each process. Set "
                "it to null: before and after are measured on copies."
            )
        self.prompter = Prompter(tokenizer)
        self.haystack = Haystack.from_file(text, tokenizer, at_least=target)
        chosen = settings.evaluation
        depths = tuple(k / max(1, chosen.depths - 1) for k in range(chosen.depths))
        self.grid = Grid(
            retrieval=(Passkey(),),
            texts=(Perplexity(),),
            lengths=chosen.lengths or measuring.default_lengths(trained, target),
            depths=depths,
            trials=chosen.trials,
            windows=chosen.windows,
            gate=(trained,),
            seed=settings.training.seed,
        )
        self.path = Path(settings.output) / "results.jsonl"
        if (longest := max(*self.grid.lengths, target)) > self.haystack.n_tokens:
            raise ValueError(
                f"{text} has {self.haystack.n_tokens:,} tokens, and windows of {longest:,} are to be read of it. Give "
                "a longer evaluation.text, or set evaluation to null."
            )

    def before(self, base: Path) -> None:
        """The base as it is, and extended."""
        model = self._load(AutoModelForCausalLM.from_pretrained, base)
        self._run(model, base.name, [Variant(), Variant(UNTRAINED, self.settings.extension.arguments())], merge=False)
        self.base_tail = self._tail(model, self.grid.windows, sees=self.trained)

    def after(self, saved: Path) -> dict[str, Any]:
        """What was saved, loaded anew; every figure of the three."""
        model = self._load(ctxext.load, saved)
        results = self._run(model, saved.parent.name, [Variant(TRAINED)], merge=True)
        tail = self._tail(model, self.grid.windows, sees=self.target)
        if results is None:
            return {}
        summary = Summary(results)
        measuring.print_summary(summary)
        n, windows, glanced = self.trained, self.grid.windows, self.settings.evaluation.glance_windows
        difference = paired_loss_difference(tail, self.base_tail, [n] * windows)
        return {
            "variants": {name: figures_of(summary, name) for name in summary.variants},
            "tail": {
                "tokens": n,
                "windows": windows,
                "loss": sum(tail) / (n * windows),
                "base_loss_within_its_length": sum(self.base_tail) / (n * windows),
                "base_glance": sum(self.base_tail[:glanced]) / (n * glanced),
                "difference": difference._asdict(),
            },
        }

    def glance(self, model: nn.Module, done: checkpoints.Progress) -> dict[str, Any]:
        """The loss of the last tokens and the share of pass keys found, at the target length, as it stands."""
        inner, chosen = transformers_model(model), self.settings.evaluation
        with in_eval_mode(model), self.accelerator.autocast():
            tail, found = self._tail(inner, chosen.glance_windows, sees=self.target), self._found(inner)
        figures = {"tail_loss": sum(tail) / (self.trained * chosen.glance_windows)}
        if found is not None:
            figures["passkey"] = found
        return {"step": done.step, "tokens": done.tokens, **figures}

    def _found(self, model: Any) -> float | None:
        """The share of pass keys that a glance finds at the target length."""
        trials = self.settings.evaluation.glance_trials
        places = Passkey().places([self.target], self.grid.depths, trials, GLANCE_SEED)
        samples = [Passkey().sample(place, self.prompter, self.haystack) for place in places]
        n = len(self.grid.depths)
        answers = Engine(model).forced([samples[k : k + n] for k in range(0, len(samples), n)]) if samples else ()
        found = [answer.guess.tolist() == list(sample.input_ids[sample.n_prompt :]) for sample, answer in answers]
        return sum(found) / len(found) if found else None

    def _load(self, load: Callable[..., Any], folder: Path) -> Any:
        device = self.accelerator.device
        return load(folder, dtype=torch.float32 if device.type == "cpu" else "auto").to(device).eval()

    def _run(self, model: Any, name: str, variants: list[Variant], merge: bool) -> Any:
        accelerator = self.accelerator
        runner = Runner(
            LiveModel(model, self.prompter, name, self.trained),
            self.haystack,
            self.grid,
            beyond=True,
            processes=Processes(accelerator.process_index, accelerator.num_processes),
        )
        return measuring.run(runner, self.path, variants, merge=merge)

    def _tail(self, model: Any, windows: int, sees: int) -> list[float]:
        """For each window of the target length, what its last tokens cost together, in nats.

        Args:
            sees: tokens that the model may see; with fewer than the target, windows of so many slide over the text.
        """
        engine, n, bos = Engine(model), self.trained, self.prompter.special
        sums = []
        for window in range(windows):
            place = Place("perplexity", self.target, None, window, self.settings.training.seed)
            ids = Perplexity().window(place, self.haystack, bos).input_ids
            if sees >= self.target:
                losses = engine.losses(ids).losses
            else:
                losses = sliding_losses(engine, ids[-(n + sees) :], sees, sees // 8, bos)
            sums.append(losses[-n:].double().sum().item())
        return sums


def figures_of(summary: Summary, variant: str) -> dict[str, Any]:
    """Shares of pass keys by length, perplexity by band, and the price within the trained length, with intervals."""
    lengths, gate = summary.read_lengths, summary.gate(variant)
    return {
        "passkey": {n: share._asdict() for n, share in summary.by_length(variant, "passkey").items()},
        "perplexity": {f"{a}-{b}": summary.perplexity(variant, b, a) for a, b in pairwise([0, *lengths])},
        "short_loss": None if variant == BASE or gate.loss is None else gate.loss._asdict(),
        "short_passkey": None if variant == BASE else gate.retrieval["passkey"]._asdict(),
    }


def card_table(measured: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The same for a model card: a row a variant."""
    names = {BASE: "base", UNTRAINED: "extended, not trained", TRAINED: "trained"}
    table = {}
    for variant, figures in measured.items():
        row = {f"passkey at {int(n):,}": f"{share['value']:.0%}" for n, share in figures["passkey"].items()}
        read = {band: value for band, value in figures["perplexity"].items() if value is not None}
        row |= {f"perplexity at {band}": f"{value:.2f}" for band, value in read.items()}
        if price := figures["short_loss"]:
            row["price at short length (nats)"] = f"{price['value']:+.4f} [{price['low']:+.4f}, {price['high']:+.4f}]"
        table[names[variant]] = row
    return table


def save(run: Run, record: AdapterBase, tokenizer: Any) -> Path:
    """The adapter, or the whole model where every parameter was trained; gathered from all processes."""
    lora = run.settings.trainable.kind == "lora"
    folder = Path(run.settings.output) / ("adapter" if lora else "model")
    accelerator = run.accelerator
    if accelerator.distributed_type == DistributedType.DEEPSPEED:  # only it can gather its shards, in its own type
        tensors = accelerator.get_state_dict(run.model)
    else:
        tensors = checkpoints.gather_trained(run.model, accelerator.is_main_process)
        if not lora:
            tensors |= checkpoints.gather_buffers(run.model, accelerator.is_main_process)
    if accelerator.is_main_process:
        save_trained(accelerator.unwrap_model(run.model), folder, record, tokenizer, tensors)
    accelerator.wait_for_everyone()
    return folder


if __name__ == "__main__":
    main()
