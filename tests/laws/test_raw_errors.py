"""Whatever is in a config, an option or a file: what escapes is an error of our own, on one line, or nothing."""

from __future__ import annotations

import contextlib
import copy
import json
import linecache
import re
import struct
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import yaml
from families import tiny_config, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from live import assert_unchanged, snapshot
from safetensors.torch import load_file, save_file
from small_training import BINDING, LORA, make, train

import ctxext
from ctxext import describe_context, extend_config, extend_context
from ctxext.evals.choice import recommended
from ctxext.evals.perplexity import packed
from ctxext.evals.plots import save_figures
from ctxext.evals.report import write_report
from ctxext.evals.results import Header, read_results
from ctxext.evals.summary import Summary
from ctxext.export.gguf import context_of_gguf, extend_gguf
from ctxext.export.probe import MAX_FAR, Probe, read_probe
from ctxext.export.rules import ENGINES, export_for
from ctxext.extension.method_file import SavedMethod
from ctxext.extension.request import plan_extension
from ctxext.hub.checkpoint import extended_json, read_config
from ctxext.methods import list_methods
from ctxext.models.context import read_context
from ctxext.training.checkpoints import Progress, load_checkpoint, save_checkpoint
from ctxext.training.settings import read_settings
from ctxext.utils.json_files import write_json

PACKAGE = str(Path(ctxext.__file__).parent)
ODD = st.sampled_from([
    -5, 0, 1, 3, 1.5, -0.5, 1e30, 10**12, 10**400, 2**63, 1e308, 1e-320, float("nan"), float("inf"), None, True, False,
    "abc", "", "4096", "\ud800", [], [1], ["a"], {}, {"a": 1}, [[1]], [None] * 8, [float("nan")] * 8,
])  # fmt: skip
quick = settings(derandomize=True, deadline=None, max_examples=150, database=None)


def raised(call: Callable[[], Any]) -> Exception | None:
    """What `call` raises, if it is of a kind that the command line prints without a traceback."""
    try:
        call()
    except (ValueError, OSError) as error:
        return error
    return None


def holds(call: Callable[[], Any], *names: str, lines: int = 1) -> None:
    """`call` returns, or raises by a raise statement of the package: one line, with one of `names` if there are any.

    Args:
        lines: an error may have so many.
    """
    error = raised(call)
    if error is None:
        return
    at = error.__traceback__
    while at.tb_next is not None:
        at = at.tb_next
    file = at.tb_frame.f_code.co_filename
    assert file.startswith(PACKAGE), f"{file}: {error!r}"
    assert linecache.getline(file, at.tb_lineno).strip().startswith("raise"), f"{file}:{at.tb_lineno}: {error!r}"
    assert str(error).count("\n") < lines
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


VARIANTS = {
    "none": {"model": "m", "limit": None, "extension": None},
    "yarn": {"model": "m", "extension": {"method": {"name": "yarn"}}},
    "pi": {"model": "m", "extension": {"method": "pi", "factor": 4}},
}
ABOUT = {"reach": 8, "trained_length": 4, "lengths": [4, 8], "text_tokens": 9000, "eliminated": ["pi"]}
TASKS = {"passkey": {"digits": 5}, "perplexity": {"windows": 2}, "short": {}, "key_tokens": {}}
LOSSES = st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 800.0, 0.0])


