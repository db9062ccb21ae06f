"""Whatever stands in a config, an option or a file: what escapes is an error of our own, on one line, or nothing."""

from __future__ import annotations

import copy
import json
import linecache
import tempfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from families import tiny_config, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from live import assert_unchanged, snapshot

import ctxext
from ctxext import describe_context, extend_config, extend_context
from ctxext.configs import read_context
from ctxext.engines.probe import MAX_FAR, Probe, read_probe
from ctxext.engines.rules import ENGINES, export_for
from ctxext.evals.results import Header, read_results
from ctxext.evals.summary import Summary
from ctxext.folders import extended_json, read_config
from ctxext.methods import list_methods
from ctxext.planning import plan_extension
from ctxext.saved import SavedMethod

PACKAGE = str(Path(ctxext.__file__).parent)
ODD = st.sampled_from([
    -5, 0, 1, 3, 1.5, -0.5, 1e30, 10**12, 10**400, 2**63, 1e308, 1e-320, float("nan"), float("inf"), None, True, False,
    "abc", "", "4096", [], [1], ["a"], {}, {"a": 1}, [[1]], [None] * 8, [float("nan")] * 8,
])  # fmt: skip
quick = settings(derandomize=True, deadline=None, max_examples=150, database=None)


def raised(call: Callable[[], Any]) -> Exception | None:
    """What `call` raises, if it is of a kind that the command line prints without a traceback."""
    try:
        call()
    except (ValueError, OSError) as error:
        return error
    return None


def holds(call: Callable[[], Any], *names: str) -> None:
    """`call` returns, or raises by a raise statement of the package: one line, with one of `names` if there are any."""
    error = raised(call)
    if error is None:
        return
    at = error.__traceback__
    while at.tb_next is not None:
        at = at.tb_next
    file = at.tb_frame.f_code.co_filename
    assert file.startswith(PACKAGE), f"{file}: {error!r}"
    assert linecache.getline(file, at.tb_lineno).strip().startswith("raise"), f"{file}:{at.tb_lineno}: {error!r}"
    assert "\n" not in str(error)
    assert not names or any(name in str(error) for name in names), error


def mutated(draw: st.DrawFn, raw: Any) -> Any:
    """`raw` with a value somewhere in it that is odd, or missing."""
    raw = at = copy.deepcopy(raw)
    while True:
        key = draw(st.sampled_from(list(at) if isinstance(at, dict) else range(len(at))))
        if isinstance(at[key], (dict, list)) and at[key] and draw(st.integers(0, 2)):
            at = at[key]
        elif draw(st.integers(0, 7)):
            at[key] = draw(ODD)
            return raw
        else:
            del at[key]
            return raw


def raw(config: Any) -> dict[str, Any]:
    return json.loads(config.to_json_string())


SCALED = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LISTS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_type": "longrope"}
CONFIGS = [
    *(raw(tiny_config(family)) for family in ("llama", "phi3", "gemma2", "gpt_neox", "qwen3_5")),
    *(raw(tiny_config("llama", rope_parameters=dict(each))) for each in (SCALED, {**SCALED, **LISTS})),
    raw(extend_config(tiny_config("qwen2"), 4, method="resonance")),
]
TYPED = ("max_position_embeddings", "num_hidden_layers", "head_dim", "rope_parameters", "rope_theta", "factor")


