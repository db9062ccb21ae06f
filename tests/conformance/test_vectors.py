"""The conformance vectors: three implementations agree with them, and the checker rejects every known wrong reading."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import check
import generate
import pytest
import torch
from cases import BUNDLED, FILES, GRID, SOURCES
from reference import parameters_of, ramp_ends
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.glm.modeling_glm import GlmRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from ctxext.assets import MODEL
from ctxext.encodings.rope import RopeGeometry, cos_sin
from ctxext.export.gguf import extend_gguf, write_gguf
from ctxext.export.llama_cpp import GGUFModel
from ctxext.methods import geometry_in_use, make_method
from ctxext.models.context import read_context

CASES = [pytest.param(case, id=case["name"]) for case in check.cases()]
LOGPROBS = json.loads((check.HERE / "logprobs.json").read_text(encoding="utf-8"))
Values = tuple[list[float], float]


def read_by_transformers(config: dict[str, Any]) -> Any:
    return AutoConfig.for_model(**copy.deepcopy(config))


# --------------------------------------------------------------------------------- three implementations


@pytest.mark.parametrize("name", FILES)
def test_the_files_are_what_the_generator_writes(name: str) -> None:
    assert (check.HERE / name).read_text(encoding="utf-8") == generate.as_text(generate.rope_file(name))


@pytest.mark.parametrize("case", CASES)
def test_ctxext_reads_every_config_as_the_vectors_do(case: dict[str, Any]) -> None:
    (table,) = read_context(read_by_transformers(case["config"])).tables
    trained = table.parameters.get("original_max_position_embeddings", table.limit)
    short = case["length"] <= trained
    found = geometry_in_use(table.of_turning_pairs, table.rotary_dim, table.limit, within=short)
    inv_freq = torch.cat([found.inv_freq, torch.zeros(table.n_zero, dtype=torch.float64)])
    exact = torch.tensor(case["inv_freq"], dtype=torch.float64)
    torch.testing.assert_close(inv_freq, exact, rtol=1e-13, atol=0)
    assert found.attention_factor == pytest.approx(case["attention_factor"], rel=1e-14)
    tables = cos_sin(torch.tensor(case["positions"]), inv_freq, found.attention_factor)
    for values, key in zip(tables, ("cos", "sin")):
        exact = torch.tensor(case[key], dtype=torch.float64)
        torch.testing.assert_close(values[:, case["pairs"]], exact, rtol=0, atol=1e-9)  # a million times float64's


@pytest.mark.parametrize("name", ["linear", "ntk", "abf", "yarn", "llama3"])
def test_ctxext_writes_the_configs_and_rescale_factors_of_the_grid(name: str) -> None:
    found = [case for case in check.cases() if case["name"].startswith(f"{name}-d")]
    for (row, factor), case in zip(GRID, found, strict=True):
        method, plain = make_method(name, factor), RopeGeometry.plain(row.head_dim, row.theta, row.trained)
        written = method.rope_parameters(plain)
        assert written.pop("rope_theta") == pytest.approx(case["config"]["rope_parameters"]["rope_theta"], rel=1e-14)
        defaults = {"beta_fast": 32.0, "beta_slow": 1.0} if name == "yarn" else {}
        assert written == {k: v for k, v in case["config"]["rope_parameters"].items() if k != "rope_theta"} | defaults
        exact = torch.tensor(case["rescale_factors"], dtype=torch.float64)
        torch.testing.assert_close(method.rescale_factors(plain), exact, rtol=1e-13, atol=0)


ROTARY = {
    "llama": LlamaRotaryEmbedding,
    "glm": GlmRotaryEmbedding,
    "phi": PhiRotaryEmbedding,
    "phi3": Phi3RotaryEmbedding,
}


def in_transformers(config: dict[str, Any], length: int, positions: list[int]) -> tuple[Any, Any, Any]:
    """transformers' rotary module, and its cos and sin at `positions` of a sequence of `length` tokens."""
    rotary = ROTARY[config["model_type"]](read_by_transformers(config))
    cos, sin = rotary(torch.zeros(1), torch.tensor([[*positions, length - 1]]))
    pairs = len(rotary.inv_freq)
    return rotary, cos[0, :-1, :pairs].tolist(), sin[0, :-1, :pairs].tolist()


