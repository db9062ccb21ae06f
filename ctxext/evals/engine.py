"""Forward passes of an evaluation: bounded in memory, and no token is read twice that two prompts share.

What a causal model with static position encodings computes for a prefix does not depend on what
follows. So prompts that begin alike are read once, and branch off where they differ; and long ones
are read in chunks. Where a model's frequencies depend on the total length (transformers' `dynamic`,
and `longrope` with two lists), both would be wrong: every prompt is then read whole.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ctxext.evals.samples import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The most logits that are held at once, in numbers: 128 MiB in float32.
LOGITS = 2**25


class Forced(NamedTuple):
    """An answer under teacher forcing: its most likely tokens, and log-probabilities of the true ones in nats."""

    guess: Tensor
    logprobs: Tensor


class Losses(NamedTuple):
    """Of every next token in a window: its loss in nats, and the most likely token; both of shape (tokens - 1,)."""

    losses: Tensor
    top1: Tensor


def length_dependent(config: Any) -> bool:
    """Whether the frequencies of a model with this config depend on how long the sequence is."""
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    tables = parameters.values() if all(isinstance(table, dict) for table in parameters.values()) else [parameters]
    return any(
        table.get("rope_type") == "dynamic"
        or (table.get("rope_type") == "longrope" and table.get("short_factor") != table.get("long_factor"))
        for table in tables
    )


class Engine:
    """Runs one model, without gradients.

    Args:
        chunk: tokens read at a time.

    Attributes:
        tokens: how many the model has read so far, for accounts of cost.
    """

    def __init__(self, model: PreTrainedModel, *, chunk: int = 2048) -> None:
        self.model = model
        self.chunk = chunk
        self.tokens = 0

    @property
    def whole(self) -> bool:
        """Whether every prompt has to be read whole, in one forward pass."""
        return length_dependent(self.model.config)

    @torch.inference_mode()
    def forced(self, rows: Sequence[Sequence[Sample]]) -> Iterator[tuple[Sample, Forced]]:
        """Score answers by teacher forcing, in one forward pass each: their argmax is what greedy decoding would write.

        Args:
            rows: samples of one length; those of a row begin alike (one trial at several depths), the rows
                have equally many and run side by side as a batch.
        """
        for column, logits in self._columns([[sample.input_ids for sample in row] for row in rows], rows):
            for row, scores in zip(rows, logits):
                sample = row[column]
                n_answer = len(sample.input_ids) - sample.n_prompt
                answer = torch.tensor(sample.input_ids[sample.n_prompt :], device=scores.device)
                logprobs = scores[-n_answer:].float().log_softmax(-1)
                yield sample, Forced(logprobs.argmax(-1).cpu(), logprobs.gather(-1, answer[:, None])[:, 0].cpu())

    def _columns(
        self, rows: Sequence[Sequence[Sequence[int]]], samples: Sequence[Sequence[Sample]]
    ) -> Iterator[tuple[int, Tensor]]:
        """For each branch the logits that predict the answers: of shape (row, token, vocabulary)."""
        length = len(rows[0][0])
        keep = length - min(sample.n_prompt for row in samples for sample in row)
        # The last token predicts nothing that is asked for; where the length sets the frequencies it is read as well.
        ids = torch.tensor(rows, device=self.model.device)[..., : None if self.whole else -1]
        if self.whole:
            for column in range(ids.shape[1]):
                yield column, self._read(ids[:, column], None, keep + 1)[0][:, :-1]
            return
        trunk = ids[:, -1]
        shared = [min(_common(row[column], row[-1]) for row in ids) for column in range(ids.shape[1])]
        cache, done = None, 0
        for column in sorted(range(ids.shape[1]), key=lambda column: shared[column]):
            # At least the tokens whose logits are kept have to be read again.
            fork = min(shared[column], ids.shape[2] - keep)
            if fork > done:
                _, cache = self._read(trunk[:, done:fork], cache, 1)
                done = fork
            with _branch(cache) as branch:
                yield column, self._read(ids[:, column, done:], branch, keep)[0]

    def _read(self, ids: Tensor, cache: Any, keep: int) -> tuple[Tensor, Any]:
        """Read `ids` behind what `cache` holds; the logits at the last `keep` tokens."""
        if self.whole:
            self.tokens += ids.numel()
            return self.model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits, None
        edges = [*range(0, max(1, ids.shape[1] - keep + 1), self.chunk), ids.shape[1]]
        for low, high in pairwise(edges):
            self.tokens += ids[:, low:high].numel()
            last = high == ids.shape[1]
            output = self.model(
                input_ids=ids[:, low:high], past_key_values=cache, use_cache=True, logits_to_keep=keep if last else 1
            )
            cache = output.past_key_values
        return output.logits, cache

    @torch.inference_mode()
    def generate(self, sample: Sample) -> list[int]:
        """The greedy answer, of at most `sample.answer_tokens` tokens."""
        from transformers import GenerationConfig

        prompt = torch.tensor([sample.input_ids[: sample.n_prompt]], device=self.model.device)
        cache = None if self.whole else self._read(prompt[:, :-1], None, 1)[1]
        own = self.model.generation_config
        settings = GenerationConfig(
            do_sample=False,
            # A field left out is taken from the model's own; a penalty counts the prompt, the right answer in it too.
            repetition_penalty=1.0,
            max_new_tokens=sample.answer_tokens,
            eos_token_id=own.eos_token_id,
            pad_token_id=own.pad_token_id if own.pad_token_id is not None else 0,
        )
        output = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), generation_config=settings, past_key_values=cache
        )
        self.tokens += output.shape[1] - prompt.shape[1] + (prompt.shape[1] if self.whole else 0)
        return output[0, prompt.shape[1] :].tolist()

    @torch.inference_mode()
    def losses(self, ids: Sequence[int]) -> Losses:
        """What each token but the first cost, given all before it; the logits are never held together."""
        row = torch.tensor([list(ids)], device=self.model.device)
        chunk = min(self.chunk, max(1, LOGITS // self.model.get_output_embeddings().weight.shape[0]))
        cache, parts = None, []
        for low, high in pairwise(
            [*range(0, row.shape[1] - 1, row.shape[1] if self.whole else chunk), row.shape[1] - 1]
        ):
            self.tokens += high - low
            # Where the length sets the frequencies, the whole row is read, its last token too.
            read = row if self.whole else row[:, low:high]
            output = self.model(input_ids=read, past_key_values=cache, use_cache=not self.whole)
            cache = output.past_key_values if not self.whole else None
            logits = output.logits[0, : high - low].float()
            loss = torch.nn.functional.cross_entropy(logits, row[0, low + 1 : high + 1], reduction="none")
            parts.append((loss.cpu(), logits.argmax(-1).cpu()))
        return Losses(*(torch.cat(part) for part in zip(*parts)))


def _common(one: Tensor, other: Tensor) -> int:
    """How many tokens two prompts begin with alike."""
    differ = (one != other).nonzero()
    return int(differ[0]) if len(differ) else len(one)


@contextmanager
def _branch(cache: Any) -> Iterator[Any]:
    """A cache to go on with, after which `cache` is as before: by cropping, or by a copy where it cannot be cropped."""
    from transformers.cache_utils import DynamicLayer

    if cache is None:
        yield None
    elif all(type(layer) is DynamicLayer for layer in cache.layers):
        length = cache.get_seq_length()
        yield cache
        if cache.get_seq_length() > length:
            cache.crop(length - cache.get_seq_length())
    else:
        # Sliding windows and linear attention forget: what they were cannot be had back.
        yield copy.deepcopy(cache)