@quick
@given(st.data())
def test_no_config_raises_a_raw_error(data: st.DataObject) -> None:
    source = mutated(data.draw, data.draw(st.sampled_from(CONFIGS)))
    method = data.draw(st.sampled_from([None, "yarn", "ntk", "abf", "dynamic_yarn", "self_extend", "resonance"]))
    existing = data.draw(st.sampled_from(["refuse", "keep", "compose", "replace"]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(source))
        before = path.read_bytes()
        holds(lambda: read_config(folder), str(path))
        holds(lambda: extended_json(Path(folder), factor=4, method=method, existing=existing))
        try:
            config = read_config(folder)
        except ValueError:
            return
        holds(lambda: str(describe_context(config, 4, method=method)))
        engine = data.draw(st.sampled_from(ENGINES))
        holds(lambda: export_for(engine, config, source=source))
        assert path.read_bytes() == before
        assert [each.name for each in Path(folder).iterdir()] == ["config.json"]


@pytest.mark.parametrize("field", TYPED)
def test_a_field_of_a_live_config_is_named(field: str) -> None:
    """transformers checks a config as it is made, and not what is set in it later."""
    for value in (-5, "abc", [1], float("nan"), 10**400):
        config = tiny_config("llama", rope_parameters=dict(SCALED))
        if field in config.rope_parameters:
            config.rope_parameters[field] = value
        else:
            config.__dict__[field] = value
        for call in (read_context, lambda config: plan_extension(config, 4), describe_context):
            with pytest.raises(ValueError, match=rf"LlamaConfig: .*{field} must be"):
                call(config)


@quick
@given(st.data())
def test_no_option_raises_a_raw_error_and_the_model_stays(data: st.DataObject) -> None:
    model, method = tiny_model("llama"), data.draw(st.sampled_from(list_methods("rope")))
    names = [field.name for field in fields(method) if field.name != "factor"]
    options = {"long_factor": [1.5] * 8} if method.name == "longrope" else {}
    arguments = {"factor": 4, **options}
    name = data.draw(st.sampled_from(["factor", "length", "target_length", "original_max_position_embeddings", *names]))
    arguments[name] = data.draw(ODD)
    if name == "target_length":
        del arguments["factor"]
    before = snapshot(model)
    holds(lambda: plan_extension(model.config, method=method.name, **arguments))
    try:
        plan_extension(model.config, method=method.name, **arguments)
    except ValueError:
        with pytest.raises(ValueError, match=r".+"):
            extend_context(model, method=method.name, **arguments)
    assert_unchanged(model, before)


EXAMPLES = [method.example(read_context(tiny_config("llama")).rope, 4.0) for method in list_methods("rope")]


@quick
@given(st.data())
def test_no_method_file_raises_a_raw_error(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fitted.json"
        SavedMethod(data.draw(st.sampled_from(EXAMPLES))).save(path)
        text = json.dumps(mutated(data.draw, json.loads(path.read_text())))
        path.write_text(text[: data.draw(st.sampled_from([None, None, len(text) // 2]))])
        holds(lambda: plan_extension(tiny_config("llama"), method=str(path)))


@quick
@given(st.data())
def test_no_results_file_raises_a_raw_error(data: st.DataObject) -> None:
    variants = {
        "none": {"model": "m", "limit": None},
        "yarn": {"model": "m", "extension": {"method": {"name": "yarn"}}},
    }
    about = {"reach": 512, "trained_length": 256, "lengths": [256, 512], "text_tokens": 9000}
    header = Header({"seed": 0}, {"passkey": {"digits": 5}}, variants, about)
    record = {
        "variant": "none", "key": "a", "task": "passkey", "length": 512, "depth": 0.5, "trial": 0, "seed": 0,
        "hit": True, "score": 1.0, "digits": 1.0, "logprob": -0.1, "got": "1", "expected": ["1"], "tokens": 2,
        "question": "?", "contexts": [], "needle_tokens": [1],
    }  # fmt: skip
    text = {**{name: record[name] for name in list(record)[:7]}, "task": "perplexity", "key": "c"}
    text |= {"tokens": 2, "bytes": 3, "loss": 1.0, "losses": "AAAAAAAAAAA="}
    lines = [json.loads(header.line()), record, {**record, "key": "b", "variant": "yarn"}, text]
    k = data.draw(st.integers(0, 3))
    lines[k] = mutated(data.draw, lines[k])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.jsonl"
        text = "".join(json.dumps(line) + "\n" for line in lines)
        path.write_text(text[: data.draw(st.sampled_from([None, None, len(text) // 2]))])
        holds(lambda: Summary(read_results(path)).recommendation(), str(path))


@quick
@given(st.data())
def test_no_probe_raises_a_raw_error(data: st.DataObject) -> None:
    probe = Probe(
        "a b c", (1, 2, 3), {"extended": (-1.0, -2.0), "unextended": (-2.0, -1.0)}, {128: (-1.0,) * 8}, 0.1, 0.2,
        "yarn", 64, 128, "float32", {},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "verify.json"
        probe.save(path)
        assert read_probe(path) == probe
        path.write_text(json.dumps(mutated(data.draw, json.loads(path.read_text()))))
        holds(lambda: read_probe(path), str(path))
        path.write_text(path.read_text().replace('"128"', f'"{MAX_FAR + 1}"'))
        holds(lambda: read_probe(path), str(path))
