"""What a search makes small, by name: fixed samples, read under each candidate without gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from ctxext.evals.engine import Engine
from ctxext.evals.needle import Needle, Passkey
from ctxext.evals.perplexity import KeyTokens
from ctxext.evals.samples import Place
from ctxext.fitting.episodes import Episode, Material
from ctxext.fitting.live import LiveFactors
from ctxext.methods import RopeScaling
from ctxext.utils.values import suggest

OBJECTIVES = {
    "perplexity": "loss of text at the target length, in nats a token (LongRoPE)",
    "needle_perplexity": "loss of the answers to needles hidden up to the target length, in nats an answer (LongRoPE2)",
    "key_tokens": "loss of the tokens that need more than a short context, in nats a token (LongPPL)",
    "passkey": "loss of pass keys hidden up to the target length, in nats a key",
}


class Score(NamedTuple):
    """What one candidate is worth: smaller is better, and first of all it has to keep within the limit.

    Attributes:
        excess: by how much the loss of short text passes its limit, as a share; 0 within it.
        value: of the objective, in its nats.
        short: loss of short text over the unextended model's, minus 1.
    """

    excess: float
    value: float
    short: float


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A number to make small, and a limit to what that may cost at the trained length.

    Attributes:
        name: one of OBJECTIVES.
        short_limit: how much more than the unextended model a candidate may lose on text of the trained length,
            as a share of that loss.
        windows: texts of the target length, or trials of hidden numbers; twice as many of the trained length.
    """

    name: str = "perplexity"
    short_limit: float = 0.01
    windows: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name not in OBJECTIVES:
            raise ValueError(f"unknown objective {self.name!r}{suggest(self.name, OBJECTIVES)}")
        if self.windows < 1:
            raise ValueError(f"windows must be >= 1, got {self.windows}.")
        if not 0 <= self.short_limit < math.inf:
            raise ValueError(f"short_limit must be >= 0, got {self.short_limit}.")


class Scorer:
    """Reads an objective's samples under one candidate after the other.

    Args:
        live: of the engine's model, entered.

    Raises:
        ValueError: the text is too short for the target length.
    """

    def __init__(self, engine: Engine, live: LiveFactors, objective: Objective, material: Material) -> None:
        self.engine, self.live, self.objective, self.material = engine, live, objective, material
        count, seed = objective.windows, objective.seed
        self._short = [material.text(material.trained, seed, trial) for trial in range(2 * count)]
        self._texts = [material.text(material.target, seed, trial) for trial in range(count)]
        live.use(None)
        self._unextended = self._loss(self._short)
        self._key = [self._needs_context(text) for text in self._texts] if objective.name == "key_tokens" else []
        if objective.name == "key_tokens" and not sum(int(key.sum()) for key in self._key):
            raise ValueError("no token of these texts needs a long context. Pass another text, or more windows.")

    def __call__(self, method: RopeScaling) -> Score:
        """
        Raises:
            RuntimeError: a loss is not finite.
        """
        self.live.use(method)
        short = self._loss(self._short) / self._unextended - 1
        value = getattr(self, f"_{self.objective.name}")()
        if not math.isfinite(value + short):
            raise RuntimeError(
                f"{self.objective.name} is {value} under {method}. Load the model in float32 or bfloat16."
            )
        return Score(max(0.0, short - self.objective.short_limit), value, short)

    def _losses(self, text: Episode) -> Tensor:
        return self.engine.losses(text.input_ids).losses[text.text_from - 1 :].double()

    def _loss(self, texts: Sequence[Episode]) -> float:
        return float(torch.cat([self._losses(text) for text in texts]).mean())

    def _perplexity(self) -> float:
        return self._loss(self._texts)

    def _key_tokens(self) -> float:
        return float(torch.cat([self._losses(text)[key] for text, key in zip(self._texts, self._key)]).mean())

    def _needs_context(self, text: Episode) -> Bool[Tensor, " token"]:
        bos, trained = self.material.prompter.bos, self.material.trained
        return KeyTokens(long=trained, short=trained // 8).mask(self.engine, text.input_ids[len(bos) :], bos)

    def _passkey(self) -> float:
        return self._answers(Passkey())

    def _needle_perplexity(self) -> float:
        return self._answers(Needle())

    def _answers(self, task: Passkey | Needle) -> float:
        material, losses = self.material, []
        for length in (material.between(material.trained, share) for share in (0.5, 1.0)):
            for trial in range(self.objective.windows):
                places = [Place(task.name, length, depth, trial, self.objective.seed) for depth in (0.1, 0.5, 0.9)]
                row = [task.sample(place, material.prompter, material.haystack) for place in places]
                losses += [-float(forced.logprobs.double().sum()) for _, forced in self.engine.forced([row])]
        return sum(losses) / len(losses)
