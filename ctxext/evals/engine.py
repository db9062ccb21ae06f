"""Forward passes of an evaluation, with bounded memory and shared prefixes.

A causal model's computation for a prefix does not depend on later tokens, even with a scale per query position. So
common prefixes of prompts are read once, and long prompts in chunks. If a model's frequencies depend on the total
length (transformers' `dynamic`, and `longrope` with two lists in transformers), both would be wrong, and every prompt
is read in one pass.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ctxext.attention.keys import stock_class
from ctxext.core.apply import extension_of
from ctxext.core.plan import Plan
from ctxext.evals.samples import Sample
from ctxext.methods import RopeScaling
from ctxext.models.text_config import text_config_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The most logits held at once: 128 MiB in float32.
LOGITS = 2**25


class Forced(NamedTuple):
    """An answer under teacher forcing: the most likely tokens, and the true tokens' log-probabilities in nats."""

    guess: Tensor
    logprobs: Tensor


class Answer(NamedTuple):
    """The tokens of greedy decoding, and the log-probability of the right answer in nats."""

    written: list[int]
    logprob: float


# Decodes the rows of one branch.
Decoded = Callable[[], list[list[int]]]


class Losses(NamedTuple):
    """For every next token in a window: its loss in nats, and the most likely token (None where a server does not
    return it); both of shape (tokens - 1,)."""

    losses: Tensor
    top1: Tensor | None


class Scorer(Protocol):
    """What text tasks need of a model: an `Engine`, a server, or vLLM in this process."""

    def losses(self, ids: Sequence[int]) -> Losses:
        """The loss of each token but the first."""


class Pass(NamedTuple):
    """Of one prompt: the seconds of its prefill and of one decoded token, and the bytes of its KV cache at the end, 0
    without one."""

    prefill: float
    decode: float
    kv_bytes: int


def length_dependent(config: Any, plan: Plan | None = None) -> bool:
    """Whether the frequencies of a model with this config depend on the total sequence length.

    Args:
        plan: its extension, or None.
    """
    if plan is not None and plan.method is not None:
        return of_the_call(plan)
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    tables = parameters.values() if all(isinstance(table, dict) for table in parameters.values()) else [parameters]
    return any(
        table.get("rope_type") == "dynamic"
        or (table.get("rope_type") == "longrope" and table.get("short_factor") != table.get("long_factor"))
        for table in tables
    )


def of_the_call(plan: Plan | None) -> bool:
    """Whether an extension has one scale per call, so that keys cannot be cached."""
    return plan is not None and isinstance(plan.method, RopeScaling) and plan.method.of_the_call