def transformers_rope(config: dict[str, Any], length: int) -> Values:
    rotary, *_ = in_transformers(config, length, [])
    return rotary.inv_freq.tolist(), rotary.attention_scaling


def test_transformers_passes_with_half_of_the_tolerance(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "RTOL", check.RTOL / 2)
    assert check.check_rope(transformers_rope) == 0
    assert check.check_cos_sin(lambda *asked: in_transformers(*asked)[1:]) == 0
    assert capsys.readouterr().out == 2 * f"{len(CASES)} cases checked, 0 not supported\n"


# ------------------------------------------------------------------------------------------ the checker


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the checker prints of an engine that has these numbers for one case; "" if it passes."""

    def run(case: dict[str, Any], inv_freq: list[float], attention_factor: float) -> str:
        monkeypatch.setattr(check, "cases", lambda: iter([case]))
        failures = check.check_rope(lambda config, length: (inv_freq, attention_factor))
        line = capsys.readouterr().out.removesuffix("1 cases checked, 0 not supported\n")
        assert failures == bool(line)
        return line

    return run


def test_an_engine_that_supports_nothing_does_not_pass() -> None:
    def unsupported(*_: Any) -> Any:
        raise NotImplementedError

    for checked in (check.check_rope, check.check_cos_sin, check.check_logprobs):
        with pytest.raises(ValueError, match="supports none of the cases"):
            checked(unsupported)


@pytest.mark.parametrize("case", CASES)
def test_every_known_wrong_reading_is_rejected_by_its_name(case: dict[str, Any], printed: Callable[..., str]) -> None:
    for words, misread in case["known_wrong"].items():
        wrong = {**case, **misread}
        line = printed(case, wrong["inv_freq"], wrong["attention_factor"])
        assert line.startswith(f"{case['name']}: ")
        assert line.endswith(f"; as if {words} ({case['note'] or case['source']})\n")


GROWN = "yarn-d128-theta5e5-L8192-x8"
LENGTH_AS_LIMIT = "the original length is max_position_embeddings"


def test_the_grid_names_the_common_misreadings_the_most_plausible_first() -> None:
    named = {case["name"]: [*case["known_wrong"]] for case in check.cases()}
    attention = ["the attention factor is left out", "the attention factor is squared", "the scaling is ignored"]
    assert named[GROWN] == [
        *attention, "rope_theta is 10000", "the ramp is reversed", "the ramp's ends are not rounded", LENGTH_AS_LIMIT,
        "the factor is applied twice", "yarn is read as linear", "the factor is doubled",
    ]  # fmt: skip
    assert named["longrope-d128-theta1e4-L4096-x8"] == [*attention, "short_factor is taken at every length"]
    assert named["linear-d128-theta1e4-L4096-x2"][1] == "the factor is applied twice"  # which doubles 2, too
    assert "truncate is ignored" in named["yarn-truncate-false-llama2"]
    # At factor 1 yarn changes nothing, so that few misreadings do.
    assert named["yarn-d64-theta1e4-L2048-x1"] == ["the factor is doubled"]


def test_a_failure_is_printed_in_numbers(printed: Callable[..., str]) -> None:
    (case,) = [case for case in check.cases() if case["name"] == GROWN]
    exact, why = case["inv_freq"], f"({case['source']})\n"
    line = f"{GROWN}: attention factor 1.0, expected 1.2079; as if the attention factor is left out {why}"
    assert printed(case, exact, 1.0) == line
    assert printed(case, exact[:-1], case["attention_factor"]) == f"{GROWN}: 63 frequencies, expected 64 {why}"
    off = [*exact[:21], exact[21] * 1.00001, *exact[22:]]
    pair = "inv_freq differs from pair 21: 0.0114075, expected 0.0114073"
    assert printed(case, off, 1.0) == f"{GROWN}: attention factor 1.0, expected 1.2079; {pair} {why}"
    assert printed(case, torch.tensor(off), case["attention_factor"]) == f"{GROWN}: {pair} {why}"
    assert printed(case, exact, float("nan")) == f"{GROWN}: attention factor nan, expected 1.2079 {why}"


@pytest.mark.parametrize("answer", [None, 1.0, (1.0,), (1.0, [0.5]), ([1.0], None), (torch.ones(2, 2), 1.0), "no"])
def test_an_answer_of_another_shape_is_a_failure(
    answer: Any, printed: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.check_rope(lambda config, length: answer) == len(CASES)
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == f"{len(CASES)} cases checked, 0 not supported"
    for line, case in zip(lines, CASES, strict=True):
        assert line.startswith(f"{case.id}: returned ")
        assert line.endswith(", expected (inv_freq, attention_factor), in numbers")
    assert check.check_cos_sin(lambda config, length, positions: answer) == len(CASES)
    assert check.check_logprobs(lambda config, ids: answer) == len(BUNDLED)


def test_a_case_that_raises_is_a_failure_and_the_others_are_still_checked(capsys: pytest.CaptureFixture[str]) -> None:
    exact = {json.dumps([case["config"], case["length"]]): case for case in check.cases()}

    def rope(config: dict[str, Any], length: int) -> Values:
        case = exact[json.dumps([config, length])]
        if case["name"] == GROWN:
            raise TypeError("no such factor")
        return case["inv_freq"], case["attention_factor"]

    def unable(*_: Any) -> Any:
        raise OSError("no engine")

    assert check.check_rope(rope) == 1
    summary = f"{len(CASES)} cases checked, 0 not supported\n"
    assert capsys.readouterr().out == f"{GROWN}: raised TypeError: no such factor\n{summary}"
    assert check.check_cos_sin(unable) == len(CASES)
    assert check.check_logprobs(unable) == len(BUNDLED)
    assert capsys.readouterr().out.count(": raised OSError: no engine\n") == len(CASES) + len(BUNDLED)


@pytest.mark.parametrize("case", CASES)
def test_a_number_that_no_float32_explains_is_rejected(case: dict[str, Any], printed: Callable[..., str]) -> None:
    inv_freq, attention_factor = case["inv_freq"], case["attention_factor"]
    assert not printed(case, inv_freq, attention_factor)
    assert not printed(case, [each * (1 + 1e-6) for each in inv_freq], attention_factor)
    for wrong in (attention_factor * (1 + 3e-6), attention_factor * (1 - 3e-6), float("nan")):
        assert printed(case, inv_freq, wrong)
    for pair, exact in enumerate(inv_freq):
        off = [*inv_freq[:pair], exact * (1 + 3e-6) + 1e-12, *inv_freq[pair + 1 :]]
        assert printed(case, off, attention_factor)
    assert printed(case, inv_freq[:-1], attention_factor)
    assert printed(case, inv_freq[::-1], attention_factor)


def test_a_table_that_ends_at_the_trained_length_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    def clamped(config: dict[str, Any], length: int, positions: list[int]) -> Any:
        return in_transformers(config, length, [min(at, 2047) for at in positions])[1:]

    assert check.check_cos_sin(clamped) > 0
    names = {line.partition(":")[0] for line in capsys.readouterr().out.splitlines()[:-1]}
    assert names == {case.values[0]["name"] for case in CASES if case.values[0]["length"] > 2048}


def test_no_case_is_decided_by_rounding() -> None:
    """YaRN rounds its ramp's ends to whole pairs, and float32 may do so another way where they are nearly whole."""
    ends = []
    for case in check.cases():
        parameters = parameters_of(case["config"])
        if parameters.get("rope_type") == "yarn" or parameters.get("type") == "yarn":
            ends += ramp_ends(parameters, 2 * len(case["inv_freq"]), parameters["rope_theta"])
    assert len(ends) > 80
    assert min(abs(each - round(each)) for each in ends) > 1e-3


