"""In-attention methods in vLLM's CPU build, by the plugin in vllm_backend.py, against `ctxext.load` in transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from at_scale.cells import Cell
from engines.conformance import EngineError, InItsEnvironment
from engines.environments import VLLM
from engines.servers import running
from engines.subjects import FOLDER, TARGET, Subject
from engines.wheels import beside
from finetuning import free_port

import ctxext
from ctxext.export.verify import verify
from ctxext.hub.checkpoint import read_config
from ctxext.methods import RopeScaling, list_methods
from ctxext.models.context import read_context
from ctxext.utils.endpoint import Endpoint

NEW_TOKENS, BATCHED = 48, 512  # a prompt up to the target is read in four parts
# Slices of the text that are continued in one batch. The cache holds the beginning of the first.
CONTINUED = (slice(0, 300), slice(7, 1000), slice(3, 1900))
HERE = Path(__file__).resolve().parent


class InAttentionSubject(Subject):
    """A model at ×4 of 512 tokens, by methods that config.json cannot express."""

    @cached_property
    def methods(self) -> dict[str, Any]:
        rope = read_context(read_config(self.base)).rope
        made = [method.example(rope, self.target / self.trained) for method in list_methods("rope")]
        return {each.name: each for each in made
                if each.in_attention and not (isinstance(each, RopeScaling) and each.of_the_call)}  # fmt: skip

    def loaded(self, method: str | None) -> Any:
        if method is None:
            return super().loaded(None)
        return ctxext.load(self.extended(method), dtype=torch.float32)


@dataclass
class InVLLMPlugin(InItsEnvironment):
    """A cell is one method on one model: a prompt up to the target, then three prompts continued in one batch."""

    name = "vllm-plugin"
    title = f"vLLM {VLLM.version} (CPU build) with a plugin"
    environment = VLLM
    worker = "vllm_worker.py"
    forms = (FOLDER,)

    @property
    def subjects(self) -> Sequence[InAttentionSubject]:
        names = ("bundled",) if self.tiny else ("bundled", "mistral", "qwen2", "qwen3")
        return [InAttentionSubject(name) for name in names]

    def cells(self) -> Sequence[Cell]:
        cells = [Cell("environment", 60, self.ready)]
        for subject in self.subjects:
            methods = ("self_extend", "dynamic_yarn") if self.tiny else subject.methods
            cells += [Cell(f"{subject.name} {method} {FOLDER}", 20, partial(self.compared, subject, method, FOLDER))
                      for method in methods]  # fmt: skip
        served = [] if self.tiny else [Cell("bundled self_extend vllm serve", 60, self.over_http)]
        return [*cells, *served, *self.negatives()]

    def variables(self) -> dict[str, str]:
        """Where vLLM finds the plugin, as that of an installed distribution, and imports it and ctxext."""
        packages = beside("jaxtyping==0.3.11", "wadler-lindig==0.1.8")
        return {"PYTHONPATH": os.pathsep.join(map(str, (HERE.parents[1], HERE / "vllm_plugin", packages)))}

    def served(self, subject: Subject, method: str, form: str) -> tuple[dict[str, Any], tuple[str, ...]]:
        reach = subject.reach(method)
        overrides = json.dumps({"max_position_embeddings": reach})
        folder = str(subject.extended(method))
        command = (
            "vllm", "serve", folder, "--max-model-len", str(reach), "--hf-overrides", overrides, "--dtype", "float32",
            "--enforce-eager",
        )  # fmt: skip
        batched = ("--max-num-batched-tokens", str(BATCHED), "--skip-tokenizer-init")
        return {"arguments": [*command[2:], *batched]}, command

    def plain(self, subject: Subject, tokens: int) -> dict[str, Any]:
        raise NotImplementedError("the plugin refuses unextended models")

    # ---------------------------------------------------------------------------------- measuring

    def judged(self, subject: Subject, method: str, request: dict[str, Any]) -> dict[str, Any]:
        """How far log-probabilities are from transformers': those of a prompt up to the target, then those of tokens
        that vLLM generates greedily. A greedy token is one that transformers finds most probable after the same
        tokens. How far transformers is from itself, between one pass and decoding, is rounding."""
        reach = subject.reach(method)
        text = subject.text()[: reach - 1]
        prompts = [text[: reach - NEW_TOKENS][part] for part in CONTINUED]
        answer = self.answer({**request, "continued": prompts, "new_tokens": NEW_TOKENS}, [text])
        expected = torch.tensor(subject.reference(method)[: len(text) - 1], dtype=torch.float64)
        apart = (torch.tensor(answer["logprobs"][0], dtype=torch.float64) - expected).abs()
        effect = (torch.tensor(subject.reference(None)[: len(text) - 1], dtype=torch.float64) - expected).abs()
        model, decoded, own, greedy = subject.loaded(method), [], [], 0
        for prompt, found in zip(prompts, answer["continuations"]):
            tokens = torch.tensor(found["tokens"])
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *found["tokens"]]]), use_cache=False).logits[0]
                cache = model(torch.tensor([prompt])).past_key_values
                later = [model(each[None, None], past_key_values=cache).logits[0, -1] for each in tokens[:-1]]
            logprobs = logits[len(prompt) - 1 : -1].double().log_softmax(-1)
            decoded_by_them = torch.stack(later).double().log_softmax(-1)
            own.append((decoded_by_them - logprobs[1:])[torch.arange(len(later)), tokens[1:]].abs())
            greedy += int((logprobs.argmax(-1) == tokens).sum())
            found_logprobs = torch.tensor(found["logprobs"], dtype=torch.float64)
            decoded.append((found_logprobs - logprobs[torch.arange(len(tokens)), tokens]).abs())
        continued = torch.cat(decoded)
        return {
            "mean": float(apart.mean()),
            "max": float(apart.max()),
            "effect": float(effect.mean()),
            "positions": len(apart),
            "continuations": {
                "mean": float(continued.mean()),
                "max": float(continued.max()),
                "transformers' own mean": float(torch.cat(own).mean()),
                "tokens": len(continued),
                "greedy": greedy,
                "prompts": [len(prompt) for prompt in prompts],
                "read from the cache": [found["read from the cache"] for found in answer["continuations"]],
            },
        }

    def exact(self, cell: dict[str, Any]) -> bool:
        continued = cell.get("continuations", {"mean": 0.0, "transformers' own mean": 0.0})
        return super().exact(cell) and continued["mean"] < max(self.bar, continued["transformers' own mean"])

    def over_http(self) -> dict[str, Any]:
        """The stock command line, whose engine is a process of its own: the same prompt, and `ctxext verify`."""
        subject, method, log = InAttentionSubject("bundled"), "self_extend", self.folder / "server.log"
        subject.probe(method)
        _, command = self.served(subject, method, FOLDER)
        url, text = f"http://127.0.0.1:{(port := free_port())}", subject.text()
        line = (str(VLLM.folder / "bin/vllm"), *command[1:], "--port", str(port))
        variables = {**self.variables(), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        try:
            with running(line, f"{url}/health", log, **variables):
                asked = {"prompt": text, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
                server = Endpoint(url, model=command[2], retries=0)
                answer = server.call("completions", {"model": command[2], **asked})
                verdict = verify(url, subject.probe_path(method)).verdict
        except EngineError as error:
            return {"error": str(error), "command": list(command)}
        entries = zip(answer["choices"][0]["prompt_logprobs"][1:], text[1:])
        found = torch.tensor([entry[str(token)]["logprob"] for entry, token in entries], dtype=torch.float64)
        apart = (found - torch.tensor(subject.reference(method), dtype=torch.float64)).abs()
        return {"verdict": verdict.name, "verified to": verdict.asked_to, "mean": float(apart.mean()),
                "max": float(apart.max()), "positions": len(apart), "command": list(command)}  # fmt: skip

    # ------------------------------------------------------------------------------------ refusals

    def negatives(self) -> list[Cell]:
        bundled = InAttentionSubject("bundled")

        def refused(name: str, words: str, subject: Subject, method: str, *more: str) -> Cell:
            return Cell(f"refused: {name}", 10, partial(self.refused, words, subject, method, more))

        window = json.dumps({"max_position_embeddings": TARGET, "sliding_window": 256})
        cells = [
            refused("a static method", "is not extended by a method with in-attention", Subject("bundled"), "ntk"),
            refused("a rope type", "rope_type 'yarn'", Subject("bundled"), "yarn"),
            refused("sliding windows", "sliding windows", InAttentionSubject("mistral"), "self_extend",
                    "--hf-overrides", window),
            refused("an untried family", "model_type 'phi3'", InAttentionSubject("phi3"), "self_extend"),
            refused("an fp8 cache", "--kv-cache-dtype fp8", bundled, "self_extend", "--kv-cache-dtype", "fp8"),
            refused("bfloat16", "torch.bfloat16", bundled, "self_extend", "--dtype", "bfloat16"),
            refused("adapters", "adapters", bundled, "self_extend", "--enable-lora"),
            refused("more tokens than the target", "reaches 2048 tokens", bundled, "self_extend", "--max-model-len",
                    "4096", "--hf-overrides", json.dumps({"max_position_embeddings": 4096})),
            # Last: it imports numba, in whose objects vLLM's dispatcher of kernels then looks for kernels, and fails.
            refused("speculative decoding", "speculative decoding", bundled, "self_extend", "--speculative-config",
                    json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3})),
        ]  # fmt: skip
        return cells[:1] if self.tiny else cells

    def refused(self, words: str, subject: Subject, method: str, more: Sequence[str]) -> dict[str, Any]:
        """Whether vLLM does not start, with an error that contains `words`. The last of equal options counts."""
        request = self.served(subject, method, FOLDER)[0]
        try:
            self.answer({"arguments": [*request["arguments"], *more]}, [subject.text()[:2]])
            said = "it starts"
        except EngineError as error:
            said = str(error)
        return {"right": words in said, "expected": words, "said": said}

    def record(self, kept: dict[str, Any]) -> dict[str, Any]:
        record = super().record(kept)
        cells = record.pop("cells")
        return {**record, "batched tokens": BATCHED,
                "compared": {name: cell for name, cell in cells.items() if "right" not in cell},
                "refusals": {name: cell for name, cell in cells.items() if "right" in cell}}  # fmt: skip
