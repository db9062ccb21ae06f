"""The command line as a person meets it."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from families import tiny_model
from typer.main import get_command

import ctxext as package
from ctxext import YaRN
from ctxext.assets import MODEL
from ctxext.cli import app, commands
from ctxext.cli.common import in_flags, in_settings, parse_options, parse_tokens
from ctxext.extension.method_file import SavedMethod


def ctxext(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ctxext", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model("llama").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("text", "tokens"), [("131072", 131072), ("128k", 131072), ("1M", 1048576), ("1_000", 1000)])
def test_lengths_are_read_as_people_write_them(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["banana", "0", "-4k", "1.0001k", ""])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="128k"):
        parse_tokens(text)


def test_options_are_json_or_words() -> None:
    assert parse_options(["beta_fast=16", "truncate=false", "ramp=rotations", "long_factor=[1, 2]"]) == {
        "beta_fast": 16,
        "truncate": False,
        "ramp": "rotations",
        "long_factor": [1, 2],
    }
    assert parse_options(["truncate=False"]) == {"truncate": False}
    with pytest.raises(typer.BadParameter, match="NAME=VALUE"):
        parse_options(["beta_fast"])
    with pytest.raises(typer.BadParameter, match="beta_fast is set twice"):
        parse_options(["beta_fast=1", "beta_fast=2"])


@pytest.mark.parametrize("name", ["model", "existing", "factor", "say"])
def test_arguments_are_no_options(name: str) -> None:
    with pytest.raises(typer.BadParameter, match=f"{name} is not a method option"):
        parse_options([f"{name}=1"])


@pytest.mark.slow
def test_extend_writes_what_it_says(checkpoint: Path, tmp_path: Path) -> None:
    run = ctxext("extend", checkpoint, "--target-length", "256", "--option", "beta_fast=16", "-o", tmp_path / "out")
    assert run.returncode == 0, run.stderr
    assert "yarn ×4: 64 → 256 tokens" in run.stderr
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["rope_parameters"]["beta_fast"] == 16


@pytest.mark.slow
def test_a_dry_run_prints_json_alone(checkpoint: Path) -> None:
    run = ctxext("extend", checkpoint, "--factor", "2", "--dry-run")
    assert json.loads(run.stdout)["max_position_embeddings"] == 128


@pytest.mark.slow
def test_describe_reads_the_config_alone(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    run = ctxext("describe", tmp_path, "--target-length", "1k")
    assert run.returncode == 0, run.stderr
    assert "yarn ×16: 64 → 1,024 tokens" in run.stdout


@pytest.mark.slow
def test_describe_draws_the_turns_of_each_pair(checkpoint: Path, tmp_path: Path) -> None:
    figure = tmp_path / "pairs.svg"
    run = ctxext("describe", checkpoint, "--factor", "2", "--method", "ntk", "--plot", "--figure", figure)
    assert run.returncode == 0, run.stderr
    assert "fastest first: ○ within 64 tokens" in run.stdout
    assert "with it, 4 still do" in run.stdout
    assert "at angles that are new" in figure.read_text()
    assert ctxext("extend", checkpoint, "--factor", "2", "-o", tmp_path / "out").returncode == 0
    run = ctxext("describe", tmp_path / "out", "--plot")
    assert run.returncode == 0, run.stderr
    assert "fastest first: ○ within 64 tokens" in run.stdout
    for method in ("dynamic_yarn", "self_extend"):  # which are not in config.json
        assert ctxext("extend", checkpoint, "--method", method, "-o", tmp_path / method).returncode == 0
        saved = ctxext("describe", tmp_path / method, "--plot", "--figure", tmp_path / f"{method}.svg")
        planned = ctxext("describe", checkpoint, "--method", method, "--plot")
        assert saved.returncode == planned.returncode == 0
        assert saved.stdout.splitlines()[-8:] == planned.stdout.splitlines()[-8:]
    assert "effective distance in tokens" in saved.stdout
    assert "with group_size 9, window 16" in " ".join(planned.stdout.split())
    assert "effective distance (tokens)" in (tmp_path / "self_extend.svg").read_text()


@pytest.mark.slow
def test_a_method_of_ones_own_works_on_the_command_line(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom ctxext import PI, Paper, register\n"
        "@register('mine')\n@dataclass(frozen=True, kw_only=True)\nclass Mine(PI):\n    '''λ_i = factor.'''\n"
    )
    run = ctxext("--import", "mine", "extend", checkpoint, "--method", "mine", "-o", "out", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "mine ×4" in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["extend", "nowhere", "--dry-run"], "neither a folder"),
        (["extend", "CHECKPOINT", "--factor", "0.5", "--dry-run"], "error: --factor must be >= 1, got 0.5"),
        (["describe", "CHECKPOINT", "--figure", "p.doc"], "error: --figure must end in .png or .svg, got p.doc"),
        (
            ["extend", "CHECKPOINT", "--existing", "keep", "--dry-run"],
            "error: --existing keep needs a model",
        ),
        (
            ["extend", "CHECKPOINT", "--length", "128", "--dry-run"],
            "--length 128 applies to dynamic methods only, and yarn does not depend on the length. Drop --length",
        ),
        (["extend", "CHECKPOINT", "--method", "yarm", "--dry-run"], "did you mean 'yarn'"),
        (["extend", "CHECKPOINT", "--option", "beta_fats=1", "--dry-run"], "did you mean 'beta_fast'"),
        (["extend", "CHECKPOINT", "--option", "truncate=no", "--dry-run"], "must be true or false, got 'no'"),
        (
            ["extend", "CHECKPOINT", "--option", "beta_fast=abc", "--dry-run"],
            "--option beta_fast must be a finite number, got 'abc'",
        ),
        (["extend", "CHECKPOINT", "--option", "config=1", "--dry-run"], "no option 'config'"),
        (["extend", "CHECKPOINT", "--option", "name=1", "--dry-run"], "no option 'name'"),
        (["compare", "CHECKPOINT", "--best", "best"], "--best must end in .json"),
        (["extend", "CHECKPOINT"], "--dry-run"),
        (["extend", "CHECKPOINT", "--method", "dca", "--length", "128", "--dry-run"], "has no static form"),
        (["extend", "CHECKPOINT", "--method", "longrope", "--dry-run"], "Pass --option long_factor=VALUE"),
        (["extend", "CHECKPOINT", "--method", "p_rope", "--option", "p=1", "--dry-run"], "Pass another --option, or"),
        (["extend", "CHECKPOINT", "--method", "yarm", "--dry-run"], "ctxext --import MODULE"),
        (
            ["extend", "CHECKPOINT", "--method", "dynamic_yarn", "--length", "64", "--dry-run"],
            "error: --length 64 extends nothing: this model already covers 64 tokens. Pass a length from 65 to 256.",
        ),
        (["--import", "no_such_module", "methods"], "error: --import no_such_module: there is no such module"),
    ],
)
def test_a_beginners_mistake_gets_a_remedy_and_no_traceback(checkpoint: Path, arguments: list[str], words: str) -> None:
    run = ctxext(*(str(checkpoint) if argument == "CHECKPOINT" else argument for argument in arguments))
    assert run.returncode != 0
    assert words in " ".join(run.stderr.split())
    assert not re.search(r"Traceback|error: \w+(Error|Exception)\b", run.stderr)


@pytest.mark.slow
def test_a_name_on_the_hub_that_cannot_be_reached_gets_one_line() -> None:
    command = [sys.executable, "-m", "ctxext", "describe", "nobody/nothing"]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert run.returncode == 1
    assert run.stderr == (
        "error: 'nobody/nothing' is not a local folder and could not be downloaded: the hub cannot be reached. "
        "Check the connection (and HF_HUB_OFFLINE), or pass a local folder.\n"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["extend", "m", "--factor", "four"], "--factor must be a number, such as 4, got 'four'."),
        (["eval", "m", "--trials", "1.5"], "--trials must be a whole number, such as 4, got '1.5'."),
        (
            ["extend", "m", "--target-length", "abc"],
            "--target-length: 'abc' is not a number of tokens; write 131072 or",
        ),
        (["extend", "m", "--nope"], "No such option: --nope. See ctxext extend --help."),
        (["extend", "m", "--import", "mine"], "--import goes before the command: ctxext --import MODULE COMMAND."),
        (["extend"], "Missing argument 'MODEL'. See ctxext extend --help."),
        (["nope"], "No such command 'nope'. See ctxext --help."),
        (["extent"], "No such command 'extent'. Did you mean 'extend'? See ctxext --help."),
        (["compare", "m", "--no-fit"], "--no-fit works only with --minutes."),
    ],
)
def test_a_usage_error_is_one_line(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ctxext", *arguments])
    with pytest.raises(SystemExit) as end:
        app()
    assert end.value.code == 2
    written = capsys.readouterr().err
    assert written.startswith(f"error: {said}")
    assert written.count("\n") == 1


def test_the_options_of_a_saved_method_are_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    SavedMethod(YaRN(factor=4)).save(tmp_path / "fitted.json")
    arguments = ["extend", MODEL, "--method", tmp_path / "fitted.json", "--option", "beta_fast=1", "--dry-run"]
    monkeypatch.setattr(sys, "argv", ["ctxext", *map(str, arguments)])
    with pytest.raises(SystemExit):
        app()
    assert "error: --option beta_fast needs the name of a method" in capsys.readouterr().err


def test_a_module_of_ones_own_that_lacks_another_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine_lacking.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ctxext", "--import", "mine_lacking", "methods"])
    with pytest.raises(SystemExit):
        app()
    assert "it needs no_such_module, which is not installed" in capsys.readouterr().err


INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with it ignored
class OnTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, OnTorch())
from ctxext.__main__ import main
main()
"""