def results_lines() -> list[dict[str, Any]]:
    """A whole results file of every kind of sample."""
    # Of format 1: the checksums of later ones would refuse every change.
    header = Header({"seed": 0, "text": "t"}, TASKS, VARIANTS, ABOUT)
    lines: list[dict[str, Any]] = [{"ctxext_results": 1, **vars(header)}]
    for variant, length, trial in product(VARIANTS, (4, 8), (0, 1)):
        place = {"variant": variant, "length": length, "trial": trial, "seed": 0, "depth": None}
        windows = {**place, "tokens": length - 1, "bytes": 30, "loss": 1.0}
        windows |= packed(losses=torch.full((length - 1,), 1.0 + trial), top1=torch.arange(length - 1))
        lines.append({**windows, "task": "perplexity" if length == 8 else "short", "key": f"{length} {trial}"})
        for depth in (0.0, 1.0):
            answer = {"hit": True, "score": float(trial), "digits": 1.0, "logprob": -0.1, "got": "1", "tokens": 2}
            asked = {"expected": ["1"], "question": "?", "contexts": [["a", "b", "c"]], "needle_tokens": [1]}
            lines.append(
                {**place, **answer, **asked, "task": "passkey", "depth": depth, "key": f"{length} {trial} {depth}"}
            )
    mask = {"tokens": 7, "key_tokens": 7, **packed(mask=torch.ones(7, dtype=torch.bool))}
    return [*lines, {**place, "variant": "none", "task": "key_tokens", "key": "k", **mask}]


RESULTS = results_lines()


