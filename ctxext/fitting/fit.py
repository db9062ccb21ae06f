"""From a model and a text to a method in a file."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ctxext.api import temporarily_extended
from ctxext.core.plan import factor_and_target
from ctxext.evals.engine import Engine
from ctxext.evals.prompts import Prompter
from ctxext.evals.runner import versions
from ctxext.evals.samples import fingerprint
from ctxext.evals.targets import model_fingerprint
from ctxext.extension.method_file import SavedMethod
from ctxext.fitting.episodes import Material, split
from ctxext.fitting.evolution import Evolution, EvolutionSettings, Memory
from ctxext.fitting.gradient import GradientSettings, fit_by_gradient
from ctxext.fitting.live import LiveFactors, frozen
from ctxext.fitting.objectives import Objective, Score, Scorer
from ctxext.methods import LongRoPE, RopeScaling, make_method
from ctxext.utils.processes import ALONE, Processes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


DEFAULT, PERPLEXITY = GradientSettings(), Objective()


@torch.inference_mode(False)
@torch.enable_grad()
def fit(
    model: PreTrainedModel,
    prompter: Prompter,
    text: str,
    factor: float | None = None,
    *,
    target_length: int | None = None,
    original_max_position_embeddings: int | None = None,
    settings: GradientSettings | EvolutionSettings = DEFAULT,
    objective: Objective = PERPLEXITY,
    memory: Path | None = None,
    names: tuple[str, str] = ("model", "text"),
    advance: Callable[[float, str], None] = lambda share, state: None,
    processes: Processes = ALONE,
) -> SavedMethod:
    """Find the rescale factors and the attention factor that serve `model` best; its weights stay as they are.

    Args:
        prompter: of the model's tokenizer, `Prompter(tokenizer)`.
        text: prose; three quarters are learned from, and the rest chosen by.
        factor, target_length, original_max_position_embeddings: as in `ctxext.extend_context`.
        settings: of the fit by gradient, or of the search, which `objective` and `memory` belong to.
        memory: where a search keeps its scores, to go on from.
        names: of model and text, for the file.
        advance: called with the share that is done and a line for the person who waits.

    Returns:
        A method for `extend_context(model, method=...)`, with an account of how it was found in `about`.

    Raises:
        ValueError: the text is too short, RoPE is scaled already or none, a budget that holds no evaluation, a
            `prompter` whose answers are generated, or `memory` belongs to another search.
        RuntimeError: a loss is not finite. The model is left as it was in every case.
    """
    began = time.perf_counter()
    if prompter.answer_tokens is not None:
        raise ValueError(
            f"a prompter of style {prompter.style!r} leaves room for {prompter.answer_tokens} tokens in the model's "
            "own words, and a fit scores answers token by token. Use style 'base' or 'chat', without answer_tokens."
        )
    live = LiveFactors(model, original_max_position_embeddings)
    trained = live.rope.original_max_position_embeddings
    factor, target = factor_and_target(factor, target_length, "longrope", trained)
    # What this model refuses comes out before the work.
    with temporarily_extended(
        model,
        method=LongRoPE.example(live.rope, factor),
        original_max_position_embeddings=original_max_position_embeddings,
    ):
        pass
    learnt, held_out = split(text, prompter, trained, target, name=names[1])
    with live, frozen(model):
        if isinstance(settings, GradientSettings):
            found = _descended(model, live, learnt, held_out, settings, advance, processes)
        else:
            found = _searched(model, live, learnt, held_out, settings, objective, memory, advance, processes)
    method, by = found
    about = {
        "model": names[0],
        "model_fingerprint": model_fingerprint(model),
        "trained_length": trained,
        "target_length": target,
        "text": f"{names[1]} {learnt.haystack.fingerprint}",
        **by,
        "seconds": time.perf_counter() - began,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, {model.device.type}",
        "versions": versions(),
    }
    return SavedMethod(method, about)


Found = tuple[RopeScaling, dict[str, Any]]


def _descended(
    model: PreTrainedModel,
    live: LiveFactors,
    learnt: Material,
    held_out: Material,
    settings: GradientSettings,
    advance: Callable[[float, str], None],
    processes: Processes,
) -> Found:
    found = fit_by_gradient(model, live, learnt, held_out, settings, advance=advance, processes=processes)
    about = {
        "by": "gradient",
        "settings": asdict(settings),
        "start": found.start,
        "kept_start": found.kept_start,
        "losses": found.tried,
    }
    return found.method, {**about, "history": found.history}


def _searched(
    model: PreTrainedModel,
    live: LiveFactors,
    learnt: Material,
    held_out: Material,
    settings: EvolutionSettings,
    objective: Objective,
    memory: Path | None,
    advance: Callable[[float, str], None],
    processes: Processes,
) -> Found:
    advance(0.0, "reading the baseline")
    began = time.perf_counter()
    scorer, other = (Scorer(Engine(model), live, objective, material) for material in (learnt, held_out))

    def score(methods: list[RopeScaling]) -> list[Score]:
        mine = [(k, scorer(methods[k])) for k in range(processes.rank, len(methods), processes.world)]
        return [Score(*found) for _, found in sorted(processes.gathered(mine))]

    def elapsed() -> float:
        # The first process has the clock, as all have to end at the same candidate.
        return float(processes.total(torch.tensor([time.perf_counter() - began if processes.rank == 0 else 0.0]))) / 60

    identity = {
        "model": fingerprint(model_fingerprint(model)),
        "text": learnt.haystack.fingerprint,
        "prompts": learnt.prompter.fingerprint,
        "lengths": [learnt.trained, learnt.target],
        "objective": asdict(objective),
        "settings": {k: v for k, v in asdict(settings).items() if k not in ("minutes", "evaluations", "iterations")},
    }
    known = Memory(memory, identity, writes=processes.rank == 0, width=processes.world)
    search = Evolution(
        live.rope, learnt.target / learnt.trained, score, settings, memory=known, advance=advance, elapsed=elapsed
    ).run()
    best = min(search.founders, key=search.founders.__getitem__)
    named = make_method(best, learnt.target / learnt.trained)
    about = {
        "by": "evolution",
        "settings": asdict(settings),
        "objective": asdict(objective),
        "start": best,
        "scores": {
            **{name: found._asdict() for name, found in search.founders.items()},
            "fitted": search.best._asdict(),
        },
        "held_out": {"start": other(named)._asdict(), "fitted": other(search.method)._asdict()},
        "evaluations": search.evaluations,
        "history": [found._asdict() for found in search.history],
    }
    return search.method, about
