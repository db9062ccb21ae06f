"""Route by prompt length: the plain and the extended model behind LiteLLM, with recipes/route_by_length/litellm.yaml.

    python benchmarks/engines/route.py

Serves the bundled model (512 tokens) and its yarn ×4 with `ctxext serve`, and sends prompts of lengths around both
limits through the proxy. Writes to docs/engines/route.json which server answered each, and how its log-probabilities
differ from those of either server asked directly. The exit code is 1 if one came from the wrong server.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engines.environments import LITELLM
from engines.servers import running
from engines.subjects import TARGET, TRAINED
from finetuning import free_port
from report import largest
from transformers import AutoTokenizer

from ctxext.assets import MODEL, PERSUASION
from ctxext.hub.checkpoint import extend_folder
from ctxext.utils.endpoint import Endpoint
from ctxext.utils.machine import machine, versions

CONFIG = Path("recipes/route_by_length/litellm.yaml").resolve()
LENGTHS = (64, 256, 500, TRAINED - 1, TRAINED, TRAINED + 1, 800, 2000, TARGET - 1, TARGET)
# LiteLLM's own count instead: the first deployment by `order` that the prompt fits.
COUNTED = """
model_list:
  - model_name: my-model
    litellm_params: {{model: hosted_vllm/plain, api_base: os.environ/PLAIN_URL, order: 1}}
    model_info: {{max_input_tokens: {plain}}}
  - model_name: my-model
    litellm_params: {{model: hosted_vllm/extended, api_base: os.environ/EXTENDED_URL, order: 2}}
    model_info: {{max_input_tokens: {extended}}}
router_settings: {{enable_pre_call_checks: true}}
"""


KEY = f"sk-{secrets.token_hex(16)}"  # LiteLLM does not start without one


def ask(server: Endpoint, **body: Any) -> dict[str, Any]:
    """The completion, or {"error": its text}."""
    try:
        return server.call("completions", {"model": server.name, **body})
    except ValueError as error:
        return {"error": str(error)}


def scores(answer: dict[str, Any]) -> list[float] | None:
    """log p of each token of prompt and answer, or None."""
    return None if "error" in answer else answer["choices"][0]["logprobs"]["token_logprobs"][1:]


def routed(url: str, direct: dict[str, str], prompts: dict[int, str]) -> list[dict[str, Any]]:
    """For each prompt, the server whose log-probabilities the proxy's answer has, bit for bit.

    Args:
        url: of the proxy; `direct`: of each server.
    """
    proxy = Endpoint(url, model="my-model", api_key=KEY, retries=0)
    servers = {name: Endpoint(each, model=name, api_key=KEY, retries=0) for name, each in direct.items()}
    rows = []
    for tokens, prompt in prompts.items():
        asked = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
        found = ask(proxy, **asked)
        by = {name: scores(ask(server, **asked)) for name, server in servers.items()}
        mine = scores(found)
        equal = [name for name, values in by.items() if values is not None and values == mine]
        expected = "plain" if tokens < TRAINED else "extended" if tokens < TARGET else None
        row: dict[str, Any] = {"tokens": tokens, "expected": expected, "answered by": equal[0] if equal else None}
        row["model in the answer"] = found.get("model")
        if "error" in found:
            row["error"] = found["error"][:300]
        if mine and by["plain"]:
            row["largest difference from plain"] = largest(abs(a - b) for a, b in zip(mine, by["plain"]))
            row["of extended from plain"] = largest(abs(a - b) for a, b in zip(by["extended"] or (), by["plain"]))
        row["right"] = row["answered by"] == expected
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("docs/engines/route.json"))
    parser.add_argument("--fallback-only", action="store_true", help="without LiteLLM's own count, for comparison")
    options = parser.parse_args()
    environment = LITELLM.ready(print)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = tokenizer(PERSUASION.read_text(encoding="utf-8")[:40_000]).input_ids
    prompts: dict[int, str] = {}
    for length in LENGTHS:  # texts, as a proxy gets them: the shortest that is at least this long
        text = next(text for more in range(40) if len(tokenizer(text := tokenizer.decode(
            ids[1 : length + more], skip_special_tokens=True)).input_ids) >= length)  # fmt: skip
        prompts[len(tokenizer(text).input_ids)] = text
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        extend_folder(MODEL, folder / "extended", factor=TARGET / TRAINED, method="yarn", say=lambda line: None)
        direct = {}
        for name, path in (("plain", MODEL), ("extended", folder / "extended")):
            port = free_port()
            direct[name] = f"http://127.0.0.1:{port}/v1"
            serve = [sys.executable, "-m", "ctxext", "serve", str(path), "--port", str(port), "--dtype", "float32"]
            stack.enter_context(running([*serve, "--served-model-name", name], f"{direct[name]}/models",
                                        folder / f"{name}.log"))  # fmt: skip
        counted = folder / "counted.yaml"
        counted.write_text(COUNTED.format(plain=TRAINED - 1, extended=TARGET - 1))
        configs = {"context_window_fallbacks": CONFIG, "enable_pre_call_checks": counted}
        rows = {}
        for name, config in list(configs.items())[: 1 if options.fallback_only else None]:
            port = free_port()
            litellm = [str(LITELLM.folder / "bin/litellm"), "--config", str(config), "--port", str(port)]
            with running([*litellm, "--host", "127.0.0.1"], f"http://127.0.0.1:{port}/health/liveliness",
                         folder / "litellm.log", PLAIN_URL=direct["plain"], EXTENDED_URL=direct["extended"],
                         LITELLM_MASTER_KEY=KEY, LITELLM_LOCAL_MODEL_COST_MAP="True"):  # fmt: skip
                rows[name] = routed(f"http://127.0.0.1:{port}/v1", direct, prompts)
    record = {"proxy": f"LiteLLM {LITELLM.version}", "date": time.strftime("%Y-%m-%d"), "machine": machine("cpu"),
              "versions": versions(), "environment": environment, "trained": TRAINED, "target": TARGET,
              "requests": rows}  # fmt: skip
    options.output.write_text(json.dumps(record, indent=1) + "\n")
    for name, each in rows.items():
        print(f"{name}: {sum(row['right'] for row in each)} of {len(each)} prompts answered by the right server")
    sys.exit(not all(row["right"] for row in rows["context_window_fallbacks"]))


if __name__ == "__main__":
    main()
