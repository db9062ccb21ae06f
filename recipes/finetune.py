"""Fine-tune a model at a longer context, and measure what that changed.

    accelerate launch recipes/finetune.py --config recipes/configs/tiny_yarn_4x.yaml
    accelerate launch recipes/finetune.py --config FILE training.steps=100 training.learning_rate=5e-5
    python recipes/finetune.py --config FILE --dry-run      # estimates time and memory (--estimate: from the config)

The model is extended on disk first, so that it is trained and reloaded with the same RoPE scaling. The rows and random
numbers of a micro-batch depend only on the seed, the step and its number: any number of processes gives the same losses
except for rounding, and the same command resumes from the last checkpoint, bit for bit. The output folder has

    base/            the extended base: the config rewritten, the weights linked
    adapter/         what was trained, with ctxext.json and a model card (model/ for a full fine-tune)
    merged/          if `merge: true`: one plain checkpoint
    log.jsonl, mid_training.jsonl    a line per step, and one per mid-training evaluation
    results.jsonl    the samples of the evaluation before and after (`ctxext report` makes an HTML report)
    figures.json     every figure of the run, with settings, machine and versions
    checkpoints/     the last ones, to resume from

A config with `stages:` (configs/tiny_yarn_stages.yaml) has such a folder for each, which starts from the one before.
"""

from __future__ import annotations

import argparse
import math
import shutil
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from transformers.utils import logging

from ctxext.core.apply import transformers_model
from ctxext.data import Collator, Mixture, make_collator
from ctxext.evals.targets import known_lengths
from ctxext.evals.training import Measure, card_table
from ctxext.hub.adapters import AdapterBase, merge, write_record
from ctxext.hub.checkpoint import config_in_use, extended_base, load_tokenizer
from ctxext.training import checkpoints, setup
from ctxext.training.estimate import PeakMemory, duration, gib
from ctxext.training.launch import data_parallel, engine_of, make_accelerator, on_my_part
from ctxext.training.log import Log, bar
from ctxext.training.memory import report
from ctxext.training.settings import Settings, read_settings
from ctxext.training.stages import FIGURES, is_finished, starting_point, what_next
from ctxext.training.throughput import Throughput, in_words
from ctxext.training.trainable import check_rotary, trained_parameters
from ctxext.utils.json_files import write_json
from ctxext.utils.machine import machine, versions
from ctxext.utils.screen import console, plain_warnings
from ctxext.utils.values import counted


def train(run: Run, binding: dict[str, Any], measure: Measure | None) -> checkpoints.Progress:
    """Train to the end, from the last checkpoint on; with early stopping, to the weights of the best evaluation."""
    training, accelerator, output = run.settings.training, run.accelerator, Path(run.settings.output)
    done, folder = checkpoints.Progress(), output / "checkpoints"
    if last := checkpoints.latest_checkpoint(folder):
        done = checkpoints.load_checkpoint(last, run.model, run.optimizer, binding)
        accelerator.print(f"Resuming from {last}.")
    log, mid_training = (Log(output / name, done.step, accelerator) for name in ("log.jsonl", "mid_training.jsonl"))
    every, keep = measure.every if measure else None, training.keep_checkpoints
    patience = training.early_stopping and every and training.early_stopping * every  # in steps
    if every and done.step == 0:
        mid_training.add(measure.during(run.model, done))
    memory = PeakMemory(accelerator.device)
    with bar(run.steps, done.step, accelerator.is_main_process) as advance:
        while done.step < run.steps and not done.is_over(patience):
            begin = time.perf_counter()
            outcome = run.step(done.step)
            passed = time.perf_counter() - begin
            speed, targets = run.throughput.at(passed), int(outcome.pop("targets"))
            tokens, peak = done.tokens + run.throughput.tokens, max(done.peak, memory.at_most or 0)
            counts = {"step": done.step + 1, "tokens": tokens, "targets": done.targets + targets}
            done = replace(done, **counts, seconds=done.seconds + passed, peak=peak)
            log.add({**counts, **outcome}, **speed, targets_per_step=targets, peak_gib=peak / 2**30)
            advance(loss=outcome["loss"], peak=peak, **speed)
            if every and (done.step % every == 0 or done.step == run.steps):
                mid_training.add(looked := measure.during(run.model, done))
                memory.restart()  # exclude the evaluation's memory
            if judged := bool(patience and every and done.step % every == 0):
                done = done.judged(looked["tail_loss"])
            if judged or done.step % training.checkpoint_every == 0 or done.step == run.steps:
                checkpoints.save_checkpoint(folder, run.model, run.optimizer, done, binding, keep=keep)
    checkpoints.load_best(folder, run.model, run.optimizer, done, binding)
    return done


