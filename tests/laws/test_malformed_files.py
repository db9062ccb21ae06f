"""Files that a person or another program has edited: each ends in the model, or in one line that names the file."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from families import LENGTH, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import ctxext
from ctxext import LongRoPE, SelfExtend, YaRN
from ctxext.assets import MODEL
from ctxext.cli import commands
from ctxext.export.verify import verify
from ctxext.extension.metadata_file import RECORD, read_record
from ctxext.extension.method_file import SavedMethod, read_saved
from ctxext.hub.adapters import AdapterBase, save_trained
from ctxext.hub.checkpoint import extend_folder, extended_json

DYNAMIC = LongRoPE(
    factor=4, long_factor=(1, 1, 1, 2, 2, 3, 4, 4), short_factor=(1,) * 8, fitted_to=(10_000.0, LENGTH), start_tokens=2
)
JUNK = [
    *(None, True, False, "", "x", "\ud800", [], {}, [["a"]], {"name": "yarn"}, {"": None}, ["a", 1]),
    *(0, 1, -5, 3, 2**31, 10**400, 0.5, -1.0, 1e-320, 1e30, 1e308, float("nan"), float("inf"), -float("inf")),
]


class Files:
    """A folder of each kind that has JSON of ours in it; `cut` mutates one file, and `mended` puts it back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        base = folder / "base"
        tiny_model("llama").save_pretrained(base)
        extend_folder(base, folder / "late", 4, SelfExtend(factor=4, window=8))
        extend_folder(base, folder / "longrope", None, DYNAMIC)
        extend_folder(base, folder / "yarn", 4, YaRN(factor=4, beta_fast=16))
        lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        live = ctxext.extend_context(AutoModelForCausalLM.from_pretrained(base), 4)
        get_peft_model(live, lora).save_pretrained(folder / "live")
        static = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "yarn"), lora)
        save_trained(static, folder / "trained", AdapterBase.of(folder / "yarn", base))
        SavedMethod(DYNAMIC, {"model": "tiny"}).save(folder / "method.json")
        self.whole = {
            path: path.read_bytes()
            for path in (
                *(folder / "late" / RECORD, folder / "longrope" / RECORD, folder / "live" / RECORD),
                *(folder / "yarn/config.json", folder / "late/config.json", folder / "method.json"),
                *(folder / "trained/ctxext.json", folder / "live/adapter_config.json"),
            )
        }


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("files"))


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value within a JSON value, its own included."""
    yield way
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*way, key))


OURS = {"config.json": ("ctxext", "context_extension"), "adapter_config.json": ("base_model_name_or_path",)}


@st.composite
def mutated(draw: st.DrawFn, path: Path, whole: bytes) -> bytes:
    """The file with one or two values exchanged, removed or added, or its bytes cut or spoiled."""
    if draw(st.integers(0, 4)) == 0:
        at = draw(st.integers(0, len(whole) - 1))
        return whole[:at] + draw(st.sampled_from([b"", b"\xff\xfe", b"{", b"[" * 100_000, b"NaN"]))
    content = json.loads(whole)
    ours = OURS.get(path.name)
    for _ in range(draw(st.integers(1, 2))):
        ways = [way for way in places(content) if ours is None or (way and way[0] in ours)]
        if not ways:
            break
        *way, last = draw(st.sampled_from(ways)) or (None,)
        if last is None:
            return json.dumps(draw(st.sampled_from(JUNK))).encode()
        held = content
        for key in way:
            held = held[key]
        match draw(st.sampled_from(["exchange", "exchange", "remove", "add"])):
            case "exchange":
                held[last] = copy.deepcopy(draw(st.sampled_from(JUNK)))
            case "remove":
                del held[last]
            case "add" if isinstance(held, dict) and (held is not content or ours is None):
                held["news"] = draw(st.sampled_from(JUNK))
    return json.dumps(content).encode()


def read_by_all(path: Path) -> None:
    """Everything that reads the file: `ctxext.load`, description and planning; methods in files."""
    if path.name == "method.json":
        read_saved(path)
        return
    if path.name in ("config.json", RECORD) and (path.parent / "config.json").is_file():
        extended_json(path.parent, factor=4, existing="replace")
        ctxext.describe_context(AutoConfig.from_pretrained(path.parent), existing="replace")
    ctxext.load(path.parent)


def refusal(path: Path) -> Exception | None:
    try:
        read_by_all(path)
    except Exception as error:
        return error
    return None


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_spoiled_file_is_read_or_refused_in_a_line_that_names_it(files: Files, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(list(files.whole)), label="file")
    spoiled = data.draw(mutated(path, files.whole[path]), label="content")
    path.write_bytes(spoiled)
    try:
        error = refusal(path)
        # By its very class: a JSONDecodeError is a ValueError too.
        assert type(error) in (type(None), ValueError, FileNotFoundError, RuntimeError), repr(error)
        if type(error) is ValueError:
            assert path.name in str(error) or "config.json" in str(error), str(error)
            assert len(str(error)) < 1200
        assert path.read_bytes() == spoiled
    finally:
        path.write_bytes(files.whole[path])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny extended model with its tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint") / "yarn"
    base = folder.with_name("base")
    tiny_model("llama", vocab_size=4096).save_pretrained(base)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(base)
    extend_folder(base, folder, 4, "yarn")
    return folder


def spoil(folder: Path, file: str, way: tuple[Any, ...], value: Any) -> None:
    *parents, last = way
    content = held = json.loads((folder / file).read_text())
    for key in parents:
        held = held[key]
    held[last] = value
    (folder / file).write_text(json.dumps(content))


def check_refusal(call: Callable[[], Any], file: Path) -> None:
    """`call` returns, or fails in one line that names the file (or the config's class, or what was measured)."""
    error = None
    try:
        call()
    except (ValueError, OSError) as raised:
        error = raised
    assert error is None or "\n" not in str(error)
    if type(error) is ValueError:
        assert any(word in str(error) for word in (file.name, "Config", "tokens", "engine")), error


ANY = [None, True, "", "x", [], ["a"], {}, {"a": 1}, 0, 1, -5, 3, 2**31, 0.5, 1e30, float("nan")]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_field_of_a_checkpoint_is_read_or_refused_in_a_line(checkpoint: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["config.json", "config.json", "tokenizer_config.json"]), label="file")
    file = checkpoint / name
    whole = file.read_text()
    ways = [way for way in places(json.loads(whole)) if way]
    spoil(checkpoint, name, data.draw(st.sampled_from(ways), label="field"), data.draw(st.sampled_from(ANY)))
    try:
        check_refusal(lambda: ctxext.load(checkpoint), file)
        check_refusal(lambda: verify(checkpoint, far=0), file)
    finally:
        file.unlink()
        file.write_text(whole)


