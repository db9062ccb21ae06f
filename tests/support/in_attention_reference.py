"""A slow truth for in-attention RoPE: one row at a time, no cache, every pair of tokens by its method's own formula.

The family's own layers run with a rotary embedding that gives the identity; attention keeps queries and keys
unrotated and builds the whole score matrix in float64, pair by pair. Nothing here is taken from ctxext.attention,
and the formulas are written from the papers, not from ctxext.methods.
"""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from families import LENGTH, from_config, tiny_config, tiny_model, token_ids
from live import rotaries_of
from torch import Tensor, nn
from transformers import AttentionInterface, Cache

import ctxext
from ctxext.methods import LongRoPE

FACTOR = 4.0
N_TOKENS = 180
# A batch of rows: the first is the longest, the last never leaves the trained length.
LENGTHS = (N_TOKENS, 131, 79, 40)


class Angles(NamedTuple):
    """What a pair of tokens is rotated by.

    Attributes:
        apart: radians between query and key, of shape (query, key, pair).
        times: what cos and sin are multiplied with, of shape (query, key): it reaches the rotary dimensions alone.
        score_times: multiplies the whole score, of shape (query, 1).
    """

    apart: Tensor
    times: Tensor | float = 1.0
    score_times: Tensor | float = 1.0


# From positions of shape (query, 1) and (1, key), in float64, and the trained frequencies of shape (pair,).
Formula = Callable[[Tensor, Tensor, Tensor], Angles]


# ------------------------------------------------------------------------- scaled frequencies


def rung(query: Tensor, ratio: float) -> Tensor:
    """The scale of each query's rung: of the lengths L, floor(1.25 L), ... 4 L the first that holds it, over L."""
    lengths = [LENGTH]
    while lengths[-1] < FACTOR * LENGTH:
        lengths.append(min(math.floor(LENGTH * ratio ** len(lengths)), round(FACTOR * LENGTH)))
    return torch.tensor([next(n for n in lengths if n >= p + 1) for p in query.flatten().tolist()]).double() / LENGTH


def scaled(query: Tensor, key: Tensor, frequencies: Tensor, times: Tensor) -> Angles:
    """One row of `frequencies` and one multiplier of cos and sin for each query."""
    return Angles((query - key)[..., None] * frequencies[:, None], times[:, None] ** 2)


def dynamic_ntk(query: Tensor, key: Tensor, inv_freq: Tensor, ratio: float = 1.25) -> Angles:
    """theta' = theta · scale^(d / (d - 2)), so that pair i has its frequency divided by scale^(2i / (d - 2))."""
    scale, pair = rung(query, ratio)[:, None], torch.arange(len(inv_freq)).double()
    frequencies = inv_freq / scale ** (2 * pair / (2 * len(inv_freq) - 2))
    return scaled(query, key, frequencies, torch.ones(len(query)).double())