@dataclass
class Run:
    """Reads the rows of a step and trains on them. A step depends only on the seed and its number."""

    settings: Settings
    accelerator: Accelerator
    model: nn.Module
    optimizer: Any
    mixture: Mixture
    collator: Collator
    throughput: Throughput
    steps: int

    def __post_init__(self) -> None:
        self.rank, self.world = data_parallel(self.accelerator)
        offload = self.settings.training.gradient_checkpointing == "offload"
        pinned = self.accelerator.device.type == "cuda"
        self.saving = partial(torch.autograd.graph.save_on_cpu, pinned) if offload else nullcontext

    def step(self, number: int) -> dict[str, float]:
        """Train one step. Its loss is the mean over all targets of the batch and all processes, in nats.

        Raises:
            FloatingPointError: the loss or the gradient is not finite; names the rows. The step changed nothing (except
                under DeepSpeed, whose engine has stepped by then).
        """
        training = self.settings.training
        rate = training.learning_rate_at(number, self.steps)
        batch = self.mixture.read(number * training.batch_size, training.batch_size)
        # Rows may have no targets, such as pieces of a long question; then nothing is learned.
        targets = max(1, sum(int(row["n_targets"]) for row in batch))
        size = training.micro_batch_size
        micro_batches = [batch[first : first + size] for first in range(0, len(batch), size)]
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.train()
        loss = torch.zeros((), device=self.accelerator.device)
        for k in range(self.rank, len(micro_batches), self.world):
            # Dropout belongs to the micro-batch, whichever process reads it; a CPU generator takes 32 bits of a seed.
            torch.manual_seed(int(np.random.default_rng([training.seed, number, k]).integers(2**32)))
            last = k + self.world >= len(micro_batches)
            loss += self.forward_backward(self.batch(micro_batches[k]), targets, last)
        loss = float(self.accelerator.reduce(loss, "sum"))
        norm = float(self.accelerator.clip_grad_norm_(self.model.parameters(), training.max_grad_norm))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.optimizer.zero_grad()
            raise FloatingPointError(
                f"step {number + 1}: the loss is {loss} and the gradient norm {norm}, for the rows "
                f"{', '.join(row['name'] for row in batch)}. Earlier checkpoints are kept: check these rows, or lower "
                "training.learning_rate and start in another output folder."
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": loss, "grad_norm": norm, "learning_rate": rate, "targets": targets}

    def batch(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Rows as the model's inputs, on its device."""
        batch = {name: tensor.to(self.accelerator.device) for name, tensor in self.collator(rows).items()}
        if engine_of(self.accelerator).group_size > 1:  # shifted before the row is cut
            batch["shift_labels"] = torch.nn.functional.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
        return batch

    def forward_backward(self, batch: dict[str, torch.Tensor], targets: int, last: bool) -> torch.Tensor:
        """Train on one micro-batch; returns its part of the step's loss, in nats per target."""
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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="a YAML file, such as those in recipes/configs")
    for flag, does in ("--dry-run", "measure short steps"), ("--estimate", "model the memory, without weights"):
        parser.add_argument(flag, action="store_true", help=f"{does}, and stop")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="config overrides, such as training.steps=100")
    args = parser.parse_args(arguments)
    plain_warnings()
    if args.estimate:
        return report(args.config, args.changes)
    stages = read_settings(args.config, args.changes)
    logging.disable_progress_bar()
    precision = "bf16" if stages[0].training.precision == "bf16" else "no"
    tracked = {"log_with": stages[0].tracker, "project_dir": stages[0].output}
    accelerator = make_accelerator(stages[0].engine, mixed_precision=precision, **tracked)
    for number, settings in enumerate(stages):
        if not args.dry_run and is_finished(stages, number):
            accelerator.print(f"{settings.output} is finished. {what_next(settings.saved)}", file=console.file)
            continue
        with settings.base_folder(args.dry_run) as extended:
            finetune(accelerator, stages, number, args.config.parent, extended, args.dry_run)
    accelerator.end_training()