@settings(quick, max_examples=100)
@given(st.data())
def test_no_results_file_raises_a_raw_error_in_any_figure_or_table(data: st.DataObject) -> None:
    """What can be read is recommended of, tabled, dumped and drawn, with every figure that it has."""
    lines = copy.deepcopy(RESULTS)
    for _ in range(data.draw(st.integers(1, 2))):
        k = data.draw(st.sampled_from([0, *range(len(lines))]))
        if "losses" in lines[k] and data.draw(st.booleans()):
            loss = data.draw(LOSSES)
            lines[k] |= {"loss": loss, **packed(losses=torch.full((lines[k].get("tokens", 1),), loss))}
        elif lines[k]:
            lines[k] = mutated(data.draw, lines[k])
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of matplotlib, where nothing finite is to be drawn
        path = Path(folder) / "results.jsonl"
        text = "".join(json.dumps(line) + "\n" for line in lines)
        path.write_text(text[: data.draw(st.sampled_from([None, None, None, len(text) // 2]))])
        before = path.read_bytes()
        try:
            summary = Summary(read_results(path))
        except ValueError:
            holds(lambda: Summary(read_results(path)), str(path))
            return
        finally:
            assert path.read_bytes() == before
        holds(lambda: recommended(summary), str(path))
        write_report([read_results(path)], Path(folder) / "page.html")
        write_json(Path(folder) / "numbers.json", summary.to_dict())
        if data.draw(st.integers(0, 9)) == 0:  # a second each
            save_figures(summary, Path(folder), "drawn")


@quick
@given(st.data())
def test_no_settings_raise_a_raw_error(data: st.DataObject) -> None:
    tree = mutated(data.draw, data.draw(st.sampled_from(SETTINGS)))
    part = data.draw(st.sampled_from([tree, *(value for value in tree.values() if isinstance(value, dict))]))
    if data.draw(st.integers(0, 4)) == 0:
        part[data.draw(st.sampled_from(["news", "", 3, None, 1.5, True]))] = data.draw(ODD)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "settings.yaml"
        path.write_text(yaml.safe_dump(tree))
        holds(lambda: [settings.binding() for settings in read_settings(path)], str(path), lines=30)


SETTINGS = [yaml.safe_load(p.read_text()) for p in sorted((Path(PACKAGE).parent / "recipes/configs").glob("*.yaml"))]
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi")
)


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        f"{BOMB}extension: {{options: {{beta_fast: *i}}}}\n",
        *("model: &a [*a]", "data: &a {sources: *a}", "[" * 5000, "model: " + "{a: " * 3000, "model: [", "model: \0"),
        *("model: 2020-99-99", f"training: {{steps: {'9' * 5000}}}", f"training: {{seed: 0x{'f' * 5000}}}"),
        *("model: !!python/object/apply:os.getcwd []", "model: !!binary a", "? [a]\n: 1", "a: 1\n---\nb: 2", "<<: 3"),
        *("model: \xff", "training: {tokens: 1e400}", "training: {tokens: nan}"),
    ],
    ids=lambda text: text[:30],
)
def test_no_yaml_raises_a_raw_error(text: str, tmp_path: Path) -> None:
    """Aliases that repeat each other stand for 9^9 values: none is counted, printed or copied."""
    path = tmp_path / "settings.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"settings\.yaml") as error:
        read_settings(path)
    assert len(str(error.value)) < 1500
    with pytest.raises(ValueError, match=r"training\.x=\["):
        read_settings(Path(PACKAGE).parent / "recipes/configs/tiny_yarn_4x.yaml", ["training.x=["])


@pytest.mark.parametrize(
    "change",
    [
        *(
            "training.learning_rate=.inf",
            "training.betas=[.nan, 2]",
            "training.weight_decay=1e999",
            "trainable.alpha=.inf",
        ),
        *("training.steps=1000000000000", "training.batch_size=10000000000", "data.length=10000000000"),
        *(
            "evaluation.trials=1000000000",
            "engine.processes=100000000",
            "extension.factor=1e30",
            "trainable.targets=[]",
        ),
        *("data.sources.0.max_document=10000000000000", "evaluation.lengths=[]", "data.processes=1000000000"),
    ],
)
def test_no_number_of_settings_is_beyond_what_can_be_run(change: str) -> None:
    with pytest.raises(ValueError, match=re.escape(change.partition("=")[0].removesuffix(".max_document"))):
        read_settings(Path(PACKAGE).parent / "recipes/configs/tiny_yarn_4x.yaml", [change])


def gguf_bytes(folder: Path, **metadata: Any) -> bytes:
    """A small GGUF file, with keys of the architecture (a dot is written as two lines) or others in it."""
    path = folder / "small.gguf"
    path.unlink(missing_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        kind = gguf.GGUFValueType.UINT32 if type(value) is int and 0 <= value < 2**32 else None
        kind = gguf.GGUFValueType.INT64 if type(value) is int and kind is None else kind
        writer.add_key_value(key, value, kind or gguf.GGUFValueType.get_type(value))
    writer.add_tensor("token_embd.weight", np.zeros((128, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


GGUF = {
    **{"llama.block_count": 2, "llama.embedding_length": 32, "llama.context_length": 64, "split.count": 0},
    **{"llama.attention.head_count": 4, "llama.attention.head_count_kv": 2, "llama.attention.key_length": 8},
    **{"llama.rope.dimension_count": 8, "llama.rope.freq_base": 1e4, "llama.rope.scaling.type": "none"},
    **{"llama.rope.scaling.factor": 1.0, "llama.rope.scaling.original_context_length": 64, "general.name": "x"},
    **{"llama.rope.scaling.attn_factor": 1.0, "llama.rope.scale_linear": 1.0, "tokenizer.ggml.tokens": ["a", "b"]},
}
KEYS = st.sampled_from([*GGUF, "ctxext.extension"])
STORED = st.sampled_from([
    -5, 0, 1, 3, 1.5, -0.5, 1e30, 10**12, 2**31, float("nan"), float("inf"), True, "abc", "", "yarn", "linear", "{}",
    "[]", '{"a": NaN}', "[" * 50_000, [1], ["a"], [1.5], ["\n"],
])  # fmt: skip
COUNTS = st.sampled_from([0, 1, 2**16, 2**31, 2**40, 2**60, 2**63, 2**64 - 1])


def read_gguf(path: Path) -> None:
    read_context(context_of_gguf(path))
    arguments = {"original_max_position_embeddings": 64, "method": "yarn"}
    with contextlib.suppress(ValueError):
        plan_extension(context_of_gguf(path), 2, existing="replace", **arguments)
        extend_gguf(path, path.with_name("extended.gguf"), 2, existing="replace", **arguments)


@settings(quick, max_examples=200)
@given(st.data())
def test_no_gguf_file_raises_a_raw_error_or_is_read_beyond_its_end(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small.gguf"
        whole = gguf_bytes(path.parent, **GGUF)
        match data.draw(st.sampled_from(["value", "key", "cut", "flip", "count", "array"])):
            case "value":
                try:
                    gguf_bytes(path.parent, **{**GGUF, data.draw(KEYS): data.draw(STORED)})
                except (ValueError, OverflowError, struct.error):  # no GGUF file can hold it
                    path.write_bytes(whole)
            case "key":
                gone = data.draw(KEYS)
                gguf_bytes(path.parent, **{key: value for key, value in GGUF.items() if key != gone})
            case "cut":
                path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
            case "flip":
                at = data.draw(st.integers(0, 1000))
                path.write_bytes(whole[:at] + bytes([data.draw(st.integers(0, 255))]) + whole[at + 1 :])
            case "count":
                at = data.draw(st.one_of(st.sampled_from([8, 16]), st.integers(0, 1000)))
                path.write_bytes(whole[:at] + struct.pack("<Q", data.draw(COUNTS)) + whole[at + 8 :])
            case "array":  # of a kind and a length that are not what is there
                at = whole.index(b"tokenizer.ggml.tokens") + 21
                array = struct.pack("<IIQ", 9, data.draw(st.integers(0, 13)), data.draw(COUNTS))
                path.write_bytes(whole[:at] + array + whole[at + 16 :])
        before = path.read_bytes()
        holds(lambda: read_gguf(path), str(path))
        assert path.read_bytes() == before
        assert {each.name for each in path.parent.iterdir()} <= {"small.gguf", "extended.gguf"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, optimizer = make(LORA)
    train(model, optimizer, range(1))
    return save_checkpoint(tmp_path_factory.mktemp("run"), model, optimizer, Progress(1, 2, 3), BINDING)


@settings(quick, max_examples=40)
@given(st.data())
def test_no_checkpoint_raises_a_raw_error_and_what_is_refused_changes_nothing(
    checkpoint: Path, data: st.DataObject
) -> None:
    model, optimizer = make(LORA, seed=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, tensors = checkpoint / "state.json", checkpoint / "trained.safetensors"
    whole = {path: path.read_bytes() for path in (state, tensors)}
    try:
        match data.draw(st.sampled_from(["state", "cut", "tensors", "shape"])):
            case "state":
                text = json.dumps(mutated(data.draw, json.loads(whole[state])))
                state.write_text(text[: data.draw(st.sampled_from([None, None, len(text) // 2]))])
            case "cut":
                tensors.write_bytes(whole[tensors][: data.draw(st.integers(0, len(whole[tensors]) - 1))])
            case "tensors":
                size = data.draw(COUNTS)
                tensors.write_bytes(struct.pack("<Q", size) + whole[tensors][8:])
            case "shape":
                held = load_file(tensors)
                name = data.draw(st.sampled_from(sorted(held)))
                odd = data.draw(st.sampled_from([None, torch.zeros(1), torch.zeros(3, 3), torch.zeros(0)]))
                save_file({**held, name: odd} if odd is not None else {k: held[k] for k in held if k != name}, tensors)
        error = raised(lambda: load_checkpoint(checkpoint, model, optimizer, BINDING))
        holds(lambda: load_checkpoint(checkpoint, model, optimizer, BINDING), str(checkpoint))
        if error is not None:
            assert not optimizer.state
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        else:
            train(model, optimizer, range(1))
    finally:
        for path, content in whole.items():
            path.write_bytes(content)


@quick
@given(st.data())
def test_no_probe_raises_a_raw_error(data: st.DataObject) -> None:
    probe = Probe(
        "a b c", (1, 2, 3), {"extended": (-1.0, -2.0), "unextended": (-2.0, -1.0)}, {128: (-1.0,) * 12}, 0.1, 0.2,
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
