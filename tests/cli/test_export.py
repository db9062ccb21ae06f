"""`ctxext export` as a person meets it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
from click.testing import Result
from families import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from ctxext import LongRoPE, extend_context
from ctxext.assets import MODEL
from ctxext.cli import commands
from ctxext.export.probe import read_probe
from ctxext.export.rules import ENGINES
from ctxext.extension.method_file import PROBE, SavedMethod
from ctxext.hub.checkpoint import extend_folder
from ctxext.models.context import read_context


def export(*arguments: object) -> Result:
    return CliRunner().invoke(commands, ["export", *map(str, arguments)])


@pytest.fixture(scope="module")
def config_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config.json and nothing else."""
    folder = tmp_path_factory.mktemp("config")
    tiny_model("llama").config.save_pretrained(folder)
    return folder


def test_a_config_alone_is_exported_for_every_engine(config_alone: Path) -> None:
    for model in (config_alone, config_alone / "config.json"):
        told = json.loads(export(model, "--factor", 4, "--method", "yarn", "--json").stdout)
        assert tuple(told) == ENGINES
        assert told["vllm"]["config"]["rope_parameters"]["factor"] == 4.0
        assert str(config_alone) in told["vllm"]["flags"]
    assert [path.name for path in config_alone.iterdir()] == ["config.json"]


def test_the_changed_keys_of_a_nested_config_are_printed(tmp_path: Path) -> None:
    AutoConfig.for_model("gemma3").save_pretrained(tmp_path)
    for engine, keys in (("mlx", "rope_scaling"), ("transformers", "rope_parameters")):
        run = export(tmp_path, "--factor", 4, "--method", "yarn", "--engine", engine)
        (line,) = [line for line in run.output.splitlines() if line.startswith('  "text_config": {')]
        assert keys in line
        assert "hidden_size" not in line


def test_a_reason_that_all_engines_share_is_said_once(tmp_path: Path) -> None:
    extend_folder(MODEL, tmp_path / "out", factor=4, method="rerope", say=lambda line: None)
    run = export(tmp_path / "out")
    assert run.exit_code == 1
    said = str(run.exception)
    assert said == (
        "no engine supports this extension: rerope works inside attention, which config.json cannot "
        "express. Use 'yarn' for the same length, or ctxext.load and `ctxext serve`."
    )


def test_output_that_looks_like_a_file_is_refused(config_alone: Path, tmp_path: Path) -> None:
    run = export(config_alone, "--method", "yarn", "--engine", "llama.cpp", "-o", tmp_path / "out.txt")
    assert "Pass a new folder, or OUT.gguf" in str(run.exception)
    assert not any(tmp_path.iterdir())


def test_what_is_written_is_what_is_printed_for_programs(config_alone: Path, tmp_path: Path) -> None:
    run = export(config_alone, "--method", "pi", "--json", "-o", tmp_path / "out")
    told = json.loads(run.stdout)
    assert not {"llama.cpp", "ollama"} & {each.name for each in (tmp_path / "out").iterdir()}  # they read GGUF files
    for engine in told.keys() - {"llama.cpp", "ollama"}:
        assert json.loads((tmp_path / "out" / engine / "config.json").read_text()) == told[engine]["config"]
    assert AutoConfig.from_pretrained(tmp_path / "out/transformers").max_position_embeddings == 256
    assert json.loads((tmp_path / "out/vllm/config.json").read_text())["max_position_embeddings"] == 64