def dynamic_yarn(query: Tensor, key: Tensor, inv_freq: Tensor) -> Angles:
    """YaRN, equations 17 to 22, in the form of its code: the ramp is linear in the index of the pair."""
    scale, dim = rung(query, 1.25)[:, None], 2 * len(inv_freq)
    theta = float(inv_freq[1]) ** (-dim / 2)

    def index(turns: float) -> float:
        return dim * math.log(LENGTH / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(index(32)), 0), min(math.ceil(index(1)), dim - 1)
    interpolated = ((torch.arange(dim // 2).double() - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = inv_freq * (1 - interpolated) + inv_freq / scale * interpolated
    return scaled(query, key, frequencies, 0.1 * scale[:, 0].log() + 1)


def longrope_factors(n_pairs: int) -> tuple[Tensor, Tensor]:
    return torch.linspace(1.0, 1.6, n_pairs).double(), torch.linspace(1.2, 4.5, n_pairs).double()


def longrope(query: Tensor, key: Tensor, inv_freq: Tensor, start_tokens: int = 0) -> Angles:
    """Short factors up to the trained length, long ones beyond; the first tokens stay as they were."""
    short, long = longrope_factors(len(inv_freq))
    frequencies = inv_freq / torch.where(query + 1 <= LENGTH, short, long)
    first_query, first_key = query < start_tokens, key < start_tokens
    at_query = query * torch.where(first_query, inv_freq, frequencies)
    at_key = key[..., None] * torch.where(first_key[..., None], inv_freq, frequencies[:, None])
    one, factor = key.new_tensor(1.0), key.new_tensor(1 + math.log(FACTOR) / math.log(LENGTH)).sqrt()
    times = torch.where(first_query, one, factor) * torch.where(first_key, one, factor)
    return Angles(at_query[:, None] - at_key, times)


# --------------------------------------------------------------------------- remapped positions


def remapped(distance: Tensor, inv_freq: Tensor, score_times: Tensor | float = 1.0) -> Angles:
    return Angles(distance[..., None] * inv_freq, score_times=score_times)


WINDOW = LENGTH // 4


def self_extend(query: Tensor, key: Tensor, inv_freq: Tensor) -> Angles:
    """Distances below W as they are; beyond, p // G with the query shifted by W - W/G. G = (4 L - W) / (2/3 L - W)."""
    group = math.ceil((FACTOR * LENGTH - WINDOW) / (LENGTH * 2 / 3 - WINDOW))
    grouped = query // group + WINDOW - WINDOW / group - key // group
    return remapped(torch.where(query - key < WINDOW, query - key, grouped), inv_freq)


def rerope(query: Tensor, key: Tensor, inv_freq: Tensor) -> Angles:
    """min(distance, W), and the score times log n / log L for n > L."""
    times = ((query + 1).log() / math.log(LENGTH)).clamp(min=1)
    return remapped((query - key).clamp(max=WINDOW), inv_freq, times)


def string(query: Tensor, key: Tensor, inv_freq: Tensor) -> Angles:
    """d - S + W from d = S on, with the S that half as many tokens again need, and W = L/16."""
    local = LENGTH // 16
    shift, apart = LENGTH // 2 + local, query - key
    return remapped(torch.where(apart >= shift, apart - shift + local, apart), inv_freq)


def query_temperature(query: Tensor, key: Tensor, inv_freq: Tensor) -> Angles:
    """Position Interpolation, and the score of a query times 1 + 0.2 ln(1 + ⌊p / L⌋)."""
    return remapped((query - key) / FACTOR, inv_freq, 1 + 0.2 * (1 + (query / LENGTH).floor()).log())


def tempered_rerope(query: Tensor, key: Tensor, inv_freq: Tensor) -> Angles:
    """ReRoPE, whose own log n is multiplied with 1 + 0.1 ln(1 + ⌊p / L⌋)."""
    apart, _, times = rerope(query, key, inv_freq)
    return Angles(apart, score_times=times * (1 + 0.1 * (1 + (query / LENGTH).floor()).log()))


def dca(query: Tensor, key: Tensor, inv_freq: Tensor) -> Angles:
    """Chunks of c = s - w tokens: p - k in the same one, min(p mod c + c, s) - k in the next, s - k in later ones."""
    size, local = LENGTH * 3 // 4, LENGTH // 8
    step = size - local
    same, following = query // step == key // step, query // step == key // step + 1
    distance = torch.where(following, (query % step + step).clamp(max=size) - key % step, size - key % step)
    return remapped(torch.where(same, query - key, distance), inv_freq)


def plain(query: Tensor, key: Tensor, inv_freq: Tensor) -> Angles:
    return remapped(query - key, inv_freq)


def _longrope_method(n_pairs: int, start_tokens: int = 0) -> LongRoPE:
    short, long = (tuple(factors.tolist()) for factors in longrope_factors(n_pairs))
    return LongRoPE(factor=FACTOR, short_factor=short, long_factor=long, start_tokens=start_tokens)


def _named(name: str, **options: Any) -> Callable[[int], dict[str, Any]]:
    return lambda n_pairs: {"factor": FACTOR, "method": name, **options}


# Softer weights than those of `families`, whose logits magnify the rounding of float32 phases beyond 1e-4.
SOFT = {"initializer_range": 0.15}

# For each late method: extend_context's arguments, given the number of pairs of a head, and the formula.
LATE: dict[str, tuple[Callable[[int], dict[str, Any]], Formula]] = {
    "dynamic_ntk": (_named("dynamic_ntk"), dynamic_ntk),
    "dynamic_yarn": (_named("dynamic_yarn"), dynamic_yarn),
    "longrope": (lambda n_pairs: {"method": _longrope_method(n_pairs)}, longrope),
    "longrope_start": (
        lambda n_pairs: {"method": _longrope_method(n_pairs, start_tokens=4)},
        functools.partial(longrope, start_tokens=4),
    ),
    "self_extend": (_named("self_extend"), self_extend),
    "rerope": (_named("rerope"), rerope),
    "dca": (_named("dca"), dca),
    "query_temperature": (_named("query_temperature", base="pi", beta=0.2), query_temperature),
    "tempered_rerope": (_named("query_temperature", base="rerope"), tempered_rerope),
    "string": (lambda n_pairs: {"factor": 1.5, "method": "string"}, string),
    "dynamic_ntk_fine": (_named("dynamic_ntk", ratio=1.1), functools.partial(dynamic_ntk, ratio=1.1)),
}
METHODS = ["dynamic_ntk", "dynamic_yarn", "longrope", "longrope_start", "self_extend", "rerope", "dca", "string",
           "query_temperature", "tempered_rerope"]  # fmt: skip


def soft_model(family: str, **changes: Any) -> Any:
    """A small model in float64, so that no CPU's rounding decides."""
    model = tiny_model(family, **SOFT, **changes).double()
    config = model.config.get_text_config(decoder=True)
    config._experts_implementation = "eager"  # the others have no kernel for float64
    return model


def frequencies(model: Any) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The frequencies that turn, and the number of all, by the type of layer; "" if all layers have the same."""
    rotary, parameters = rotaries_of(model)[0], model.config.get_text_config(decoder=True).rope_parameters
    found, numbers = {}, {}
    for label, its in ({k: v for k, v in parameters.items() if isinstance(v, dict)} or {"": parameters}).items():
        numbers[label] = n_pairs = getattr(rotary, f"{label}_inv_freq" if label else "inv_freq").numel()
        # Proportional RoPE: exponents count all pairs, and the last ones do not turn.
        share = its["partial_rotary_factor"] if its["rope_type"] == "proportional" else 1
        found[label] = (its["rope_theta"] ** -(torch.arange(n_pairs).double() / n_pairs))[: round(share * n_pairs)]
    return found, numbers


def extended(name: str, family: str = "llama", **changes: Any) -> Any:
    """A small model under the late method `name`."""
    model = soft_model(family, **changes)
    arguments, _ = LATE[name]
    tables, _ = frequencies(model)
    return ctxext.extend_context(model, **arguments(len(tables.get("full_attention", tables.get("")))))


# ------------------------------------------------------------------------------ the slow forward


class Rotation:
    """⟨R q, k⟩ of every pair of tokens: dimensions i and i + d/2 turn together, those that are not rotary stay.

    Args:
        n_pairs: with those that do not turn (proportional RoPE).
        last: the rotary dimensions are a head's last, as in latent attention.
    """

    def __init__(self, angles: Angles, n_pairs: int, last: bool) -> None:
        apart = nn.functional.pad(angles.apart, (0, n_pairs - angles.apart.shape[-1])).movedim(-1, 0)
        self.cos, self.sin = apart.cos() * angles.times, apart.sin() * angles.times
        self.score_times = angles.score_times
        self.last = last

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        n_pairs = len(self.cos)
        if self.last:
            query, key = (x.roll(2 * n_pairs, -1) for x in (query, key))
        total = query[..., 2 * n_pairs :] @ key[..., 2 * n_pairs :].transpose(-1, -2)
        for pair, (cos, sin) in enumerate(zip(self.cos, self.sin)):
            q1, q2 = query[..., pair, None], query[..., pair + n_pairs, None]
            k1, k2 = key[..., None, :, pair], key[..., None, :, pair + n_pairs]
            total = total + (q1 * cos - q2 * sin) * k1 + (q2 * cos + q1 * sin) * k2
        return total * self.score_times


class SlowModel:
    """A stock model whose attention is the slow one.

    Attributes:
        formula: of layers that see beyond the trained length; the others keep their rotation.
        seen: by layer, keys and values that queries from `seen_from` on see instead of their own.
    """

    def __init__(self, model: nn.Module, formula: Formula) -> None:
        self.model = copy.deepcopy(model)
        self.formula = formula
        self.rotations: dict[tuple[Formula, str], Rotation] = {}
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}
        self.seen_from = 0
        config = self.model.config.get_text_config(decoder=True)
        self.inv_freq, self.n_pairs = frequencies(self.model)
        self.labels = [""] * config.num_hidden_layers if "" in self.inv_freq else config.layer_types
        self.last = config.model_type.startswith("deepseek")
        for rotary in rotaries_of(self.model):
            rotary.forward = functools.partial(_at_zero, rotary.forward)
        for module in self.model.modules():
            if config.model_type in BY_METHOD and hasattr(module, "_attn"):
                module._attn = functools.partial(_slow_method, module)
        # A name without a mask of its own: attention gets none, and makes its own.
        config._attn_implementation_internal = "slow"

    def __call__(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits of shape (token, vocabulary) of one row of tokens."""
        at = torch.arange(len(ids)) if positions is None else positions
        query, key = at[:, None].double(), at[None].double()
        self.rotations = {
            (formula, label): Rotation(formula(query, key, inv_freq), self.n_pairs[label], self.last)
            for formula in {self.formula, plain}
            for label, inv_freq in self.inv_freq.items()
        }
        with _running(self):
            return self.model(ids[None], position_ids=at[None], use_cache=False).logits[0]

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        slot = torch.arange(query.shape[2])
        mask, window = slot[:, None] >= slot, kwargs.get("sliding_window")
        if window is not None:
            mask &= slot[:, None] - slot < window
        formula = plain if window is not None and window <= LENGTH else self.formula
        rotation = self.rotations[formula, self.labels[module.layer_idx]]
        output = self._softmax(rotation, mask, query, key, value, **kwargs)
        if self.seen:
            later = self._softmax(rotation, mask, query, *self.seen[module.layer_idx], **kwargs)
            output = torch.where((slot >= self.seen_from)[:, None], later, output)
        return output

    def _softmax(
        self, rotation: Rotation, mask: Tensor, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any
    ) -> Tensor:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = rotation.scores(query.double(), key.double()) * kwargs["scaling"]
        if kwargs.get("softcap") is not None:
            scores = (scores / kwargs["softcap"]).tanh() * kwargs["softcap"]
        scores = scores.masked_fill(~mask, -torch.inf)
        if kwargs.get("bias") is not None:
            scores = scores + kwargs["bias"]
        if kwargs.get("s_aux") is not None:
            sinks = kwargs["s_aux"].double()[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(-1)[..., : key.shape[2]]
        return (weights @ value.double()).to(value.dtype)


_current: list[SlowModel] = []


@contextmanager
def _running(model: SlowModel) -> Iterator[None]:
    _current.append(model)
    try:
        yield
    finally:
        _current.pop()


def _slow(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    # Nobody makes a mask for this attention function; Doge has a score for each key that it learned.
    assert attention_mask is None or module.config.model_type == "doge"
    return _current[-1].attend(module, query, key, value, bias=attention_mask, **kwargs).transpose(1, 2), None


# Families whose attention is a method of its own, and not a function of transformers' interface.
BY_METHOD = ("gpt_neox_japanese",)


def _slow_method(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None) -> tuple[Tensor, None]:
    assert mask is None
    return _current[-1].attend(module, query, key, value, scaling=query.shape[-1] ** -0.5), None


def _at_zero(forward: Callable[..., Any], x: Tensor, position_ids: Tensor, *rest: Any) -> Any:
    return forward(x, torch.zeros_like(position_ids), *rest)


AttentionInterface.register("slow", _slow)


def slow_model(name: str, family: str = "llama", **changes: Any) -> SlowModel:
    return SlowModel(soft_model(family, **changes), LATE[name][1])


def rows() -> list[Tensor]:
    """Four rows of tokens, of LENGTHS."""
    ids = token_ids(N_TOKENS, batch=len(LENGTHS))
    return [row[:length] for row, length in zip(ids, LENGTHS)]


@functools.cache
def _truth(name: str, family: str, changes: str) -> list[Tensor]:
    model = slow_model(name, family, **json.loads(changes))
    with torch.no_grad():
        return [model(row) for row in rows()]


def truth(name: str, family: str = "llama", **changes: Any) -> list[Tensor]:
    """The logits of each of `rows()`."""
    return _truth(name, family, json.dumps(changes))


# --------------------------------------------------------------------------------- ways of reading


def padded(rows: list[Tensor], side: str) -> dict[str, Tensor]:
    """A batch of rows: tokens, mask and positions."""
    n_tokens = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), n_tokens).long(), torch.zeros(len(rows), n_tokens).long()
    for index, row in enumerate(rows):
        place = slice(n_tokens - len(row), None) if side == "left" else slice(len(row))
        ids[index, place], mask[index, place] = row, 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


@torch.no_grad()
def read(model: Any, inputs: dict[str, Tensor], cache: Cache | None, chunks: list[int]) -> Tensor:
    """The logits of the tokens that `cache` does not hold yet, read `chunks` tokens at a time."""
    found, start = [], 0 if cache is None else int(cache.get_seq_length())
    mask = inputs.get("attention_mask")
    for size in chunks:
        stop = start + size
        given = {name: inputs[name][:, start:stop] for name in ("input_ids", "position_ids") if name in inputs}
        if mask is not None:
            given["attention_mask"] = mask[:, :stop]
        output = model(**given, past_key_values=cache, use_cache=cache is not None)
        found.append(output.logits)
        start = stop
    return torch.cat(found, dim=1)


# Uneven chunks and single tokens, on both sides of the trained length and of two rungs.
CHUNKS = [61, *[1] * 5, 9, *[1] * 6, 23, 1, 49, *[1] * 4, 17, *[1] * 5]
assert sum(CHUNKS) == N_TOKENS


def assert_rows(found: Tensor, want: list[Tensor], mask: Tensor | None = None, atol: float = 1e-4) -> None:
    """The logits of a batch are those of each row by itself, wherever `mask` holds a token."""
    assert len(found) == len(want)
    for index, row in enumerate(want):
        got = found[index] if mask is None else found[index][mask[index].bool()]
        torch.testing.assert_close(got, row, atol=atol, rtol=0)


def stock(rope_type: str):
    """A small Llama that is configured with transformers' own scaling."""
    parameters = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": FACTOR}
    changes = {}
    if rope_type == "longrope":
        short, long = (factors.tolist() for factors in longrope_factors(8))
        parameters |= {"short_factor": short, "long_factor": long, "original_max_position_embeddings": LENGTH}
        changes["max_position_embeddings"] = round(FACTOR * LENGTH)
    return from_config(tiny_config("llama", rope_parameters=parameters, **SOFT, **changes))
