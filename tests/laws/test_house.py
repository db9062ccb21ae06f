"""The house rules: imports point one way, documents say what is true, importing changes nothing."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import nbformat
import pytest
import run_notebooks
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ctxext
from ctxext.methods import list_methods

ROOT = Path(__file__).resolve().parents[2]
# In the order of the table: each room may import from those before it.
ROWS = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/architecture.md").read_text(encoding="utf-8"), re.M)
ROOMS = [room for row in ROWS for room in re.findall(r"`(\w+)`", row)]


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "ctxext"


def test_imports_point_one_way() -> None:
    for path in (ROOT / "ctxext").rglob("*.py"):
        here = path.relative_to(ROOT / "ctxext").parts[0].removesuffix(".py")
        if here in ("__init__", "__main__", "assets"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            if names == ["ctxext"]:  # a room by its name, or what the package hands on
                names = [f"ctxext.{alias.name}" for alias in node.names if alias.name in ROOMS]
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name.startswith("ctxext."):
                    there = room_of(name)
                    assert ROOMS.index(there) <= ROOMS.index(here), f"{path} imports {name}"


def test_no_module_leads_back_to_itself() -> None:
    """Imports within functions and for types alone count too."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / "ctxext").rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items() if name != "ctxext.__init__"}
    graph = {name: imported(path, modules) - {name} for name, path in modules.items()}
    try:
        order = [*TopologicalSorter(graph).static_order()]
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
    assert len(order) == len(modules) > 100


def imported(path: Path, modules: Collection[str]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {node.module for alias in node.names if f"{node.module}.{alias.name}" not in modules}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name in modules}


def test_recipes_and_benchmarks_are_written_against_the_library() -> None:
    for path in [path for folder in ("recipes", "benchmarks", "docs") for path in (ROOT / folder).glob("*.py")]:
        assert not re.search(r"^\s*(import|from) ctxext\.cli|from ctxext import cli", path.read_text(), re.M), path
    assert len((ROOT / "recipes/finetune.py").read_text().splitlines()) <= 300


def test_pure_maths_knows_no_transformers() -> None:
    for path in [path for room in ("encodings", "methods") for path in (ROOT / "ctxext" / room).glob("*.py")]:
        assert not re.search(r"^\s*(import|from) transformers", path.read_text(), re.M), path