def test_the_command_line_can_be_copied_whatever_the_width(config_alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    screen = export(config_alone, "--engine", "vllm", "--method", "yarn").stdout
    overrides = next(line for line in screen.splitlines() if "--hf-overrides" in line).split("'")[1]
    told = json.loads(export(config_alone, "--engine", "vllm", "--method", "yarn", "--json").stdout)
    assert json.loads(overrides) == json.loads(told["vllm"]["flags"][-1])


def test_one_engine_s_refusal_is_an_error_and_among_all_a_line(config_alone: Path) -> None:
    told = json.loads(export(config_alone, "--method", "dynamic_ntk", "--json").stdout)
    assert {frozenset(each) for each in told.values()} == {frozenset({"refused"})}
    assert "at one length: --method" in told["sglang"]["refused"]
    assert "at one length: --method" in str(
        export(config_alone, "--method", "dynamic_ntk", "--engine", "vllm").exception
    )
    pinned = export(config_alone, "--method", "dynamic_ntk", "--length", 128, "--engine", "vllm")
    assert pinned.exit_code == 0, pinned.exception


def test_a_saved_extension_is_exported(config_alone: Path, tmp_path: Path) -> None:
    factors = (1.0, 1.5, 1.2, 2.0, 3.0, 2.5, 4.0, 4.0)
    SavedMethod(LongRoPE(factor=4, long_factor=factors, short_factor=factors, attention_factor=1.07)).save(
        tmp_path / "fitted.json"
    )
    told = json.loads(export(config_alone, "--method", tmp_path / "fitted.json", "--json").stdout)
    assert told["vllm"]["config"]["rope_parameters"]["long_factor"] == list(factors)
    assert told["vllm"]["config"]["rope_parameters"]["long_mscale"] == 1.07


def test_an_extended_folder_needs_no_method(tmp_path: Path) -> None:
    extend_context(tiny_model("llama"), 4, "yarn").save_pretrained(tmp_path / "static")
    assert "the unchanged checkpoint" in export(tmp_path / "static", "--engine", "transformers").stdout
    assert "the unchanged checkpoint" in export(tmp_path / "static", "--engine", "transformers-v4").stdout
    late = extend_context(tiny_model("llama"), 4, "dca", original_max_position_embeddings=32)
    with pytest.warns(UserWarning, match="saved without it"):
        late.save_pretrained(tmp_path / "late")
    assert "ctxext.load" in str(export(tmp_path / "late", "--engine", "transformers").exception)


def test_a_path_with_brackets_is_shown_whole(config_alone: Path, tmp_path: Path) -> None:
    """Not read as markup, as `[bold]` would be."""
    output = tmp_path / "out[bold]"
    assert (
        f"wrote a config.json for transformers, transformers-v4, vllm, sglang, mlx, exllamav3, lmdeploy, "
        f"onnxruntime-genai, openvino to "
        f"{output}\n" in export(config_alone, "--method", "yarn", "-o", output).stderr
    )


@pytest.mark.parametrize("with_config", [False, True])
def test_an_adapter_is_to_be_merged_first(with_config: bool, tmp_path: Path) -> None:
    peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens", "norm"]).save_pretrained(tmp_path)
    if with_config:
        tiny_model("llama").config.save_pretrained(tmp_path)
    for engine in ("all", "vllm"):
        said = str(export(tmp_path, "--engine", engine, "--method", "yarn").exception)
        assert f"ctxext merge {tmp_path} -o MERGED" in said
        assert "is an adapter with modules_to_save, which vLLM rejects. Merge it first: ctxext merge " in said


@pytest.mark.slow
def test_a_gguf_file_comes_from_a_folder_and_from_another_gguf_file(tmp_path: Path) -> None:
    from ctxext.export.gguf import context_of_gguf, write_gguf

    tmp_path = tmp_path / "new"
    how = ("--engine", "llama.cpp", "--factor", 4, "--method", "yarn", "-o")
    assert export(MODEL / "config.json", *how, tmp_path / "a.gguf").exit_code == 0
    write_gguf(MODEL, tmp_path / "plain.gguf")
    run = export(tmp_path / "plain.gguf", *how, tmp_path / "b.gguf")
    assert f"llama-server -m {tmp_path / 'b.gguf'} \\\n    --ctx-size 2048\n" in run.stdout
    reached = [context_of_gguf(tmp_path / f"{name}.gguf").max_position_embeddings for name in ("plain", "a", "b")]
    assert reached == [512, 2048, 2048]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "a.verify.json", "b.gguf", "plain.gguf"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["CONFIG"], "this config is not extended"),
        (["CONFIG", "--engine", "llama.cpp", "-o", "out.gguf"], "this config is not extended"),
        (["bundled", "--engine", "llama.cpp", "-o", "out.gguf"], "this config is not extended"),
        (["CONFIG", "--method", "yarn", "--engine", "vlm"], "did you mean 'vllm'"),
        (["CONFIG", "--method", "yarm"], "did you mean 'yarn'"),
        (["CONFIG", "--method", "yarn", "-o", "CONFIG"], "exists already"),
        (["CONFIG", "--method", "yarn", "--engine", "llama.cpp", "-o", "new"], "llama.cpp reads a GGUF file"),
        (["CONFIG", "--method", "yarn", "--engine", "ollama", "-o", "new"], "ollama reads a GGUF file"),
        (["nowhere", "--method", "yarn"], "neither a folder"),
        (["model.gguf", "--method", "yarn"], "Use --engine llama.cpp"),
        (["model.gguf", "--method", "yarn", "--engine", "llama.cpp"], "Use -o OUT.gguf"),
        (["CONFIG", "--method", "yarn", "-o", "out.gguf"], "Use --engine llama.cpp"),
        (["CONFIG", "--engine", "llama.cpp", "-o", "/proc/out.gguf"], "/proc/out.gguf cannot be written in /proc"),
        (["CONFIG", "--method", "yarn", "--dtype", "Q8_0"], "--dtype Q8_0 applies only to GGUF output"),
        (["CONFIG", "--engine", "llama.cpp", "-o", "out.gguf", "--json"], "--json prints configs"),
        (
            ["model.gguf", "--engine", "llama.cpp", "-o", "out.gguf", "--dtype", "F16"],
            "--dtype is for a GGUF file made from a folder",
        ),
        (
            ["model.gguf", "--engine", "llama.cpp", "-o", "out.gguf", "--probe"],
            "--probe is for a GGUF file made from a folder",
        ),
        (["CONFIG", "--method", "self_extend", "-o", "out"], "no engine supports this extension"),
    ],
)
def test_a_beginners_mistake_gets_a_remedy(config_alone: Path, arguments: list[str], words: str) -> None:
    run = export(*(config_alone if argument == "CONFIG" else argument for argument in arguments))
    assert run.exit_code != 0
    assert isinstance(run.exception, (ValueError, OSError))
    assert words in str(run.exception)


