"""The configs of the conformance vectors, and the known wrong readings of each. `generate.py` writes their numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from mpmath import log, mpf, pi

Config = dict[str, Any]
Parameters = dict[str, Any]

CODE = "transformers 5, modeling_rope_utils.py:"
SOURCES = {
    "default": "RoFormer (arXiv:2104.09864), section 3.2.2; transformers 5: compute_default_rope_parameters",
    "linear": f"Position Interpolation (arXiv:2306.15595), equation 4; {CODE} _compute_linear_scaling_rope_parameters",
    "ntk": "NTK-aware scaling (bloc97, 2023): theta * factor^(d/(d-2))",
    "abf": "Adjusted base frequency (arXiv:2309.16039), with the base of arXiv:2310.05209",
    "yarn": f"YaRN (arXiv:2309.00071), equations 17 to 22; {CODE} _compute_yarn_parameters",
    "llama3": f"Llama 3.1 (arXiv:2407.21783); {CODE} _compute_llama3_parameters",
    "longrope": f"LongRoPE (arXiv:2402.13753); {CODE} _compute_longrope_parameters",
    "proportional": f"{CODE} _compute_proportional_rope_parameters",
}


# Of every method, in misreadings.py; a case names one of these beside its own reading if both give the same numbers.
IGNORED, LEFT_OUT = "the scaling is ignored", "the attention factor is left out"


@dataclass(frozen=True)
class Geometry:
    """What a model was trained with: dimensions per head, base, length in tokens."""

    head_dim: int = 128
    theta: float = 1e4
    trained: int = 4096


@dataclass(frozen=True)
class Case:
    """A config, and the known wrong readings of it.

    Attributes:
        method: a key of SOURCES.
        length: tokens in the sequence.
        misread: by the reading in words: who has it, and the config that means the same to a right reader.
    """

    name: str
    method: str
    geometry: Geometry
    config: Config
    length: int
    note: str = ""
    misread: dict[str, tuple[str | None, Config]] = field(default_factory=dict)

    def wrong(self, words: str, seen_in: str | None = None, config: Config | None = None, **parameters: Any) -> Case:
        """This case with another wrong reading, as if `rope_parameters` and fields of the config were these."""
        read = {**self.config, "rope_parameters": {**self.config["rope_parameters"], **parameters}, **(config or {})}
        return replace(self, misread={**self.misread, words: (seen_in, read)})


def case(
    name: str, geometry: Geometry, parameters: Parameters | None, note: str = "", *,
    factor: float = 4.0, method: str = "", length: int = 0, **fields: Any,
) -> Case:  # fmt: skip
    """A case at `factor` times the trained length; `fields` replace those of the config, None removes one."""
    target = int(factor * geometry.trained)
    config = {
        "model_type": "llama",
        "hidden_size": 32 * geometry.head_dim,
        "num_attention_heads": 32,
        "head_dim": geometry.head_dim,
        "max_position_embeddings": target,
        "rope_parameters": parameters,
        **fields,
    }
    config = {key: value for key, value in config.items() if value is not None}
    return Case(name, method or (parameters or {})["rope_type"], geometry, config, length or target, note)


# ------------------------------------------------------------------------------- methods on a geometry


def default(row: Geometry, **more: Any) -> Parameters:
    return {"rope_type": "default", "rope_theta": row.theta, **more}


def ntk(row: Geometry, factor: float = 4.0) -> Parameters:
    return default(row, rope_theta=float(row.theta * mpf(factor) ** (mpf(row.head_dim) / (row.head_dim - 2))))


def abf(row: Geometry, factor: float = 4.0) -> Parameters:
    return default(row, rope_theta=float(row.theta ** (1 + log(factor) / log(row.trained / (2 * pi)))))


def linear(row: Geometry, factor: float = 4.0, **more: Any) -> Parameters:
    return {"rope_type": "linear", "rope_theta": row.theta, "factor": factor, **more}


def yarn(row: Geometry, factor: float = 4.0, **more: Any) -> Parameters:
    return linear(row, factor, rope_type="yarn", original_max_position_embeddings=row.trained) | more


def llama3(row: Geometry, factor: float = 4.0, **more: Any) -> Parameters:
    return yarn(row, factor, rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0) | more


def longrope(row: Geometry, factor: float = 4.0, pairs: int = 0, **more: Any) -> Parameters:
    """With lists of our own that rise with the pair and waver, so that no permutation goes unseen."""
    pairs = pairs or row.head_dim // 2
    rise = [pair / (pairs - 1) for pair in range(pairs)]
    lists = {
        "short_factor": [round(1 + 0.1 * x * (1 + math.sin(9 * x)), 3) for x in rise],
        "long_factor": [round(1 + (factor - 1) * x + 0.3 * x * math.sin(9 * x), 3) for x in rise],
    }
    return yarn(row, factor, rope_type="longrope") | lists | more


# ---------------------------------------------------------------------------------------- every method

GRID = [
    (Geometry(head_dim, theta, trained), factor)
    for head_dim, theta, trained, factors in (
        (64, 1e4, 2048, (1.0, 2.7, 4.0)),
        (96, 1e4, 4096, (1.5, 32.0)),
        (128, 1e4, 4096, (2.0, 8.0)),
        (128, 5e5, 8192, (1.0, 3.3, 8.0)),
        (128, 1e6, 32768, (4.0, 32.0)),
        (256, 1e4, 8192, (1.5,)),
        (256, 1e7, 8192, (16.0,)),
    )
    for factor in factors
]


def grid(method: Any) -> Iterator[Case]:
    """A case of a method for each row of GRID."""
    for row, factor in GRID:
        theta = f"{row.theta:.0e}".replace("+0", "")
        name = f"{method.__name__}-d{row.head_dim}-theta{theta}-L{row.trained}-x{factor:g}"
        yield case(name, row, method(row, factor), factor=factor, method=method.__name__)


# ------------------------------------------------------------------- what engines are known to get wrong

LLAMA2, LLAMA3, LLAMA3_1B = Geometry(), Geometry(128, 5e5, 8192), Geometry(64, 5e5, 8192)
QWEN3, DEEPSEEK, PHI3, GPT_OSS = Geometry(128, 1e6, 32768), Geometry(64), Geometry(96), Geometry(64, 1.5e5)
GROWTH = 0.1 * math.log(4)  # YaRN's attention factor at 4 times the length is 1 more

MLX, ORT, EXLLAMA = "mlx-lm 0.32.2 (run)", "ONNX Runtime GenAI 0.18 (run)", "ExLlamaV3 (read)"
BOTH = "vLLM >= 0.12 and SGLang >= 0.5.10 (read)"
OLD_VLLM = "vLLM <= 0.29 outside the DeepSeek families (read)"


def yarn_edges() -> Iterator[Case]:
    def edge(name: str, note: str, row: Geometry = LLAMA2, factor: float = 4.0, **parameters: Any) -> Case:
        return case(f"yarn-{name}", row, yarn(row, factor, **parameters), note, factor=factor)

    ends = "the ramp's ends are rounded outwards to whole pairs, as by default"
    yield edge("truncate-true", ends, truncate=True).wrong("the ramp's ends are not rounded", ORT, truncate=False)
    for name, row in {"llama2": LLAMA2, "gpt-oss": GPT_OSS}.items():
        yield edge(f"truncate-false-{name}", "the ramp's ends are fractional pairs", row, truncate=False).wrong(
            "truncate is ignored", f"llama.cpp, the DeepSeek families of {BOTH}; {MLX}", truncate=True
        )
    replaces = "replaces 0.1 ln(factor) + 1"
    ignorant = f"vLLM <= 0.29 and SGLang >= 0.5.10 (read); {ORT}; {MLX}"
    yield edge("attention-factor-1", replaces, attention_factor=1.0).wrong(
        "attention_factor is ignored", ignorant, attention_factor=None
    )
    yield (
        edge("attention-factor-1.3", replaces, attention_factor=1.3)
        .wrong("attention_factor is ignored", ignorant, attention_factor=None)
        .wrong(
            "attention_factor multiplies 0.1 ln(factor) + 1",
            "llama.cpp, the key rope.scaling.attn_factor (read)",
            attention_factor=1.3 * (GROWTH + 1),
        )
        .wrong(
            "attention_factor is taken as mscale, which adds the logarithm again",
            "TensorRT-LLM before #16379 (read)",
            attention_factor=1.3 * GROWTH + 1,
        )
    )
    yield (
        edge("attention-factor-0.8", f"{replaces}, below 1 too", attention_factor=0.8)
        .wrong("attention_factor is ignored", ignorant, attention_factor=None)
        .wrong(f"{LEFT_OUT}, or raised to 1", attention_factor=1.0)
    )
    yield edge("betas", "other turns than 32 and 1 bound the ramp", beta_fast=16.0, beta_slow=2.0).wrong(
        "the betas are ignored", "llama.cpp, GGUF files of llama and qwen (read)", beta_fast=None, beta_slow=None
    )
    yield edge("betas-null", "null is 32 and 1, as if the keys were missing", beta_fast=None, beta_slow=None)
    yield edge("mscale-equal", "DeepSeek-V3: equal ones cancel", DEEPSEEK, 40.0, mscale=1.0, mscale_all_dim=1.0).wrong(
        "mscale and mscale_all_dim are ignored", OLD_VLLM, mscale=None
    )
    quotient = "(0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1)"
    yield (
        edge("mscale-quotient", quotient, DEEPSEEK, mscale=1.0, mscale_all_dim=0.5)
        .wrong("mscale and mscale_all_dim are ignored", OLD_VLLM, mscale=None)
        .wrong("the quotient is turned over", mscale=0.5, mscale_all_dim=1.0)
    )
    yield edge("mscale-zero", "0 is as if the keys were missing", DEEPSEEK, mscale=0.0, mscale_all_dim=0.0).wrong(
        f"{LEFT_OUT}, or 0 is read as a number and equal ones cancel", MLX, attention_factor=1.0
    )
    yield edge("mscale-alone", "mscale is ignored without mscale_all_dim", DEEPSEEK, mscale=0.707).wrong(
        "mscale alone is applied", attention_factor=0.707 * GROWTH + 1
    )
    both = {"attention_factor": 1.2, "mscale": 1.0, "mscale_all_dim": 0.5}
    yield edge("attention-factor-and-mscale", "attention_factor wins", DEEPSEEK, **both).wrong(
        "mscale wins", attention_factor=None
    )
    yield edge("short-original", "the ramp would begin before pair 0", Geometry(64, 1e4, 128))
    yield edge("small-theta", "the ramp would end beyond d - 1", Geometry(64, 100.0, 131072))


def llama3_edges() -> Iterator[Case]:
    for name, row, factor in (("3.1", LLAMA3, 8.0), ("3.2-1B", LLAMA3_1B, 32.0)):
        note = f"Llama {name}: the limit is 16 times the original length"
        yield case(f"llama3-{name}", row, llama3(row, factor), note, factor=16.0).wrong(
            "the original length is max_position_embeddings", original_max_position_embeddings=131072
        )
    turns = {"low_freq_factor": 2.0, "high_freq_factor": 8.0}
    yield case("llama3-turns", LLAMA3, llama3(LLAMA3, **turns), "other turns than 1 and 4 bound the ramp").wrong(
        "low_freq_factor and high_freq_factor are ignored", low_freq_factor=1.0, high_freq_factor=4.0
    )


def longrope_edges() -> Iterator[Case]:
    def edge(name: str, note: str, length: int = 0, **parameters: Any) -> Case:
        return case(f"longrope-{name}", PHI3, {**whole, **parameters}, note, factor=32.0, length=length)

    whole = longrope(PHI3, 32.0)
    yield edge("at-original", "a sequence of the original length takes short_factor", 4096).wrong(
        "long_factor is taken at every length",
        "vLLM >= 0.12 if --max-model-len exceeds the original length (read)",
        short_factor=whole["long_factor"],
    )
    yield edge("beyond-original", "with one token more, all positions take long_factor", 4097).wrong(
        "short_factor is taken at every length", long_factor=whole["short_factor"]
    )
    yield edge("attention-factor", "replaces sqrt(1 + ln(factor) / ln(original length))", attention_factor=1.05).wrong(
        "attention_factor is ignored", f"{BOTH}; TurboMind of LMDeploy (read)", attention_factor=None
    )
    yield edge("factor-null", "null is max_position_embeddings / original length", factor=None).wrong(
        f"{LEFT_OUT}, or a missing factor is 1", factor=1.0
    )
    bare = {key: whole[key] for key in ("rope_type", "rope_theta", "short_factor", "long_factor")}
    beside = {"model_type": "phi3", "original_max_position_embeddings": 4096}
    yield case("longrope-phi3", PHI3, bare, "Phi-3's original length is outside", factor=32.0, **beside).wrong(
        "the original length is max_position_embeddings", config={"original_max_position_embeddings": 131072}
    )
    yield edge("factor-16", "factor wins over the two lengths", factor=16.0).wrong(
        "the factor is max_position_embeddings / original length", f"{BOTH}; {EXLLAMA}; {MLX}", factor=32.0
    )


def partial_cases() -> Iterator[Case]:
    for share, row in ((0.5, LLAMA2), (0.25, Geometry(256, 1e6, 8192))):
        lists = longrope(row, pairs=int(row.head_dim * share) // 2)
        for parameters in (default(row), linear(row), yarn(row), llama3(row), lists):
            kind = parameters["rope_type"]
            d = "d is the number of rotary dimensions"
            part = {**parameters, "partial_rotary_factor": share}
            found = case(f"partial-{share}-{kind}", row, part, d, model_type="glm").wrong(
                "d is the head's dimensions in the exponents", rope_theta=row.theta**share
            )
            if kind != "longrope":  # whose lists say the number of pairs
                found = found.wrong("partial_rotary_factor is ignored", partial_rotary_factor=1.0)
            yield found
        d = "d is the head's dimensions; the last pairs do not rotate"
        proportional = default(row, rope_type="proportional", partial_rotary_factor=share)
        yield case(f"proportional-{share}", row, proportional, d, factor=1.0)
        yield case(f"proportional-{share}-x4", row, {**proportional, "factor": 4.0}, d).wrong(
            "factor is ignored", BOTH, factor=1.0
        )
    row = Geometry(80, 1e4, 2048)
    beside = {"model_type": "phi", "head_dim": None, "partial_rotary_factor": 0.4}
    yield case("partial-outside", row, default(row), "Phi-2: it may be outside rope_parameters", **beside).wrong(
        "partial_rotary_factor outside rope_parameters is ignored", partial_rotary_factor=1.0
    )


def reading_cases() -> Iterator[Case]:
    """Where the same numbers may be written, and which of two wins."""
    whole, short = yarn(QWEN3), yarn(LLAMA2)
    yield case("rope-parameters-alone", QWEN3, whole, "the format of transformers 5, without its older keys").wrong(
        "rope_parameters is not read", f"{MLX} for Llama; transformers 4.57 (run)", rope_type="default", rope_theta=1e4
    )
    older = {"rope_theta": 1e6, "rope_scaling": {**whole, "type": "yarn"}}
    del older["rope_scaling"]["rope_type"], older["rope_scaling"]["rope_theta"]
    yield case("older-keys", QWEN3, None, "the format of transformers 4", method="yarn", **older)
    yield case("type-and-rope-type", LLAMA2, {**short, "type": "linear"}, "rope_type wins over type").wrong(
        "type wins over rope_type", rope_type="linear"
    )
    bare = {key: value for key, value in whole.items() if key != "rope_theta"}
    yield case("theta-outside", QWEN3, bare, "rope_theta outside rope_parameters counts", rope_theta=1e6).wrong(
        "a theta that is missing in rope_parameters is 10000", rope_theta=1e4
    )
    yield case("theta-twice", QWEN3, whole, "the one in rope_parameters wins", rope_theta=5e5).wrong(
        "the one outside rope_parameters wins", "vLLM 0.12 to 0.19.0 (read)", rope_theta=5e5
    )
    yield case("theta-nowhere", LLAMA2, {"rope_type": "linear", "factor": 4.0}, "without rope_theta it is 10000")
    quotient = "the factor is max_position_embeddings / original length"
    yield case("limit-beyond", LLAMA2, short, "factor wins over the two lengths", factor=8.0).wrong(
        quotient, EXLLAMA, factor=8.0
    )
    yield case("limit-as-trained", QWEN3, whole, "Qwen's cards leave the limit", max_position_embeddings=32768).wrong(
        f"{IGNORED}, or {quotient}", EXLLAMA, factor=1.0
    )
    yield case("factor-null", LLAMA2, {**short, "factor": None}, quotient)
    missing = {key: value for key, value in short.items() if key != "original_max_position_embeddings"}
    yield case("original-missing", LLAMA2, missing, "it is max_position_embeddings", max_position_embeddings=4096)
    twice = {**short, "original_max_position_embeddings": 8192}
    yield case(
        "original-twice", LLAMA2, twice, "the one outside rope_parameters wins", original_max_position_embeddings=4096
    ).wrong("the one in rope_parameters wins", config={"original_max_position_embeddings": 8192})
    yield case("head-dim-given", QWEN3, whole, "Qwen3-4B: head_dim is not derived", hidden_size=2560).wrong(
        "head_dim is hidden_size / num_attention_heads", config={"head_dim": 80}
    )
    yield case("head-dim-derived", LLAMA2, short, "it is hidden_size / num_attention_heads", head_dim=None)


FILES = {
    "linear.json": [*grid(linear)],
    "theta.json": [*grid(ntk), *grid(abf)],
    "yarn.json": [*grid(yarn), *yarn_edges()],
    "llama3.json": [*grid(llama3), *llama3_edges()],
    "longrope.json": [*grid(longrope), *longrope_edges()],
    "partial.json": [*partial_cases()],
    "reading.json": [*reading_cases()],
}

# The bundled model, ctxext/assets/austen-4m, and its `rope_parameters` by method.
AUSTEN = Geometry(64, 1250.0, 512)
BUNDLED = {
    "baseline": default(AUSTEN),
    "linear": linear(AUSTEN),
    "ntk": ntk(AUSTEN),
    "abf": abf(AUSTEN),
    "yarn": yarn(AUSTEN),
    "yarn-truncate-false": yarn(AUSTEN, truncate=False),
    "yarn-attention-factor-1": yarn(AUSTEN, attention_factor=1.0),
    "llama3": llama3(AUSTEN),
    "longrope": longrope(AUSTEN),
}
