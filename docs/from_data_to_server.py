"""Write docs/from_data_to_server.md: the commands from a .jsonl file to a served, verified model, as they ran.

    python docs/from_data_to_server.py

Runs them on the bundled model in a temporary folder: minutes on two CPU cores. What differs between machines and runs
(times, memory, progress bars) is left out.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from engines.servers import running
from finetuning import free_port

ROOT = Path(__file__).resolve().parents[1]
PAGE, NOVEL = ROOT / "docs/from_data_to_server.md", ROOT / "recipes/data/austen/northangerabbey.txt"
PORT = 8000  # on the page; a free one is used
ENVIRONMENT = {"COLUMNS": "100", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}

INTRODUCTION = """\
# From a .jsonl file to a served, verified model

Each command up to `ctxext push` prints the next one. Below is what they print, shortened, for the bundled model of 4
million parameters, which fits a CPU. `python docs/from_data_to_server.py` writes this page, and a slow test runs the
commands. docs.jsonl is made of *Northanger Abbey* there: bring your own. With four steps the model learns nothing yet.
For your own model, set `model:` to a folder or a hub name, and take steps, batch size and precision from [a config for
its size](../recipes/configs).
"""

CONFIG = """\
model: bundled
output: run
extension:
  factor: 4                # from 512 tokens to 2,048, by the default method, yarn
data:
  sources:
    - path: docs.jsonl     # a document per line: {"text": "..."}
training:
  steps: 4
  batch_size: 2
  warmup_steps: 1
  precision: fp32
  gradient_checkpointing: none
evaluation:
  text: bundled            # a held-out text
  lengths: [512, 2048]
  depths: 2
  trials: 1
  windows: 2
"""


@dataclass(frozen=True)
class Step:
    """A section of the page: a command, and what is to be said before it."""

    title: str
    text: str
    command: str


STEPS = (
    Step(
        "Fine-tune",
        "Extends the model, trains an adapter on it, and measures the baseline, the extended and the trained model.",
        "ctxext finetune --config finetune.yaml",
    ),
    Step(
        "Merge",
        "One checkpoint with the same logits, which transformers and servers read without PEFT and ctxext.",
        "ctxext merge run/adapter -o run/merged",
    ),
    Step(
        "Evaluate",
        "The merged model, on any task and length. The fine-tune has measured the adapter already, in "
        "`run/results.jsonl`.",
        "ctxext eval run/merged -o run/merged.jsonl --lengths 512,2048 --depths 2 --trials 1 --windows 2",
    ),
    Step(
        "Push",
        "The model card has the measured table, the base model's licence (with `--base-model OWNER/NAME`), and how to "
        "load and serve the model. Both results files are accepted, because their fingerprints are those of this model "
        "and of the adapter merged into it. `--dry-run` prints the card and uploads nothing.",
        "ctxext push run/merged ada/austen-2k --results run/results.jsonl --dry-run",
    ),
    Step(
        "Serve",
        "In another terminal. For vLLM, SGLang and llama.cpp: `ctxext export run/merged`.",
        f"ctxext serve run/merged --port {PORT}",
    ),
    Step(
        "Verify",
        "First the log-probabilities that the extended model is expected to give, then those of the server.",
        "ctxext verify run/merged -o verify.json",
    ),
    Step("", "", f"ctxext verify http://127.0.0.1:{PORT} --probe verify.json"),
)

# Of progress, logs and the machine.
NOISE = re.compile(
    r"examples/s|it/s|━|\d+%\||INFO: |samples done|Warning|warnings\.warn|^Estimate|^step [\d,]+/|tokenising|^\s*$"
)
# What differs between machines and runs.
VARYING = {
    r"took [^.]*? and [\d.]+ GiB.*": "took ... .",
    r"(?s)(<summary>Training</summary>).*?(</details>)": r"\1 ... \2",  # the settings, and how long it took
}


def write_data(folder: Path) -> None:
    """A dozen chapters of a novel, a document per line, and the config."""
    chapters = re.split(r"\n(?=CHAPTER )", NOVEL.read_text(encoding="utf-8"))[1:13]
    lines = [json.dumps({"text": chapter.strip()}) + "\n" for chapter in chapters]
    (folder / "docs.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "finetune.yaml").write_text(CONFIG, encoding="utf-8")


def run(folder: Path) -> dict[str, str]:
    """Run every command in `folder`; returns what each printed, normalised.

    Raises:
        RuntimeError: a command failed; with its output.
    """
    write_data(folder)
    port, log, said = free_port(), folder / "serve.log", {}
    with ExitStack() as until_the_end:
        for step in STEPS:
            command = shlex.split(step.command.replace(str(PORT), str(port)))
            words = [sys.executable, "-m", *command]
            if command[1] == "serve":
                url = f"http://127.0.0.1:{port}/v1/models"
                until_the_end.enter_context(running(words, url, log, cwd=folder, **ENVIRONMENT))
                lines = "\n".join(re.findall("Uvicorn running .*", log.read_text()))
            else:
                lines = printed(words, folder)
            said[step.command] = normalised(lines, port, PORT)
    return said


def printed(words: list[str], folder: Path) -> str:
    """What a command prints on stdout and stderr, in that order of lines in which a terminal shows them."""
    together = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(words, cwd=folder, env={**os.environ, **ENVIRONMENT}, text=True, **together)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(words)} failed:\n{done.stdout}")
    return str(done.stdout)


def normalised(printed: str, port: int, instead_of_port: int) -> str:
    """The lines that are the same on every machine, as far as its arithmetic allows."""
    lines = [line.rstrip() for line in printed.replace("\r", "\n").splitlines() if not NOISE.search(line)]
    text = "\n".join(lines).replace(str(port), str(instead_of_port))
    for pattern, instead in VARYING.items():
        text = re.sub(pattern, instead, text)
    return text


def page(said: Mapping[str, str]) -> str:
    """The page with what each command printed; a card is shown as the Markdown that it is."""
    parts = [INTRODUCTION, f"`finetune.yaml`:\n\n```yaml\n{CONFIG}```\n"]
    for step in STEPS:
        heading = [f"## {step.title}\n", f"{step.text}\n"] if step.title else []
        parts += [*heading, f"````console\n$ {step.command}\n{said[step.command]}\n````\n"]
    return "\n".join(parts)


def commands_of(text: str) -> list[str]:
    """The commands on a page."""
    return re.findall(r"^````console\n\$ (.*)$", text, re.MULTILINE)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(page(run(Path(folder))), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