def test_every_case_has_a_name_of_its_own_and_a_source() -> None:
    found = [case.values[0] for case in CASES]
    assert [f"{name}.json" for name in check.FILES] == list(FILES)
    assert len({case["name"] for case in found}) == len(found) > 130
    assert {case["source"] for case in found} <= set(SOURCES.values())
    assert sum(path.stat().st_size for path in check.HERE.glob("*.json")) < 1.5e6


def test_the_example_passes_without_torch_and_numpy() -> None:
    command = [sys.executable, "-S", check.HERE / "example.py"]  # -S: without site-packages
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    passed = [case for case in check.cases() if _kind(case["config"]) in ("default", "yarn")]
    assert run.stdout == f"{len(passed)} cases checked, {len(CASES) - len(passed)} not supported\n"


def _kind(config: dict[str, Any]) -> str:
    given = config.get("rope_scaling") or config["rope_parameters"]
    return given.get("rope_type") or given["type"]


# ----------------------------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case["name"], marks=[] if case["name"] == "yarn" else pytest.mark.slow)
        for case in LOGPROBS["cases"]
    ],
)
def test_log_probabilities_are_what_the_generator_writes(case: dict[str, Any]) -> None:
    assert case["logprobs"] == pytest.approx(generate.logprobs_of(case["name"], LOGPROBS["token_ids"]), abs=1e-9)


