"""A light install extends, proves, saves and reloads; what it lacks is named in one line."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from families import tiny_model
from transformers import AutoModelForCausalLM

from ctxext import extend_context
from ctxext.utils.extras import EXTRAS

ROOT = Path(__file__).resolve().parents[2]
# Of Python, a module that is None in sys.modules is not installed.
BARE = f"import sys\nsys.modules.update(dict.fromkeys({sorted({m for names in EXTRAS.values() for m in names})!r}))\n"


def bare(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BARE + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_light_install_extends_saves_and_reloads(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    code = """
import torch, ctxext
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/model")
ctxext.extend_context(model, 4, "yarn").save_pretrained(sys.argv[1] + "/yarn")
assert model.context_extension.proof.consumed
ctxext.restore_context(model)
ctxext.extend_context(model, 4, "self_extend").save_pretrained(sys.argv[1] + "/self_extend")
assert ctxext.load(sys.argv[1] + "/self_extend").context_extension.method.name == "self_extend"
sys.argv[1:] = ["describe", sys.argv[1] + "/yarn"]
from ctxext.__main__ import main
main()
"""
    done = bare(code, tmp_path)
    assert done.returncode == 0, done.stderr
    ids = torch.arange(1, 40)[None]
    model = extend_context(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), 4, "yarn")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "yarn")(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("report RESULTS", "eval"),
        ("serve MODEL", "serve"),
        pytest.param("eval MODEL", "eval", marks=pytest.mark.slow),
        pytest.param("finetune --config tiny_yarn_4x", "train", marks=pytest.mark.slow),
    ],
)
def test_a_missing_extra_is_named_in_one_line(command: str, extra: str, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    arguments = [str(tmp_path) if word.isupper() else word for word in command.split()]
    done = bare("from ctxext.__main__ import main\nsys.argv = ['ctxext', *sys.argv[1:]]\nmain()", *arguments)
    assert done.returncode == 1
    assert done.stderr == f"error: this needs {', '.join(EXTRAS[extra])}: pip install '.[{extra}]' in the clone\n"


def test_every_extra_installs_what_it_is_asked_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {name: " ".join(project["optional-dependencies"][name]) for name in EXTRAS}
    declared["train"] += declared["eval"]
    for extra, modules in EXTRAS.items():
        for module in modules:
            assert module in declared[extra], (extra, module)