def test_an_interrupt_while_torch_is_imported_ends_in_one_line() -> None:
    run = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (130, "interrupted\n")


@pytest.mark.slow
@pytest.mark.parametrize("then", ["pass", "raise ImportError('cut')", "raise ValueError('cut')"])
def test_ctrl_c_that_an_import_swallows_ends_the_command(then: str, tmp_path: Path) -> None:
    (tmp_path / "swallows.py").write_text(
        f"import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    {then}\n"
    )
    start = INTERRUPTED.partition("class")[0] + "from ctxext.__main__ import main\nmain()\n"
    command = [sys.executable, "-c", start, "--import", "swallows", "methods"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (run.returncode, run.stderr) == (130, "interrupted\n")


# ------------------------------------------------------------------------------------ arguments, and flags


def flag_names() -> dict[str, set[str]]:
    """The names that options of commands have in Python, and their flags."""
    found: dict[str, set[str]] = {}
    for command in get_command(commands).commands.values():
        for option in command.params:
            if option.param_type_name == "option" and not option.is_flag:
                found.setdefault(option.name, set()).add(max(option.opts, key=len))
    return found


def messages() -> Iterator[str]:
    """Every sentence of the package outside docstrings, with something instead of its values."""
    for path in Path(package.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in parts | documents:
                continue
            if isinstance(node, ast.JoinedStr):
                yield "".join(
                    part.value if isinstance(part, ast.Constant) else "'keep'" if part.conversion == ord("r") else "16"
                    for part in node.values
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                yield node.value


def test_a_name_is_one_flag_in_all_commands() -> None:
    assert {name: flags for name, flags in flag_names().items() if len(flags) > 1} == {}


def test_every_argument_that_a_message_names_is_a_flag_on_the_command_line() -> None:
    """But not in code, as in `extend_context(model, factor=4)`."""
    names = "|".join(flag_names())
    argument = re.compile(rf"(?<![\w./-])({names})=(?![\w\s]*\))|Call restore_context\(model\), or")
    named = [said for said in messages() if argument.search(said) and "\n" not in said]
    assert len(named) > 30
    assert [said for said in map(in_flags, named) if argument.search(said)] == []


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("Use existing='keep'.", "Use --existing keep."),
        ("Leave existing= out.", "Leave --existing out."),
        ("pass factor=2.5.", "pass --factor 2.5."),
        ("factor must be >= 1", "--factor must be >= 1"),
        ("beta_fast of 'yarn' must be a finite number", "--option beta_fast must be a finite number"),
        ("beta_fast must exceed beta_slow > 0", "--option beta_fast must exceed beta_slow > 0"),
        ("chunk_size must be a number of tokens >= 1", "--option chunk_size must be a number of tokens >= 1"),
        ("long_factor has 2 numbers, but", "--option long_factor has 2 numbers, but"),
        ("method in fitted.json: beta_fast must exceed", "method in fitted.json: beta_fast must exceed"),
        ("Pass original_max_position_embeddings=, or wait", "Pass --original-max-position-embeddings, or wait"),
        ("Load the original model, or call restore_context(model).", "Load the original model."),
        ("YaRN(factor=1.0, beta_fast=32.0) changes nothing", "yarn ×1 changes nothing"),
        ("has Resonance(factor=4.0, base=YaRN(factor=4.0), at=(1, 2)).", "has resonance ×4."),
        ("must be a number of tokens (an int), got 'a'", "must be a number of tokens, got 'a'"),
        ("Pass long_factor=....", "Pass --option long_factor=VALUE, or a --method file that ctxext fit wrote."),
        (
            "Pass long_factor=..., which `ctxext fit` finds.",
            "Pass --option long_factor=VALUE, or a --method file that ctxext fit wrote.",
        ),
        (
            "Pass other options, or a larger factor or length.",
            "Pass another --option, or a larger --factor or --length.",
        ),
        ("dtype must be one of float32, got torch.int8.", "--dtype must be one of float32, got 'int8'."),
        ("Call restore_context(model), or use existing='replace'.", "Use --existing replace."),
        *((said, said) for said in (
            "/runs/factor=4/model is no folder", "factor=4/model is no folder", "runs/factor=4 is no folder",
            "'factor=4' is no folder", "rope_factor=4.", "C:\\runs\\factor=4", "beta_fast=16", "rope_factor=4",
            "original_max_position_embeddings in config.json must be a number",
        )),
    ],
)  # fmt: skip
def test_paths_quotes_and_calls_stay_as_they_are(said: str, shown: str) -> None:
    assert in_flags(said) == shown


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("Drop method= and use existing='compose'.", "Drop extension.method= and use extension.existing=compose."),
        ("pass target_length=8192 or length=", "pass extension.target_length=8192 or extension.options.length="),
        ("data.length=64 is no length; see a/factor=4", "data.length=64 is no length; see a/factor=4"),
    ],
)
def test_a_recipes_errors_name_its_settings(said: str, shown: str) -> None:
    assert in_settings(said) == shown


@pytest.mark.slow
def test_broken_weights_get_a_remedy_and_no_traceback(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "broken")
    weights = tmp_path / "broken/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    run = ctxext("verify", tmp_path / "broken")
    assert run.returncode == 1
    assert "model.safetensors is not a complete safetensors file" in run.stderr
    assert "Download it again" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_extend_promises_no_weights_that_are_not_there(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    shutil.copy(checkpoint / "config.json", tmp_path / "bare")
    run = ctxext("extend", tmp_path / "bare", "-o", tmp_path / "out")
    assert "there were no weights to copy" in " ".join(run.stderr.split())


def test_methods_marks_the_default_of_each_encoding(capsys: pytest.CaptureFixture[str]) -> None:
    from ctxext.core.plan import ENCODINGS

    get_command(commands).commands["methods"].callback()  # type: ignore[attr-defined]
    marked = re.findall(r"^(\w+).* \(default\) ", capsys.readouterr().out, re.M)
    assert marked[0] == "yarn"
    assert len(marked) == len(ENCODINGS)