class Engine:
    """Runs one model, without gradients.

    Args:
        chunk: tokens per forward pass, over all rows of a batch.
        now: the clock, in seconds.

    Attributes:
        tokens: tokens read so far, for cost accounting.
    """

    def __init__(
        self, model: PreTrainedModel, *, chunk: int = 1024, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self.model = model
        self.chunk = chunk
        self.now = now
        self.tokens = 0

    @property
    def whole(self) -> bool:
        """Whether every prompt must be read in one forward pass."""
        return length_dependent(self.model.config, self._plan)

    @property
    def _plan(self) -> Plan | None:
        extension = extension_of(self.model)
        return None if extension is None else extension.plan

    @torch.inference_mode()
    def forced(self, rows: Sequence[Sequence[Sample]]) -> Iterator[tuple[Sample, Forced]]:
        """Read answers by teacher forcing, in one forward pass each.

        Args:
            rows: samples of one length; the samples of a row share a prefix (one trial at several depths); rows have
                equal sizes and run as a batch.
        """
        for column, logits, _ in self._columns(rows):
            yield from ((row[column], _forced(row[column], scores)) for row, scores in zip(rows, logits))

    @torch.inference_mode()
    def answers(self, rows: Sequence[Sequence[Sample]]) -> Iterator[tuple[Sample, Answer]]:
        """What `generate` writes, found by teacher forcing where possible.

        If each token of an answer is the most likely one after its prefix, greedy decoding writes that answer.
        Otherwise the answer is decoded from the prompt's cache. If the frequencies depend on the call's length,
        decoding differs from the forced pass, and every answer is generated.

        Args:
            rows: as in `forced`.
        """
        for column, logits, decoded in self._columns(rows):
            samples = [row[column] for row in rows]
            forced = [_forced(sample, scores) for sample, scores in zip(samples, logits)]
            right = [list(sample.input_ids[sample.n_prompt :]) for sample in samples]
            hits = [not self.whole and one.guess.tolist() == answer for one, answer in zip(forced, right)]
            for sample, one, hit, answer, other in zip(samples, forced, hits, right, right if all(hits) else decoded()):
                yield sample, Answer(answer if hit else other, one.logprobs.double().sum().item())

    def _columns(self, rows: Sequence[Sequence[Sample]]) -> Iterator[tuple[int, Tensor, Decoded]]:
        """For each branch, the logits that predict the answers, of shape (row, token, vocabulary), and a function to
        decode it.

        Decode a branch before requesting the next one.
        """
        length = len(rows[0][0].input_ids)
        begin = min(sample.n_prompt for row in rows for sample in row)
        keep = length - begin
        # The last token's prediction is not needed; it is read only if the length sets the frequencies.
        ids = torch.tensor([[sample.input_ids for sample in row] for row in rows], device=self.model.device)
        ids = ids[..., : None if self.whole else -1]
        if self.whole:
            for column in range(ids.shape[1]):
                logits = self._read(ids[:, column], None, keep + 1)[0][:, :-1]
                yield column, logits, partial(self._generated, [row[column] for row in rows])
            return

        def decoded(column: int, cache: Any, done: int) -> list[list[int]]:
            own = cache if isinstance(cache, KeyValues) else copy.deepcopy(cache)
            logits, own = self._read(ids[:, column, done:begin], own, 1)
            return self._decoded([row[column] for row in rows], begin, logits, own)

        trunk = ids[:, -1]
        shared = [min(_common(row[column], row[-1]) for row in ids) for column in range(ids.shape[1])]
        # At least the tokens whose logits are needed are read again.
        forks = [min(fork, ids.shape[2] - keep) for fork in shared]
        columns = sorted(range(ids.shape[1]), key=lambda column: forks[column])
        cache, done = self._new_cache(length), 0
        if cache is not None:
            # From the deepest fork back: what one branch read is the prefix of the next.
            for column in reversed(columns):
                behind = cache.get_seq_length() - forks[column]
                if behind > 0:
                    cache.crop(-behind)
                done = cache.get_seq_length()
                logits = self._read(ids[:, column, done:], cache, keep)[0]
                cache.crop(-keep)
                yield column, logits, partial(decoded, column, cache, begin - 1)
            return
        for column in columns:
            fork = forks[column]
            if fork > done:
                _, cache = self._read(trunk[:, done:fork], cache, 1)
                done = fork
            logits = self._read(ids[:, column, done:], copy.deepcopy(cache), keep)[0]
            yield column, logits, partial(decoded, column, cache, done)

    def _generated(self, samples: Sequence[Sample]) -> list[list[int]]:
        return [self.generate(sample) for sample in samples]

    def _decoded(self, samples: Sequence[Sample], begin: int, logits: Tensor, cache: Any) -> list[list[int]]:
        """Greedy decoding of a batch, each sample from the end of its prompt.

        Args:
            begin: the number of tokens of each prompt in `cache`; `logits` follow them.
        """
        ends = self.model.generation_config.eos_token_id
        stops = {*(ends if isinstance(ends, list) else [ends])}
        rows = [list(sample.input_ids[:begin]) for sample in samples]
        while True:
            for row, sample, chosen in zip(rows, samples, logits[:, -1].argmax(-1).tolist()):
                row.append(sample.input_ids[len(row)] if len(row) < sample.n_prompt else chosen)
            if len(rows[0]) == len(samples[0].input_ids):
                break
            logits, cache = self._read(torch.tensor([row[-1:] for row in rows], device=self.model.device), cache, 1)
        written = [row[sample.n_prompt :] for row, sample in zip(rows, samples)]
        return [tokens[: next((k + 1 for k, token in enumerate(tokens) if token in stops), None)] for tokens in written]

    def _new_cache(self, capacity: int) -> KeyValues | None:
        """An empty, croppable cache for `capacity` tokens; None if the model needs its own."""
        return KeyValues(self._stores, capacity) if self._stores else None

    @cached_property
    def _stores(self) -> list[bool]:
        """Which layers store keys and values; empty if any forgets tokens, as sliding windows and linear attention
        do."""
        probe = torch.zeros(1, 1, dtype=torch.long, device=self.model.device)
        layers = self.model(input_ids=probe, use_cache=True).past_key_values.layers
        if any(stock_class(layer) is not DynamicLayer for layer in layers):
            return []
        return [layer.is_initialized for layer in layers]  # layers that share another's keys store none

    def _read(self, ids: Tensor, cache: Any, keep: int) -> tuple[Tensor, Any]:
        """Read `ids` after the content of `cache`; returns the logits at the last `keep` tokens."""
        if self.whole:
            self.tokens += ids.numel()
            return self.model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits, None
        step = max(1, self.chunk // ids.shape[0])
        edges = [*range(0, max(1, ids.shape[1] - keep + 1), step), ids.shape[1]]
        for low, high in pairwise(edges):
            self.tokens += ids[:, low:high].numel()
            last = high == ids.shape[1]
            with _only_stored(cache) if not last and self._stops_early(cache) else nullcontext():
                part, kept = ids[:, low:high], keep if last else 1
                output = self.model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=kept)
                cache = output.past_key_values
        return output.logits, cache

    def _stops_early(self, cache: Any) -> bool:
        # accelerate's hooks move weights after each module, so forward passes must complete.
        return isinstance(cache, KeyValues) and not hasattr(self.model, "hf_device_map")

    @torch.inference_mode()
    def generate(self, sample: Sample) -> list[int]:
        """The greedy answer, of at most `sample.answer_tokens` tokens."""
        from transformers import GenerationConfig

        prompt = torch.tensor([sample.input_ids[: sample.n_prompt]], device=self.model.device)
        cache = None
        if not self.whole:
            cache = self._read(prompt[:, :-1], self._new_cache(prompt.shape[1] + sample.answer_tokens), 1)[1]
        own, keeps = self.model.generation_config, not of_the_call(self._plan)
        settings = GenerationConfig(
            do_sample=False,
            max_new_tokens=sample.answer_tokens,
            eos_token_id=own.eos_token_id,
            pad_token_id=own.pad_token_id if own.pad_token_id is not None else 0,
            use_cache=keeps,
        )
        # Omitted fields come from the model's generation config: beams, or a repetition penalty that counts the prompt,
        # and so penalises the right answer.
        self.model.generation_config = GenerationConfig()
        try:
            generate: Any = self.model.generate
            output = generate(
                prompt, attention_mask=torch.ones_like(prompt), generation_config=settings, past_key_values=cache
            )
        finally:
            self.model.generation_config = own
        written = output.shape[1] - prompt.shape[1]
        if keeps:
            self.tokens += written + (prompt.shape[1] if self.whole else 0)
        else:
            self.tokens += sum(range(prompt.shape[1], output.shape[1]))
        return output[0, prompt.shape[1] :].tolist()

    @torch.inference_mode()
    def losses(self, ids: Sequence[int]) -> Losses:
        """The loss of each token but the first; never holds all logits."""
        row = torch.tensor([list(ids)], device=self.model.device)
        chunk = min(self.chunk, max(1, LOGITS // text_config_of(self.model.config).vocab_size))
        cache, parts = None if self.whole else self._new_cache(row.shape[1]), []
        for low, high in pairwise(
            [*range(0, row.shape[1] - 1, row.shape[1] if self.whole else chunk), row.shape[1] - 1]
        ):
            self.tokens += high - low
            # If the length sets the frequencies, the whole row is read, including its last token.
            read = row if self.whole else row[:, low:high]
            output = self.model(input_ids=read, past_key_values=cache, use_cache=not self.whole)
            cache = output.past_key_values if not self.whole else None
            logits = output.logits[0, : high - low].float()
            loss = torch.nn.functional.cross_entropy(logits, row[0, low + 1 : high + 1], reduction="none")
            parts.append((loss.cpu(), logits.argmax(-1).cpu()))
        return Losses(*(torch.cat(part) for part in zip(*parts)))

    @torch.inference_mode()
    def passed(self, ids: Sequence[int], n_decoded: int) -> Pass:
        """Read a prompt, then its last `n_decoded` tokens one by one as if they had been decoded, and time both."""
        row, n_prompt = torch.tensor([list(ids)], device=self.model.device), len(ids) - n_decoded
        cache, times = None if self.whole else self._new_cache(len(ids)), [self.now()]
        for end in range(n_prompt, len(ids) + 1):
            begin = 0 if self.whole or end == n_prompt else end - 1
            logits, cache = self._read(row[:, begin:end], cache, 1)
            logits.argmax().item()  # waits for the accelerator
            if end == n_prompt:
                times.append(self.now())
        times.append(self.now())
        held = [states for layer in (() if cache is None else cache.layers) for states in vars(layer).values()]
        kv_bytes = sum(states.nbytes for states in held if isinstance(states, Tensor))
        return Pass(times[1] - times[0], (times[2] - times[1]) / n_decoded, kv_bytes)


def _forced(sample: Sample, logits: Tensor) -> Forced:
    """The answer of one sample, from the logits of its answer and some prompt tokens."""
    n_answer = len(sample.input_ids) - sample.n_prompt
    answer = torch.tensor(sample.input_ids[sample.n_prompt :], device=logits.device)
    logprobs = logits[-n_answer:].float().log_softmax(-1)
    return Forced(logprobs.argmax(-1).cpu(), logprobs.gather(-1, answer[:, None])[:, 0].cpu())


def _common(one: Tensor, other: Tensor) -> int:
    """The length of the common prefix of two prompts."""
    differ = (one != other).nonzero()
    return int(differ[0]) if len(differ) else len(one)


class _Stored(Exception):
    """Raised once the last keys and values of a pass are stored, as the rest would only compute logits."""


@contextmanager
def _only_stored(cache: KeyValues) -> Iterator[None]:
    """End forward passes as soon as all their keys and values are in `cache`."""
    cache.only_store = True
    try:
        yield
    except _Stored:
        pass
    finally:
        cache.only_store = False


class KeyValues(Cache):
    """A preallocated cache of full attention: appending copies nothing.

    Args:
        stores: which layers store keys.
        capacity: preallocated tokens; it can grow.
    """

    def __init__(self, stores: Sequence[bool], capacity: int) -> None:
        super().__init__(layers=[_InPlace(capacity) for _ in stores])
        self.only_store = False
        self._last = max(layer for layer, stored in enumerate(stores) if stored)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        seen = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self.only_store and layer_idx == self._last:
            raise _Stored
        return seen


class _InPlace(DynamicLayer):
    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._room: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        begin = self.get_seq_length()
        end = begin + key_states.shape[-2]
        if self._room is None or end > self._room[0].shape[-2]:
            room = [
                states.new_empty((*states.shape[:-2], max(end, self._capacity), states.shape[-1]))
                for states in (key_states, value_states)
            ]
            if begin:
                held: tuple[Any, Any] = (self.keys, self.values)
                room[0][..., :begin, :], room[1][..., :begin, :] = held
            self._room = (room[0], room[1])
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        for whole, states in zip(self._room, (key_states, value_states)):
            whole[..., begin:end, :] = states
        self.keys, self.values = (whole[..., :end, :] for whole in self._room)
        return self.keys, self.values