def test_a_probe_is_written_as_long_as_asked_after_its_time_is_said(tmp_path: Path) -> None:
    how = ("--engine", "llama.cpp", "--factor", 4, "--method", "yarn", "-o")
    run = export("bundled", *how, tmp_path / "long.gguf")
    assert "writing long.verify.json: reads texts of up to 2,048 tokens, up to " in run.stderr
    assert max(read_probe(tmp_path / "long.verify.json").far) == 2048
    run = export("bundled", "--far", 0, *how, tmp_path / "short.gguf")
    assert "writing short.verify.json, of short texts" in run.stderr
    assert not read_probe(tmp_path / "short.verify.json").far


def test_ctrl_c_during_a_probe_says_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ctxext.export.probe.make_probe", pressed)
    run = export("bundled", "--engine", "llama.cpp", "--factor", 4, "--method", "yarn", "-o", tmp_path / "out.gguf")
    assert run.exit_code == 130
    assert f"{tmp_path / 'out.gguf'} is written, but not out.verify.json" in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


def test_a_folder_may_have_a_dot_and_a_file_capitals(config_alone: Path, tmp_path: Path) -> None:
    assert export(config_alone, "--method", "yarn", "-o", tmp_path / "my.model").exit_code == 0
    assert (tmp_path / "my.model/vllm/config.json").is_file()
    assert "looks like a file" in str(export(config_alone, "--method", "yarn", "-o", tmp_path / "A.JSON").exception)
    how = ("--engine", "llama.cpp", "--factor", 4, "--method", "yarn", "--no-probe", "-o")
    assert export(MODEL, *how, tmp_path / "Y.GGUF").exit_code == 0
    with (tmp_path / "Y.GGUF").open("rb") as file:
        assert file.read(4) == b"GGUF"


def test_what_is_there_is_named_before_any_work(config_alone: Path, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_text("mine")
    (tmp_path / "a.verify.json").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "link.gguf").symlink_to(tmp_path / "nowhere")
    to_gguf = ("--engine", "llama.cpp", "--factor", 4, "--method", "yarn")
    for arguments, path in (
        ((MODEL, *to_gguf), tmp_path / "a.gguf"),
        ((MODEL, *to_gguf, "--no-probe"), tmp_path / "a.gguf"),
        ((MODEL, *to_gguf), tmp_path / "link.gguf"),
        ((config_alone, "--method", "yarn"), tmp_path / "link"),
    ):
        run = export(*arguments, "-o", path)
        assert str(run.exception).startswith(f"{path} exists already.")
        assert run.output == ""


def test_a_checkpoint_is_not_exported_into_itself(config_alone: Path) -> None:
    for model in (config_alone, config_alone / "config.json"):
        said = str(export(model, "--method", "yarn", "-o", config_alone / "sub" / "out").exception)
        assert f"is inside the checkpoint's own folder. Choose one outside {config_alone}." in said
    assert [path.name for path in config_alone.iterdir()] == ["config.json"]


