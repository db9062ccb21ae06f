"""`ctxext extend` on a folder: a new config, the same weights, nothing left behind on errors."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch
from families import FAMILIES, from_config, logits, tiny_config, tiny_model, token_ids
from live import LATE, late
from safetensors.torch import load_file
from survey.small import small_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import ctxext
from ctxext.assets import MODEL
from ctxext.cli import commands
from ctxext.evals.loading import load
from ctxext.extension.metadata_file import RECORD
from ctxext.extension.method_file import PROBE
from ctxext.hub.checkpoint import LARGE_COPY, checkpoint_folder, extend_folder, load_model, weights_in
from ctxext.models.metadata import Existing


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "source")
    (tmp_path / "source/tokenizer_config.json").write_text('{"model_max_length": 64, "kept": 1}')
    return tmp_path / "source"


@pytest.mark.parametrize("command", ["describe", "extend", "export"])
def test_code_in_a_checkpoint_is_neither_run_nor_offered(command: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    parts = {"AutoConfig": "code.Mine", "AutoModelForCausalLM": "code.Mine"}
    (folder / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": parts}))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Mine: pass\n")
    arguments = [command, str(folder), "--factor", "2"]
    arguments += ["-o", str(tmp_path / "out")] if command == "extend" else []
    found = CliRunner().invoke(commands, arguments, input="y\n")
    assert "needs Python code of its own (auto_map in config.json), which ctxext does not run" in str(found.exception)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]


def test_a_wrong_argument_of_load_is_not_blamed_on_the_folder(source: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype must be a torch dtype or its name, such as 'bfloat16', got 'bf16'"):
        ctxext.load(source, dtype="bf16")
    assert ctxext.load(source, dtype="bfloat16").dtype == torch.bfloat16
    with pytest.raises(TypeError, match="expected a folder or a hub name, got LlamaForCausalLM"):
        ctxext.load(tiny_model("llama"))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_extended_folder_is_the_model_extended_live_and_saved(family: str, tmp_path: Path) -> None:
    model, ids = tiny_model(family), token_ids(150)
    model.save_pretrained(tmp_path / "source")
    extend_folder(tmp_path / "source", tmp_path / "out", factor=4, method="yarn")
    ctxext.extend_context(model, 4, "yarn")
    reloaded = type(model).from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits(reloaded, ids), logits(model, ids))
    assert reloaded.config.get_text_config().rope_parameters == model.config.get_text_config().rope_parameters


def offers(words: str) -> list[str]:
    return re.findall(r"(?:existing='|--existing )(\w+)", words)


@pytest.mark.parametrize("method", [LATE[0], *(pytest.param(name, marks=pytest.mark.slow) for name in LATE[1:])])
def test_describe_offers_for_an_extended_folder_what_extend_takes(method: str, source: Path, tmp_path: Path) -> None:
    live = late(method, tiny_model("llama"))
    extend_folder(source, tmp_path / "out", method=live, say=lambda line: None)
    assert (tmp_path / "out" / RECORD).is_file()
    run = CliRunner().invoke(commands, ["describe", str(tmp_path / "out")])
    offered = offers(" ".join(run.stdout.split()))
    assert offered == ["replace"]
    for existing in get_args(Existing):
        again = ["describe", str(tmp_path / "out"), "--existing", existing, "--factor", "8"]
        would = " ".join(CliRunner().invoke(commands, again).stdout.split("ctxext extend would")[1].split())
        if existing in offered:
            plan = extend_folder(tmp_path / "out", tmp_path / "again", 8, existing=existing).plan
            assert would.startswith(plan.summary)
        else:
            assert would.startswith("refuse: ")
            with pytest.raises(ValueError, match="is already extended"):
                extend_folder(tmp_path / "out", tmp_path / "refused", 8, existing=existing)


@pytest.mark.parametrize("model_type", ["bloom", "mpt", "xglm", "ctrl"])
def test_describe_offers_for_a_folder_without_rope_what_extend_takes(model_type: str, tmp_path: Path) -> None:
    small_model(model_type, "causal").save_pretrained(tmp_path / "source")
    extend_folder(tmp_path / "source", tmp_path / "out", 2, say=lambda line: None)
    said = CliRunner().invoke(commands, ["describe", str(tmp_path / "out")]).stdout
    for existing in offers(" ".join(said.split())):
        extend_folder(tmp_path / "out", tmp_path / existing, 8, existing=existing, say=lambda line: None)


@pytest.mark.parametrize("method", [*LATE, "yarn"])
def test_describe_offers_for_an_extended_config_what_can_be_planned(method: str) -> None:
    model = tiny_model("llama")
    config = ctxext.extend_context(model, method=late(method, model)).config
    offered = offers(ctxext.describe_context(config, 8).would_do)
    assert offered == (["compose", "keep", "replace"] if method == "yarn" else ["replace"])
    for existing in offered:
        assert not ctxext.describe_context(config, 8, existing=existing).would_do.startswith("refuse: ")


def test_weights_are_shared_not_copied(source: Path, tmp_path: Path) -> None:
    result = extend_folder(source, tmp_path / "out", factor=4)
    assert os.path.samefile(source / "model.safetensors", tmp_path / "out/model.safetensors")
    assert result.copied_bytes == 0
    assert result.linked_bytes == (source / "model.safetensors").stat().st_size


def test_saving_into_an_extended_folder_leaves_the_original_as_it_was(tmp_path: Path) -> None:
    """transformers writes tokenizer.json and generation_config.json in place, so a link would change both folders."""
    source = tmp_path / "source"
    shutil.copytree(MODEL, source)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    extend_folder(source, tmp_path / "out", factor=4)
    model, tokenizer = (auto.from_pretrained(tmp_path / "out") for auto in (AutoModelForCausalLM, AutoTokenizer))
    model.generation_config.max_new_tokens = 7
    tokenizer.add_tokens(["<new>"])
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / "out")
    tokenizer.save_pretrained(tmp_path / "out")
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before


def test_pickles_are_copied_as_torch_writes_them_in_place(source: Path, tmp_path: Path) -> None:
    trained, said = tmp_path / "trained", []
    shutil.copytree(source, trained)
    for name in ("optimizer.pt", "training_args.bin"):
        torch.save(torch.zeros(LARGE_COPY // 8), trained / name)
    before = (trained / "optimizer.pt").read_bytes()
    result = extend_folder(trained, tmp_path / "out", factor=4, say=said.append)
    torch.save({"changed": 1}, tmp_path / "out/optimizer.pt")
    assert (trained / "optimizer.pt").read_bytes() == before
    assert result.copied_bytes > LARGE_COPY
    assert re.fullmatch(r"copying 3 files, 64.0 MiB: only safetensors on the same disk are hard-linked", *said)


def test_checkpoints_of_its_training_are_not_copied(source: Path, tmp_path: Path) -> None:
    trained = tmp_path / "trained"
    shutil.copytree(source, trained)
    for part in ("checkpoint-500", "runs/checkpoint-20", "checkpoint-500-notes"):
        shutil.copytree(source, trained / part)
    extend_folder(trained, tmp_path / "out", factor=4)
    assert [path.name for path in (tmp_path / "out").iterdir() if path.is_dir()] == ["checkpoint-500-notes"]


@pytest.mark.parametrize("state", ["training_args.bin", "optimizer.pt", "rng_state_0.pth", "random_states_0.pt"])
def test_a_training_state_is_not_taken_for_weights(source: Path, tmp_path: Path, state: str) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(source / "config.json", bare)
    (bare / state).touch()
    assert not weights_in(bare)
    with pytest.raises(FileNotFoundError, match="has no weights"):
        load_model(bare)


def test_a_link_to_missing_weights_is_named(source: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(source, cut)
    (cut / "model.safetensors").unlink()
    (cut / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(FileNotFoundError, match=r"model.safetensors is a link to .*elsewhere"):
        extend_folder(cut, tmp_path / "out", factor=4)
    assert not (tmp_path / "out").exists()


def test_pickled_weights_are_read_only_when_asked(source: Path, tmp_path: Path) -> None:
    pickled = tmp_path / "pickled"
    shutil.copytree(source, pickled)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"its weights in pytorch_model.bin, a pickle, .*save_pretrained"):
        load_model(pickled)
    read = load_model(pickled, use_safetensors=False).state_dict()
    torch.testing.assert_close(read, load_model(source).state_dict())


def test_copying_says_how_much(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr("ctxext.hub.checkpoint.LARGE_COPY", 1)
    said: list[str] = []
    result = extend_folder(source, tmp_path / "out", factor=4, say=said.append)
    assert result.copied_bytes == (source / "model.safetensors").stat().st_size
    assert "KiB" in said[0]


def test_links_of_the_hub_cache_are_followed(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    for path in source.iterdir():
        (cache / path.name).symlink_to(path)
    extend_folder(cache, tmp_path / "out", factor=4)
    assert not (tmp_path / "out/model.safetensors").is_symlink()
    assert os.path.samefile(source / "model.safetensors", tmp_path / "out/model.safetensors")


def test_the_config_speaks_both_dialects_and_keeps_other_keys(source: Path, tmp_path: Path) -> None:
    raw = json.loads((source / "config.json").read_text())
    raw["a_key_of_theirs"] = {"kept": True}
    (source / "config.json").write_text(json.dumps(raw))
    extend_folder(source, tmp_path / "out", factor=4)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == config["rope_scaling"]["rope_type"] == "yarn"
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10_000.0
    assert config["max_position_embeddings"] == 256
    assert config["a_key_of_theirs"] == {"kept": True}


def test_a_reloaded_model_is_saved_as_it_was(source: Path, tmp_path: Path) -> None:
    """With the keys of version 4, without which transformers 4 loads plain RoPE."""
    extend_folder(source, tmp_path / "first", factor=4, method="yarn")
    copy.deepcopy(ctxext.load(tmp_path / "first")).save_pretrained(tmp_path / "second")
    first, second = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("first", "second"))
    assert {"rope_scaling", "rope_theta"} <= first.keys()
    assert {**second, "dtype": None} == {**first, "dtype": None}


def test_a_reloaded_model_saves_the_adapter_that_was_added_to_it(source: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    extend_folder(source, tmp_path / "extended", factor=4, method="yarn")
    model = ctxext.load(tmp_path / "extended")
    model.add_adapter(peft.LoraConfig(target_modules="all-linear", r=4))
    model.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()


def test_the_tokenizer_allows_the_new_length(source: Path, tmp_path: Path) -> None:
    extend_folder(source, tmp_path / "out", factor=4)
    assert json.loads((tmp_path / "out/tokenizer_config.json").read_text()) == {"model_max_length": 256, "kept": 1}
    assert json.loads((source / "tokenizer_config.json").read_text())["model_max_length"] == 64


def test_an_old_scaling_does_not_outlive_a_new_method(tmp_path: Path) -> None:
    """A stale version-4 `rope_scaling` would win over the new theta."""
    tiny_model("llama").save_pretrained(tmp_path / "a")
    extend_folder(tmp_path / "a", tmp_path / "b", factor=4, method="yarn")
    extend_folder(tmp_path / "b", tmp_path / "c", factor=2, method="ntk", existing="replace")
    config = AutoConfig.from_pretrained(tmp_path / "c")
    assert config.rope_parameters["rope_type"] == "default"
    expected = ctxext.extend_config(tiny_config("llama"), 2, "ntk")
    assert config.rope_parameters == expected.rope_parameters
    ids = token_ids(100)
    assert torch.equal(logits(from_config(config), ids), logits(from_config(expected), ids))


@pytest.mark.parametrize("method", ["dynamic_yarn", "self_extend"])
def test_a_late_method_leaves_the_config_and_comes_back_by_load(method: str, source: Path, tmp_path: Path) -> None:
    result = extend_folder(source, tmp_path / "out", factor=4, method=method)
    beside = {"context_extension": result.plan.summary}
    assert result.config == json.loads((source / "config.json").read_text()) | beside
    assert json.loads((tmp_path / "out/config.json").read_text()) == result.config
    assert json.loads((tmp_path / "out/tokenizer_config.json").read_text())["model_max_length"] == 256
    live, ids = ctxext.extend_context(ctxext.load(source), 4, method), token_ids(150)
    loaded = ctxext.load(tmp_path / "out")
    assert torch.equal(logits(loaded, ids), logits(live, ids))
    assert not torch.equal(logits(loaded, ids), logits(ctxext.load(source), ids))
    assert loaded.context_extension.plan.summary == live.context_extension.plan.summary


def test_a_pinned_method_is_a_plain_checkpoint(source: Path, tmp_path: Path) -> None:
    extend_folder(source, tmp_path / "out", factor=4, method="dynamic_yarn", length=128)
    assert not (tmp_path / "out" / RECORD).exists()
    assert AutoConfig.from_pretrained(tmp_path / "out").rope_parameters["rope_type"] == "yarn"


def test_a_late_extension_is_not_extended_again_and_does_not_outlive_another(source: Path, tmp_path: Path) -> None:
    extend_folder(source, tmp_path / "late", method="dca", factor=4, original_max_position_embeddings=32)
    for method in ("yarn", "self_extend"):
        with pytest.raises(ValueError, match=r"already extended by dca .*existing='replace'"):
            extend_folder(tmp_path / "late", tmp_path / "out", 4, method)
    again = extend_folder(tmp_path / "late", tmp_path / "out", 4, "yarn", existing="replace")
    assert not (tmp_path / "out" / RECORD).exists()
    assert again.plan.summary == "yarn ×4: 32 → 128 tokens"  # from the length that was known better
    assert ctxext.load(tmp_path / "out").config.rope_parameters["rope_type"] == "yarn"


@pytest.mark.filterwarnings("ignore:.*saved without it")
@pytest.mark.parametrize("method", ["yarn", "dynamic_yarn"])
def test_a_probe_does_not_follow_into_another_extension(method: str, source: Path, tmp_path: Path) -> None:
    (source / PROBE).write_text("{}")
    extend_folder(source, tmp_path / "out", 4, method)
    assert not (tmp_path / "out" / PROBE).exists()
    ctxext.extend_context(ctxext.load(source), 4, method).save_pretrained(source)
    assert not (source / PROBE).exists()


def test_a_dry_run_writes_nothing(source: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    result = extend_folder(source, None, target_length=256)
    assert result.config["max_position_embeddings"] == 256
    assert extend_folder(source, None, target_length=256, method="dca").plan.in_attention
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"factor": 0.5}, ValueError, "factor must be >= 1"),
        ({"factor": 4, "method": "yarm"}, ValueError, "did you mean 'yarn'"),
        ({"target_length": 64}, ValueError, "already covers 64"),
    ],
)
def test_errors_leave_no_files(source: Path, tmp_path: Path, arguments: dict, error: type, words: str) -> None:
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(error, match=words):
        extend_folder(source, tmp_path / "out", **arguments)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("size", [4, 1000, -1])
def test_cut_weights_are_refused_before_anything_is_written(source: Path, tmp_path: Path, size: int) -> None:
    weights = source / "model.safetensors"
    os.truncate(weights, size % weights.stat().st_size)
    with pytest.raises(ValueError, match=r"model\.safetensors is not a complete safetensors file .* Download it again"):
        extend_folder(source, tmp_path / "out", factor=4)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "source", max_shard_size="50KB")
    extend_folder(tmp_path / "source", tmp_path / "whole", factor=4)
    shard = sorted((tmp_path / "source").glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=f"lacks {shard.name}, which model.safetensors.index.json names"):
        extend_folder(tmp_path / "source", tmp_path / "out", factor=4)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("frobnicator", "does not know model_type 'frobnicator'. Upgrade transformers, or"), (None, "has no model_type")],
)
def test_a_model_type_that_transformers_does_not_know_is_named(source: Path, kind: str | None, words: str) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": kind} if kind else
                                                   {k: v for k, v in config.items() if k != "model_type"}))  # fmt: skip
    with pytest.raises(ValueError, match=words):
        extend_folder(source, None, factor=4)


def test_a_file_is_no_folder_and_the_right_command_is_named(source: Path) -> None:
    with pytest.raises(ValueError, match=r"is a file. Pass the checkpoint's folder: .*source$"):
        checkpoint_folder(str(source / "model.safetensors"))
    (source / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"is a GGUF file, .* ctxext export \S*m\.gguf --engine llama\.cpp"):
        checkpoint_folder(str(source / "m.gguf"))


def test_a_failure_half_way_leaves_no_folder(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctxext.hub.checkpoint._write_tokenizer_config", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        extend_folder(source, tmp_path / "out", factor=4)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_copy_inside_its_original_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    before = sorted(source.rglob("*"))
    for output in (source / "x4", source / "a/b", tmp_path / "link/x4", source / "../source/x4"):
        with pytest.raises(ValueError, match=r"is inside .*Choose a folder outside"):
            extend_folder(source, output, factor=4)
    assert sorted(source.rglob("*")) == before


def test_an_existing_folder_is_not_overwritten(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="already exists"):
        extend_folder(source, tmp_path / "out", factor=4)


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neither a folder nor a hub name"):
        checkpoint_folder("nowhere")
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        checkpoint_folder(str(tmp_path))
    with pytest.raises(ValueError, match="revision"):
        checkpoint_folder(str(tmp_path), "main")


@pytest.mark.parametrize("changes", [{"max_position_embeddings": None}, {"rope_scaling": {"type": "su"}}])
def test_a_config_that_transformers_refuses_is_named(source: Path, tmp_path: Path, changes: dict[str, object]) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    kind = {"model_type": "phi3"} if "rope_scaling" in changes else {}
    (folder / "config.json").write_text(json.dumps({**config, **kind, **changes}))
    with pytest.raises(ValueError, match=r"transformers rejects .*broken/config\.json"):
        extend_folder(folder, None, factor=4)
    (folder / "config.json").write_text(json.dumps(config)[:200])
    with pytest.raises(ValueError, match=r"broken/config\.json is not valid JSON"):
        extend_folder(folder, None, factor=4)


def test_a_file_is_no_checkpoint(source: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json is a file. Pass the checkpoint's folder: "):
        checkpoint_folder(str(source / "config.json"))
    with pytest.raises(FileNotFoundError, match=r"^none\.gguf does not exist"):
        checkpoint_folder("none.gguf")


def test_a_folder_without_weights_is_named(source: Path, tmp_path: Path) -> None:
    shutil.copy(source / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no weights \(model\.safetensors\)"):
        ctxext.load(tmp_path)


def test_a_place_where_nothing_can_be_written_is_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file/out cannot be written"):
        extend_folder(source, tmp_path / "file/out", factor=4)


@pytest.mark.parametrize("length", ["null", '"64"'])
def test_a_tokenizer_without_a_length_gets_one(source: Path, tmp_path: Path, length: str) -> None:
    (source / "tokenizer_config.json").write_text(f'{{"model_max_length": {length}}}')
    extend_folder(source, tmp_path / "out", factor=4)
    assert json.loads((tmp_path / "out/tokenizer_config.json").read_text())["model_max_length"] == 256


# Plain transformers in a process that never imports ctxext.
RESAVE = """
import sys
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])
assert "ctxext" not in sys.modules
"""


@pytest.mark.filterwarnings("ignore:.*saved without it")
def test_a_saved_dynamic_method_is_frozen_as_its_error_says(source: Path, tmp_path: Path) -> None:
    folder, frozen = tmp_path / "extended", tmp_path / "frozen"
    model = ctxext.extend_context(ctxext.load(source), 4, "dynamic_yarn")
    model.save_pretrained(folder)
    advice = r"or existing='replace'; with method='dynamic_yarn', factor=4 and length= as well"
    with pytest.raises(ValueError, match=advice):
        extend_folder(folder, frozen, length=128, say=lambda line: None)
    extend_folder(folder, frozen, 4, "dynamic_yarn", existing="replace", length=128, say=lambda line: None)
    model.save_pretrained(tmp_path / "by the model", length=128)
    ids = token_ids(120)
    assert torch.equal(logits(load_model(frozen), ids), logits(load_model(tmp_path / "by the model"), ids))


@pytest.mark.filterwarnings("ignore:.*saved without it")
@pytest.mark.parametrize(
    "how", ["restored", "the same weights", "other weights", "other weights under the same config"]
)
def test_metadata_of_a_model_that_was_replaced_is_refused(how: str, source: Path, tmp_path: Path) -> None:
    """What is in a folder is the model that was saved there last, or nothing."""
    folder, ids = tmp_path / "extended", token_ids(150)
    model = ctxext.extend_context(ctxext.load(source), 4, "dynamic_yarn")
    model.save_pretrained(folder)
    assert torch.equal(logits(ctxext.load(folder), ids), logits(model, ids))
    if how == "restored":
        ctxext.restore_context(model).save_pretrained(folder)
    elif how == "the same weights":
        subprocess.run([sys.executable, "-c", RESAVE, source, folder], check=True, capture_output=True)
    else:
        plain = folder if "same config" in how else source
        other = AutoModelForCausalLM.from_pretrained(plain)
        with torch.no_grad():
            other.model.layers[1].mlp.up_proj.weight.mul_(1.01)
        other.save_pretrained(folder)
    with pytest.raises(ValueError, match=rf"{RECORD}.* another model has been saved there since.* [Dd]elete {RECORD}"):
        ctxext.load(folder)
    with pytest.raises(ValueError, match="another model has been saved there"):
        load(folder)


@pytest.mark.filterwarnings("ignore:.*saved without it")
@pytest.mark.parametrize("change", ["dtype", "shards"])
def test_metadata_is_good_for_the_model_cast_and_sharded(change: str, source: Path, tmp_path: Path) -> None:
    model, ids = ctxext.extend_context(ctxext.load(source), 4, "dynamic_yarn"), token_ids(150)
    if change == "dtype":
        model.to(torch.bfloat16)
    model.save_pretrained(tmp_path / "out", **({"max_shard_size": "20KB"} if change == "shards" else {}))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1 or change == "dtype"
    assert torch.equal(logits(ctxext.load(tmp_path / "out", dtype=model.dtype), ids), logits(model, ids))
    assert ctxext.load(tmp_path / "out", dtype=torch.float16).context_extension is not None
    shutil.copy(next((tmp_path / "out").glob("*.safetensors")), tmp_path / "out/consolidated.safetensors")
    assert torch.equal(logits(ctxext.load(tmp_path / "out", dtype=model.dtype), ids), logits(model, ids))


@pytest.mark.filterwarnings("ignore:.*saved without it")
def test_metadata_belongs_to_the_config_beside_it(source: Path, tmp_path: Path) -> None:
    extend_folder(source, tmp_path / "out", 4, "dynamic_yarn")
    config = json.loads((tmp_path / "out/config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 20_000.0
    config.pop("rope_theta", None)
    (tmp_path / "out/config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"belongs to a model with rope_parameters .*10000.*20000"):
        ctxext.load(tmp_path / "out")


def test_metadata_that_was_left_behind_is_asked_for(source: Path, tmp_path: Path) -> None:
    extend_folder(source, tmp_path / "out", 4, "dynamic_yarn")
    (tmp_path / "out" / RECORD).unlink()
    with pytest.raises(ValueError, match=rf"extended by {RECORD}, which is missing"):
        ctxext.load(tmp_path / "out")


@pytest.mark.filterwarnings("ignore:.*saved without it")
@pytest.mark.parametrize("method", ["self_extend", "dynamic_yarn"])
def test_a_config_saved_by_itself_says_what_is_missing(method: str, source: Path, tmp_path: Path) -> None:
    """`config.save_pretrained` writes the target as the maximum length; the model would run unextended up to it."""
    shutil.copytree(source, tmp_path / "out")
    model = ctxext.load(source)
    stock = model.config.to_dict()
    ctxext.extend_context(model, 4, method).config.save_pretrained(tmp_path / "out")
    with pytest.raises(ValueError, match=rf"extended by {RECORD}, which is missing.*config.save_pretrained does not"):
        ctxext.load(tmp_path / "out")
    model.save_pretrained(tmp_path / "whole")
    assert ctxext.load(tmp_path / "whole").context_extension.method == model.context_extension.method
    assert ctxext.restore_context(model).config.to_dict() == stock


def test_what_ctxext_load_would_refuse_is_not_written(source: Path, tmp_path: Path) -> None:
    pickled = tmp_path / "pickled"
    shutil.copytree(source, pickled)
    (pickled / "model.safetensors").unlink()
    torch.save(ctxext.load(source).state_dict(), pickled / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pickled weights.* needs ctxext\.load.* call save_pretrained"):
        extend_folder(pickled, tmp_path / "out", 4, "dynamic_yarn")
    assert not (tmp_path / "out").exists()
    extend_folder(pickled, tmp_path / "out", 4, "yarn")  # which plain transformers loads
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.max_position_embeddings == 256


def test_the_adapter_of_an_unfinished_run_is_not_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="run holds no adapter: that run is not finished"):
        checkpoint_folder("run/adapter")
    (tmp_path / "run/adapter").mkdir()  # it is finished, and the name is mistyped
    with pytest.raises(FileNotFoundError, match=r"Did you mean 'run/adapter'\?"):
        checkpoint_folder("run/adaptor")
