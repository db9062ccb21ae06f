"""Evaluate a fine-tune before, during and after training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

import ctxext
from ctxext.assets import PERSUASION
from ctxext.core.apply import transformers_model
from ctxext.core.probing import in_eval_mode
from ctxext.data.sources import find_file
from ctxext.evals.engine import Engine
from ctxext.evals.haystack import Haystack
from ctxext.evals.loading import default_lengths
from ctxext.evals.needle import Passkey
from ctxext.evals.perplexity import Perplexity, sliding_losses
from ctxext.evals.prompts import Prompter
from ctxext.evals.results import forget_variant, read_results
from ctxext.evals.runner import Grid, Runner
from ctxext.evals.samples import Place
from ctxext.evals.screen import print_summary, run_with_bar
from ctxext.evals.statistics import Interval, paired_loss_difference
from ctxext.evals.summary import Summary
from ctxext.evals.targets import UNEXTENDED, LiveModel, Variant
from ctxext.extension.adapter_config import origin
from ctxext.extension.metadata_file import weights_fingerprint
from ctxext.hub.adapters import AdapterBase
from ctxext.hub.checkpoint import load_model
from ctxext.training.checkpoints import Progress
from ctxext.training.launch import engine_of
from ctxext.training.settings import Settings
from ctxext.utils.processes import Processes

# The variants of results.jsonl: the baseline, extended, and fine-tuned.
BASE, UNTRAINED, TRAINED = UNEXTENDED, "untrained", "trained"
MID_TRAINING_SEED = 1_000  # different passkeys from those measured before and after


class Measure:
    """Passkeys and perplexity before, during and after training, on a held-out text.

    Adds two figures to those of `ctxext eval`: the loss on the last `trained_length` tokens of windows of the target
    length, and the base's loss on the same tokens with a context of its trained length.

    Args:
        folder: the folder of the settings file, which its paths are relative to.
    """

    def __init__(
        self, settings: Settings, accelerator: Accelerator, folder: Path, tokenizer: Any, trained: int, target: int
    ) -> None:
        chosen = settings.evaluation
        assert chosen is not None
        self.chosen, self.every = chosen, chosen.every
        self.looked = chosen.mid_training_windows or min(4, chosen.windows)  # windows of a mid-training evaluation
        self.settings, self.accelerator, self.trained, self.target = settings, accelerator, trained, target
        if self.every and engine_of(accelerator).group_size > 1:
            raise ValueError(
                "evaluation.every evaluates the model in training on whole texts, and this engine splits them over its "
                "processes. Set it to null; the evaluations before and after training still run."
            )
        text = PERSUASION if chosen.text == "bundled" else find_file(chosen.text, folder)
        self.prompter = Prompter(tokenizer)
        self.haystack = Haystack.from_file(text, tokenizer, at_least=target)
        self.grid = Grid(
            retrieval=(Passkey(),),
            texts=(Perplexity(),),
            lengths=chosen.lengths or default_lengths(trained, target),
            depths=tuple(k / max(1, chosen.depths - 1) for k in range(chosen.depths)),
            trials=chosen.trials,
            windows=chosen.windows,
            gate=(trained,),
            seed=settings.training.seed,
        )
        if max(self.grid.lengths) > target:
            raise ValueError(
                f"evaluation.lengths has {max(self.grid.lengths):,} tokens, beyond the target of {target:,}. Lower it. "
                "To measure beyond the target, run `ctxext eval --beyond` on what is saved."
            )
        self.path = Path(settings.output) / "results.jsonl"
        if target > self.haystack.n_tokens:
            raise ValueError(
                f"{text} has {self.haystack.n_tokens:,} tokens, fewer than a window of {target:,}. Set "
                "evaluation.text to a longer text, or evaluation to null."
            )

    def check_results(self, done: Progress, goes_on: bool) -> None:
        """Remove the samples of an earlier result, if there is one, where the run goes on from it.

        Raises:
            FileExistsError: the run starts over, and its results file has figures of another run.
        """
        if done.step == 0 and self.path.is_file() and TRAINED in read_results(self.path).header.variants:
            raise FileExistsError(
                f"{self.path} holds results of an earlier run, and this run starts over. Set another output, or "
                "remove that file."
            )
        if done.step and goes_on:
            if self.accelerator.is_main_process and self.path.parent.exists():
                forget_variant(self.path, TRAINED, ("weights", "method"))
            self.accelerator.wait_for_everyone()

    def before(self, original: Path, start: Path) -> None:
        """Measure the baseline, and the model that training starts from, extended.

        Args:
            start: the original model, or one that has its config and the weights of the stage before.
        """
        load = partial(load_model, auto=AutoModelForCausalLM)
        model = self._load(load, original)
        name = Path(origin(original)[0]).name
        self._run(model, name, [Variant()], merge=False)
        self.base_tail = self._tail(model, self.grid.windows, sees=self.trained)
        if start != original:
            model = self._load(load, start)
        self._run(model, name, [Variant(UNTRAINED, self.settings.extension.arguments())], merge=False)

    def after(self, saved: Path) -> dict[str, Any]:
        """Measure the reloaded fine-tuned model; returns every figure of the three."""
        model = self._load(ctxext.load, saved)
        # By these a model card matches them, also that of the merged model.
        known = {"weights": weights_fingerprint(saved), "method": AdapterBase.of_folder(saved).method}
        results = self._run(model, saved.parent.name, [Variant(TRAINED)], merge=True, **known)
        tail = self._tail(model, self.grid.windows, sees=self.target)
        if results is None:
            return {}
        summary = Summary(results)
        print_summary(summary)
        n, windows, looked = self.trained, self.grid.windows, self.looked
        difference = paired_loss_difference(tail, self.base_tail, [n] * windows)
        return {
            "variants": {name: figures_of(summary, name) for name in summary.variants},
            "tail": {
                "tokens": n,
                "windows": windows,
                "loss": sum(tail) / (n * windows),
                "base_loss_within_its_length": sum(self.base_tail) / (n * windows),
                "base_mid_training": sum(self.base_tail[:looked]) / (n * looked),
                "difference": difference._asdict(),
            },
        }

    def during(self, model: nn.Module, done: Progress) -> dict[str, Any]:
        """The loss of the last tokens and the passkey accuracy at the target length, of the current model."""
        # Every process reads the same texts, so that sharded parameters can be gathered. FSDP2 starts from the
        # outermost module, and shards some again in a backward pass alone.
        inner = model if isinstance(model, FSDPModule) else transformers_model(model)
        with in_eval_mode(model), self.accelerator.autocast():
            tail, found = self._tail(inner, self.looked, sees=self.target), self._found(inner)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        figures = {"tail_loss": sum(tail) / (self.trained * self.looked)}
        if found is not None:
            figures["passkey"] = found
        return {"step": done.step, "tokens": done.tokens, **figures}

    def _found(self, model: Any) -> float | None:
        """The passkey accuracy of a mid-training evaluation at the target length."""
        trials = self.chosen.mid_training_trials
        places = Passkey().places([self.target], self.grid.depths, trials, MID_TRAINING_SEED)
        samples = [Passkey().sample(place, self.prompter, self.haystack) for place in places]
        n = len(self.grid.depths)
        answers = Engine(model).forced([samples[k : k + n] for k in range(0, len(samples), n)]) if samples else ()
        found = [answer.guess.tolist() == list(sample.input_ids[sample.n_prompt :]) for sample, answer in answers]
        return sum(found) / len(found) if found else None

    def _load(self, load: Callable[..., Any], folder: Path) -> Any:
        device = self.accelerator.device
        return load(folder, dtype=torch.float32 if device.type == "cpu" else "auto").to(device).eval()

    def _run(self, model: Any, name: str, variants: list[Variant], merge: bool, **about: Any) -> Any:
        target = LiveModel(model, self.prompter, name, self.trained)
        target.about |= about
        processes = Processes(self.accelerator.process_index, self.accelerator.num_processes)
        runner = Runner(target, self.haystack, self.grid, beyond=True, processes=processes)
        return run_with_bar(runner, self.path, variants, merge=merge)

    def _tail(self, model: Any, windows: int, sees: int) -> list[float]:
        """For each window of the target length, the summed loss of its last tokens, in nats.

        Args:
            sees: the context in tokens; if shorter than the target, sliding windows of this length.
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
    """Passkey accuracy by length, perplexity by band, and the short-context regression, with intervals."""
    lengths, gate = summary.read_lengths, summary.gate(variant)
    return {
        "passkey": {n: share._asdict() for n, share in summary.by_length(variant, "passkey").items()},
        "perplexity": {f"{a}-{b}": summary.perplexity(variant, b, a) for a, b in pairwise([0, *lengths])},
        "short_loss": None if variant == BASE or gate.loss is None else gate.loss._asdict(),
        "short_passkey": None if variant == BASE else gate.retrieval["passkey"]._asdict(),
    }


def card_table(measured: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The same for a model card, one row per variant, in the words of `ctxext push`."""
    names = {BASE: "baseline", UNTRAINED: "extended, not trained", TRAINED: "trained"}
    table = {}
    for variant, figures in measured.items():
        found = {int(n): Interval(**share) for n, share in figures["passkey"].items()}
        row = {f"passkey, {n:,} tokens": share.percent() for n, share in found.items()}
        for band, value in figures["perplexity"].items():
            after, length = map(int, band.split("-"))
            if value is not None:
                row[f"perplexity, positions {after + 1:,}–{length:,}"] = f"{value:.2f}"
        if regression := figures["short_loss"]:
            row["short-context regression (nats)"] = (
                f"{regression['value']:+.4f} [{regression['low']:+.4f}, {regression['high']:+.4f}]"
            )
        table[names[variant]] = row
    return table