def test_what_no_engine_takes_writes_nothing(config_alone: Path, tmp_path: Path) -> None:
    assert export(config_alone, "--method", "dynamic_ntk", "-o", tmp_path / "out").exit_code == 1
    told = export(config_alone, "--method", "dynamic_ntk", "-o", tmp_path / "out", "--json")
    assert told.exit_code == 1
    assert json.loads(told.stdout)["vllm"].keys() == {"refused"}
    assert list(tmp_path.iterdir()) == []
    said = export(config_alone, "--method", "resonance", "--original-max-position-embeddings", 32, "-o",
                  tmp_path / "out").stderr  # fmt: skip
    for engine in ENGINES:
        assert (engine in said) == (tmp_path / "out" / engine).is_dir()


def test_an_export_stands_whatever_becomes_of_its_probe(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    (model / "model.safetensors").write_bytes(b"cut off")
    run = export(model, "--method", "yarn", "--engine", "vllm", "-o", tmp_path / "out")
    assert run.exit_code == 0
    assert "could not write verify.json for ctxext verify" in run.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["vllm"]


def test_ollama_gets_a_modelfile_beside_the_file(tmp_path: Path) -> None:
    how = ("--engine", "ollama", "--factor", 4, "--method", "yarn", "--no-probe", "-o", tmp_path / "a.gguf")
    run = export(MODEL, *how)
    assert (tmp_path / "a.Modelfile").read_text() == "FROM ./a.gguf\nPARAMETER num_ctx 2048\n"
    assert f"ollama create a -f {tmp_path / 'a.Modelfile'}\n" in run.stdout
    (tmp_path / "a.gguf").unlink()
    assert isinstance(export(MODEL, *how).exception, FileExistsError)
    refused = export(MODEL, "--engine", "ollama", "--method", "yarn", "-o", tmp_path / "folder").exception
    assert "Use -o OUT.gguf" in str(refused)
    assert [path.name for path in tmp_path.iterdir()] == ["a.Modelfile"]


def test_a_probe_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a.verify.json").write_text("mine")
    how = ("--engine", "llama.cpp", "--factor", 4, "--method", "yarn", "-o", tmp_path / "a.gguf")
    assert isinstance(export(MODEL, *how).exception, FileExistsError)
    assert [path.name for path in tmp_path.iterdir()] == ["a.verify.json"]
    assert export(MODEL, *how, "--no-probe").exit_code == 0
    assert (tmp_path / "a.verify.json").read_text() == "mine"


def test_an_export_holds_what_verify_compares_with(config_alone: Path, tmp_path: Path) -> None:
    asked = ("--method", "yarn", "--engine", "transformers", "-o")
    assert export(MODEL, *asked, tmp_path / "out").exit_code == 0
    assert len(read_probe(tmp_path / "out" / PROBE).input_ids) < 200
    export(MODEL, *asked, tmp_path / "without", "--no-probe")
    assert not (tmp_path / "without" / PROBE).exists()
    said = export(config_alone, *asked, tmp_path / "alone").stderr
    assert "no safetensors weights" in said
    assert (tmp_path / "alone/transformers/config.json").exists()


def test_a_folder_is_ready_to_serve(tmp_path: Path) -> None:
    """Its config is the export, its weights are linked, and the command line needs no override."""
    output = tmp_path / "out"
    run = export(MODEL, "--method", "ntk_by_parts", "--factor", 4, "--no-probe", "-o", output)
    assert "wrote the checkpoint with its config.json for transformers," in run.stderr
    assert "--hf-overrides" not in run.stdout
    assert f"vllm serve {output / 'vllm'}" in run.stdout.replace(" \\\n   ", "")
    assert f"mlx_lm.server --model {output / 'mlx'}" in run.stdout.replace(" \\\n   ", "")
    for engine in ("transformers", "vllm", "sglang", "mlx"):
        folder = output / engine
        assert (folder / "model.safetensors").samefile(MODEL / "model.safetensors")
        assert json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"] == 2048
        assert (folder / "tokenizer.json").is_file()
    told = json.loads(export(MODEL, "--method", "ntk_by_parts", "--factor", 4, "--json").stdout)
    assert json.loads((output / "vllm/config.json").read_text()) == told["vllm"]["config"]
    model = AutoModelForCausalLM.from_pretrained(output / "transformers")
    assert read_context(model.config).summary == "ntk_by_parts ×4: 512 → 2,048 tokens"
    again = export(MODEL, "--method", "yarn", "--factor", 4, "-o", output)
    assert isinstance(again.exception, FileExistsError)