def finetune(
    accelerator: Accelerator, stages: list[Settings], number: int, folder: Path, extended: Path, dry_run: bool
) -> None:
    """One stage; data is relative to `folder`, and the extended base is in `extended`."""
    settings = stages[number]
    training, data, output, saved = settings.training, settings.data, Path(settings.output), settings.saved
    settings.check_engine(engine_of(accelerator).kind)
    micro_batches = setup.micro_batches_of(settings, accelerator)
    say = partial(console.print, highlight=False, soft_wrap=True) if accelerator.is_main_process else lambda *_: None

    # 1. The base, extended on disk before it is loaded.
    with accelerator.main_process_first():
        start = starting_point(stages, number, extended.with_name("start"), dry_run)
        extended = extended_base(start.folder, extended, **settings.extension.arguments())
    tokenizer = load_tokenizer(extended)
    (trained_length, _), (_, target_length) = (known_lengths(config_in_use(f)) for f in (start.folder, extended))
    trained_length = settings.extension.original_max_position_embeddings or trained_length
    steps = training.steps_of(length := settings.row_length(target_length))
    record = AdapterBase.of(extended, start.folder)
    setup.check_attention(extended, training.attention)
    lengths = {"trained": trained_length, "target": target_length}
    measure = Measure(settings, accelerator, folder, tokenizer, **lengths) if settings.evaluation else None
    say(f"[bold]{start.name}[/], trained at {trained_length:,} tokens, extended to {target_length:,}.")

    # 2. The data, packed once.
    with accelerator.main_process_first():
        packed = setup.packed_sources(settings, folder, tokenizer, length, extended)
    mixture = Mixture(packed, training.seed)
    collator = make_collator(data.positions, target_length=target_length, chunks=data.chunks, seed=training.seed)
    for part, epochs in zip(packed, mixture.epochs(steps * training.batch_size)):
        say(f"  {part.source.name}: {part.accounting}; {epochs:.2f} epochs")
    binding = {**settings.binding(), "data": [part.fingerprint for part in packed]}
    last = checkpoints.latest_checkpoint(output / "checkpoints")
    done = checkpoints.check_binding(last, binding, steps) if last else checkpoints.Progress()
    if measure:
        measure.check_results(done, goes_on=done.step < steps and not dry_run)

    # 3. The model: its trained parameters, loss and attention, all verified.
    model = setup.model_to_train(extended, settings, accelerator, collator, length)
    trained = trained_parameters(model)
    n_trained, of_all = (transformers_model(model).num_parameters(only_trainable=only) for only in (True, False))
    throughput = Throughput.of(accelerator, settings, model, mixture)
    say(f"  {n_trained:,} of {of_all:,} parameters are trained\n  {throughput}")
    optimizer = torch.optim.AdamW(
        trained.values(), lr=training.learning_rate, betas=training.betas, weight_decay=training.weight_decay
    )
    model, optimizer = setup.prepare(accelerator, model, optimizer, settings)
    check_rotary(model)

    # 4. The estimate of time and memory.
    run = Run(settings, accelerator, model, optimizer, mixture, collator, throughput, steps)
    with on_my_part(accelerator, run.batch(mixture.read(0, training.micro_batch_size))):
        pass  # raises if the engine splits rows and cannot split these
    expected = setup.estimated(run.probe, accelerator, model, length, (steps - done.step) * micro_batches)
    say(f"[bold]Estimate[/]: {expected or 'none under DeepSpeed.'}\n{checkpoints.planned(training, steps, done)}")
    if dry_run:
        return
    expected = expected and replace(expected, seconds=expected.seconds + done.seconds)  # of the whole run

    # 5. Measure the base, train from the last checkpoint if there is one, save, measure what was saved.
    if measure:
        measure.before(start.original, start.folder)
    setup.start_trackers(accelerator, settings)
    with checkpoints.interruptible(output / "checkpoints", training.checkpoint_every, say):
        done = train(run, binding, measure)
    checkpoints.save_result(accelerator, run.model, settings, record, tokenizer)
    del run, model, optimizer, trained
    accelerator.free_memory()
    speed = throughput.at(done.seconds / done.step)
    figures = {
        "settings": settings.model_dump(mode="json"),
        "data": {part.source.name: asdict(part.accounting) for part in packed},
        "versions": versions(),
        "machine": machine(accelerator.device.type),
        "processes": accelerator.num_processes,
        "parameters_trained": n_trained,
        "estimated": expected and {"seconds": expected.seconds, "peak_bytes": expected.peak},
        "took": {"seconds": done.seconds, "peak_bytes": done.peak, "steps": done.step, **speed},
        "saved_step": done.best_step or done.step,
    }
    figures |= {"measured": measure.after(saved)} if measure else {}
    if accelerator.is_main_process:
        provenance = {name: figures[name] for name in ("settings", "data", "versions", "machine", "took")}
        table = card_table(figures["measured"]["variants"]) if measure else None
        write_record(saved, replace(record, provenance=provenance), table)
        if settings.merge:
            shutil.rmtree(output / "merged", ignore_errors=True)  # from an earlier, complete run
            merge(saved, output / "merged")
        write_json(output / FIGURES, figures)
    accelerator.wait_for_everyone()
    said = f", estimated {duration(expected.seconds)} and {gib(expected.peak)}" if expected else ""
    at = f" as of step {done.best_step:,}, where the loss was lowest" if done.best_step else ""
    took = f"took {duration(done.seconds)} ({in_words(**speed)}) and {gib(done.peak or None)}"
    say(f"Saved {saved}{at}. {counted(done.step, 'step')} {took}{said}.\n{what_next(saved)}")


if __name__ == "__main__":
    main()