@pytest.mark.parametrize(
    ("file", "way", "value"),
    [
        *(("config.json", ("rope_scaling", name), value) for name, value in [("factor", ["a"]), ("rope_type", 1)]),
        *(("config.json", (name,), v) for name, v in [("model_type", 1), ("eos_token_id", "x"), ("dtype", ["a"])]),
        *(("tokenizer_config.json", (name,), v) for name, v in [("model_max_length", ""), ("pad_token", 3)]),
    ],
)
def test_what_transformers_rejects_is_named(
    file: str, way: tuple[str, ...], value: Any, checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint, tmp_path / "model")
    spoil(tmp_path / "model", file, way, value)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "model" / file))):
        verify(tmp_path / "model", far=0)
    if file == "config.json":
        with pytest.raises(ValueError, match=re.escape(str(tmp_path / "model" / file))):
            ctxext.load(tmp_path / "model")


def test_a_padding_token_outside_of_the_vocabulary_is_named(tmp_path: Path) -> None:
    tiny_model("phi3").save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["pad_token_id"]  # the default is 32000
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"config\.json \(AssertionError: Padding_idx must be within"):
        ctxext.load(tmp_path)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_folder_without_tokenizer_is_told_so(family: str, tmp_path: Path) -> None:
    """transformers makes an empty tokenizer for qwen2."""
    extended = ctxext.extend_context(tiny_model(family), 4, "yarn")
    extended.save_pretrained(tmp_path / "model")
    says = f"{tmp_path / 'model'} has no tokenizer. Save it there too: tokenizer.save_pretrained("
    for command in (
        ["eval", "-o", str(tmp_path / "r.jsonl")],
        ["compare", "-o", str(tmp_path / "r.jsonl")],
        ["verify"],
    ):
        result = CliRunner().invoke(commands, [command[0], str(tmp_path / "model"), *command[1:]])
        assert str(result.exception).startswith(says), command


@pytest.mark.parametrize("name", ["late", "live"])
@pytest.mark.parametrize(
    ("field", "value"),
    [("factor", 1e30), ("factor", 1e9), ("original_max_position_embeddings", 2**40), ("method", {"factor": 1e30})],
)
def test_a_number_in_a_file_is_refused_before_anything_is_loaded(
    files: Files, name: str, field: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(files.folder / name, tmp_path / name)
    path = tmp_path / name / RECORD
    content = json.loads(path.read_text())
    content[field] = {**content[field], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(content))
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", None)  # would be a TypeError
    with pytest.raises(ValueError, match=rf"{field}.* in .*{RECORD} must be a number"):
        ctxext.load(tmp_path / name)


def test_the_command_line_names_file_and_field(files: Files, tmp_path: Path) -> None:
    shutil.copytree(files.folder / "late", tmp_path / "late")
    path = tmp_path / "late" / RECORD
    path.write_text(path.read_text().replace('"existing": "refuse"', '"existing": "no"'))
    for command in (["describe"], ["extend", "--dry-run"], ["export", "--engine", "vllm"]):
        result = CliRunner().invoke(commands, [command[0], str(tmp_path / "late"), *command[1:]])
        assert type(result.exception) is ValueError
        assert str(result.exception).startswith(
            f"existing in {path} must be one of refuse, keep, compose, replace, got 'no'."
        )


def test_metadata_that_is_well_formed_is_read_as_it_was_written(files: Files) -> None:
    late, longrope = read_record(files.folder / "late"), read_record(files.folder / "longrope")
    assert late is not None
    assert longrope is not None
    assert late.method == SelfExtend(factor=4, window=8)
    assert longrope.method == DYNAMIC