def test_importing_ctxext_leaves_transformers_alone() -> None:
    code = (
        "import transformers.modeling_rope_utils as r, transformers.models.llama.modeling_llama as m\n"
        "before = {**vars(r)}, {**vars(m)}, {**vars(m.LlamaRotaryEmbedding)}\n"
        "import ctxext, ctxext.patches.rotary\n"
        "assert before == ({**vars(r)}, {**vars(m)}, {**vars(m.LlamaRotaryEmbedding)})\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_ctxext_imports_only_what_is_asked_for() -> None:
    code = (
        "import sys, ctxext; assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "ctxext.extend_context, ctxext.YaRN\n"
        "assert not {'transformers', 'peft', 'datasets', 'matplotlib'} & set(sys.modules)\n"
        "assert all(hasattr(ctxext, name) for name in ctxext.__all__) and not hasattr(ctxext, 'nothing')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_method_has_a_paper_and_a_docstring() -> None:
    for method in list_methods():
        assert method.paper.title
        assert method.paper.url.startswith("https://")
        assert method.__doc__
        assert method.__name__ in ctxext.__all__, "users pass an instance of it"


def update_readme():
    spec = importlib.util.spec_from_file_location("update_readme", ROOT / "docs/update_readme.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_passkey_rate_of_the_fine_tunes_is_rounded() -> None:
    """A miss in 200 prompts must not read as 100%."""
    runs = json.loads((ROOT / "docs/finetune/summary.json").read_text())["runs"].values()
    variants = [[run["measured"]["variants"][name]["passkey"] for name in ("untrained", "trained")] for run in runs]
    measured = [shares[n]["value"] for both in variants for n in ("2048", "512") for shares in both]
    printed = re.findall(r"([\d.]+)%", update_readme().finetune_table().partition("\n\n")[0])
    assert [float(rate) / 100 for rate in printed] == pytest.approx(measured, rel=1e-12)


def test_only_in_percent_prints_a_rate() -> None:
    """A format alone rounds 199 of 200 to 100%."""
    for path in [path for folder in ("ctxext", "docs", "benchmarks") for path in (ROOT / folder).rglob("*.py")]:
        assert not re.search(r":\.(\d|\{\w+\})%\}|\{100 \* \w+\.(value|low|high):\.", path.read_text()), path


@pytest.mark.parametrize("file", sorted(update_readme().TABLES))
def test_tables_are_those_of_the_registry_and_of_the_json(file: str) -> None:
    module, text = update_readme(), (ROOT / file).read_text()
    assert module.updated(text, module.TABLES[file]) == text, "run python docs/update_readme.py"


def test_readme_stays_under_200_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 200


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.S)


# That of docs/fit/README.md takes minutes.
PAGES = ("README.md", "CONTRIBUTING.md", "docs/in_attention.md")
BLOCKS = [
    pytest.param(file, i, marks=[] if file == "README.md" else pytest.mark.slow)
    for file in PAGES
    for i in range(len(python_blocks(ROOT / file)))
]


@pytest.mark.parametrize(("file", "index"), BLOCKS)
def test_readme_block_runs(file: str, index: int, tmp_path: Path) -> None:
    block = tmp_path / "block.py"
    block.write_text(python_blocks(ROOT / file)[index])
    subprocess.run([sys.executable, str(block)], check=True, cwd=tmp_path)


def test_examples_of_plugins_print_nothing_when_ctxext_imports_them(tmp_path: Path) -> None:
    plugins = [block for block in python_blocks(ROOT / "CONTRIBUTING.md") if "@register" in block]
    assert len(plugins) == 2
    for number, block in enumerate(plugins):
        (tmp_path / f"plugin{number}.py").write_text(block)
        run = subprocess.run([sys.executable, "-c", f"import plugin{number}"], cwd=tmp_path, capture_output=True)
        assert (run.returncode, run.stdout) == (0, b"")


def test_readme_commands_are_known() -> None:
    """Each `ctxext …` line of the README parses: its options exist."""
    from typer.main import get_command

    from ctxext.cli import commands

    lines = re.findall(r"^\$ ctxext (.*?)(?: #.*)?$", (ROOT / "README.md").read_text(), re.M)
    assert len(lines) >= 3
    group = get_command(commands)
    for line in lines:
        name, *arguments = line.split()
        command = group.commands[name]
        command.make_context(name, list(arguments))


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.name)
def test_notebook_shows_what_its_code_prints_and_draws(path: Path, tmp_path: Path) -> None:
    shown = run_notebooks.printed(nbformat.read(path, as_version=4))
    assert any(shown)
    assert run_notebooks.printed(run_notebooks.executed(path, tmp_path)) == shown, (
        f"run python tools/run_notebooks.py {path.stem}"
    )


def test_slow_tests_that_would_begin_too_late_are_skipped_with_the_reason() -> None:
    file, environment = ROOT / "tests/recipes/test_start.py", {**os.environ, "CTXEXT_SLOW_UNTIL": "0"}
    words = [sys.executable, "-m", "pytest", str(file), "-rs", "-m", "slow", "-p", "no:cacheprovider"]
    run = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "CTXEXT_SLOW_UNTIL is over" in run.stdout
    assert "passed" not in run.stdout


def test_every_trap_that_the_recipes_name_is_pinned_by_the_test_beside_it() -> None:
    rows = re.findall(r"^\| (\d+)\. .*`(test_\w+)` \|$", (ROOT / "recipes/README.md").read_text(), re.M)
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [int(number) for number, _ in rows] == list(range(1, 13))
    for _, name in rows:
        assert f"def {name}(" in tests, name


def test_the_pinned_versions_are_those_that_the_package_asks_for() -> None:
    """pip goes back to a release of 2018 without a word where a pin leaves it no newer one."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M))
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]
    bounds = {(needed := Requirement(each)).name: needed.specifier for each in asked}
    assert "pytablewriter" in bounds  # lm-eval prints its headings as A, B, C below version 1
    wrong = {name: pinned[key] for name in bounds if (key := canonicalize_name(name)) in pinned
             and not bounds[name].contains(pinned[key], prereleases=True)}  # fmt: skip
    assert wrong == {}


@pytest.mark.parametrize("figure", update_readme().FIGURES)
def test_the_comparisons_figures_are_drawn_from_their_json(figure: str, tmp_path: Path) -> None:
    from ctxext.evals.plots import plot_overview

    file, without = update_readme().FIGURES[figure]
    plot_overview(update_readme().SavedSummary(file, without), tmp_path / "drawn.svg")
    drawn = (tmp_path / "drawn.svg").read_text()
    assert ">baseline<" in drawn
    for name, measured in json.loads((ROOT / file).read_text())["figures"].items():
        assert (f">{name}<" in drawn) == (name not in without and name != "none")
        for share in () if name in without else measured["retrieval"].get("passkey", {}).values():
            assert f">{share['value']:.0%}<".replace("%", "") in drawn
            assert f"n = {share['n']} per cell" in drawn


RETIRED = (
    r"\bkin\b|short-context gate|carry their rope|what a saved config can say|the other side|not come back|told apart"
)


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))],
                         ids=lambda path: str(path.relative_to(ROOT)))  # fmt: skip
def test_documents_use_no_retired_words(path: Path) -> None:
    assert re.findall(RETIRED, path.read_text()) == []


def test_readme_is_short_and_narrow() -> None:
    """About 900 words, and no line over 110 characters, outside tables; code may not be wider either."""
    without_tables = re.sub(r"<!-- begin.*?<!-- end \w+ -->", "", (ROOT / "README.md").read_text(), flags=re.S)
    assert [line for line in without_tables.splitlines() if len(line) > 110] == []
    assert len(re.sub(r"```.*?```", "", without_tables, flags=re.S).split()) <= 900