def test_the_log_probabilities_are_of_the_bundled_model_and_its_methods() -> None:
    assert LOGPROBS["sha256"] == generate.sha256(MODEL / "model.safetensors")
    configs = {case["name"]: case["config"] for case in LOGPROBS["cases"]}
    assert configs == {name: generate.extended(name) for name in BUNDLED}
    assert (LOGPROBS["token_ids"], LOGPROBS["positions"]) == (generate.probe_ids(), generate.POSITIONS)
    assert len(LOGPROBS["token_ids"]) == LOGPROBS["positions"][-1] + 1 == 2048


def test_no_two_methods_have_the_same_log_probabilities() -> None:
    for one, other in combinations(LOGPROBS["cases"], 2):
        apart = [abs(a - b) for a, b in zip(one["logprobs"], other["logprobs"], strict=True)]
        assert max(apart) > 0.1, (one["name"], other["name"])


def transformers_logprobs(config: dict[str, Any], token_ids: list[int]) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(MODEL, **copy.deepcopy(config)).eval()
    ids = torch.tensor([token_ids])
    with torch.inference_mode():
        found = model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
    return found.gather(-1, ids[0, 1:, None])[:, 0].tolist()


def test_transformers_gives_the_log_probabilities() -> None:
    assert check.check_logprobs(transformers_logprobs) == 0


def test_an_engine_that_drops_the_scaling_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    plain = transformers_logprobs({}, LOGPROBS["token_ids"])
    assert check.check_logprobs(lambda config, ids: plain) == len(BUNDLED) - 1
    names = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()[:-1]]
    assert names == [name for name in BUNDLED if name != "baseline"]


@pytest.mark.slow
def test_llama_cpp_gives_the_log_probabilities(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {json.dumps(BUNDLED[name]): name for name in ("linear", "ntk", "yarn", "llama3")}
    write_gguf(MODEL, tmp_path / "plain.gguf")

    def logprobs(config: dict[str, Any], token_ids: list[int]) -> dict[int, float]:
        name = names.get(json.dumps(config["rope_parameters"]))
        if name is None:
            raise NotImplementedError
        extend_gguf(tmp_path / "plain.gguf", tmp_path / name, method=make_method(name, 4))
        with GGUFModel(tmp_path / name) as engine:
            return {at - 1: float(engine.logprobs(token_ids[: at + 1], at)[0]) for at in LOGPROBS["positions"]}

    assert check.check_logprobs(logprobs) == 0
    assert capsys.readouterr().out == f"{len(names)} cases checked, {len(BUNDLED) - len(names)} not supported\n"
