"""What SGLang itself does with overrides: the length that it allows, its frequencies and its multiplier.

versions.py runs it on the files of a wheel, in the environment of vLLM's CPU build. SGLang's config code, its rotary
embeddings and the constructor of a model's attention run unmodified. Packages that are not installed have empty
stand-ins, and so has the rest of a layer:

    PYTHONPATH=WHEEL ENV/bin/python benchmarks/engines/sglang_reads.py CASES.json OUTPUT.json
"""

from __future__ import annotations

import importlib
import json
import math
import os
import pkgutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "SGLANG_LOGGING_LEVEL": "ERROR"}
import sglang_absent  # before SGLang

# isort: split
import sglang
import torch
import transformers
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers import rotary_embedding
from sglang.srt.layers.rotary_embedding import factory

# Of SGLang, these run; names that a model's file imports from elsewhere are replaced in that file.
KEPT = ("sglang.srt.layers.rotary_embedding", "sglang.srt.configs", "sglang.srt.utils")
CLASSES = {
    "LlamaForCausalLM": ("llama", "LlamaDecoderLayer"),
    "Qwen2ForCausalLM": ("qwen2", "Qwen2DecoderLayer"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3DecoderLayer"),
    "DeepseekV3ForCausalLM": ("deepseek_v2", "DeepseekV2DecoderLayer"),
}
SETTINGS = SimpleNamespace(rl_on_policy_target=None, attention_backend="torch_native")
SETTINGS.deterministic = SETTINGS
HERE = {"get_global_server_args": SETTINGS, "get_server_args": SETTINGS, "get_exec": SETTINGS, "get_device": "cpu"}
for each in pkgutil.iter_modules(rotary_embedding.__path__, f"{rotary_embedding.__name__}."):
    for name in vars(module := importlib.import_module(each.name)).keys() & HERE.keys():
        setattr(module, name, lambda *_, name=name: HERE[name])


class Built(Exception):
    """Carries the rotary embedding out of the constructor of a layer."""


def rope_of(config: Any) -> Any:
    """The rotary embedding that the model's own class builds."""
    file, name = CLASSES[config.architectures[0]]
    module = importlib.import_module(f"sglang.srt.models.{file}")
    for key, value in vars(module).copy().items():
        home = str(getattr(value, "__module__", None) or "")
        if key in ("get_rope", "get_rope_wrapper"):
            real = getattr(rotary_embedding, key)

            def build(*given: Any, real: Any = real, **named: Any) -> None:
                raise Built(real(*given, **named))

            setattr(module, key, build)
        elif home.startswith("sglang.") and not home.startswith((module.__name__, *KEPT)):
            setattr(module, key, sglang_absent.One(not key.startswith("is_")))
    factory._ROPE_DICT.clear()  # tables that an earlier case has lengthened
    try:
        getattr(module, name)(config, 0)
    except Built as built:
        return built.args[0]
    raise RuntimeError(f"{name} built no rotary embedding")


def read(config: dict[str, Any], overrides: dict[str, Any], asked: int | None) -> dict[str, Any]:
    """The length, frequencies (radians per token), multiplier of cos and sin and rows; or that it does not start.

    `rows` is None if the table, as the server lengthens it at the start, is right up to the last position.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        try:
            model = ModelConfig(
                folder, context_length=asked, model_override_args=json.dumps(overrides), dtype="bfloat16"
            )
            rope = rope_of(model.hf_text_config)
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
            return {"starts": False, "says": repr(error)}
    length, long = model.context_len, hasattr(rope, "long_short_cos_sin_cache")
    original = rope.original_max_position_embeddings if long else 0  # the rows of the short list
    skipped, rows = original if length > original else 0, None
    table = rope.long_short_cos_sin_cache if long else rope.cos_sin_cache
    if not long and len(table) < length:
        rows = len(table)
        rope._ensure_cos_sin_cache_length(length - 1)
        table = rope.cos_sin_cache
    cos, sin = table.double().chunk(2, dim=-1)
    angles = [torch.atan2(sin[at + 1], cos[at + 1]) - torch.atan2(sin[at], cos[at]) for at in (skipped, length - 2)]
    apart = (angles[1] - angles[0] + math.pi) % (2 * math.pi) - math.pi
    same = apart.abs().max() < 0.05 and torch.allclose(
        cos[length - 1] ** 2 + sin[length - 1] ** 2, cos[skipped, 0] ** 2
    )
    return {
        "starts": True,
        "length": length,
        "rows": None if same else rows,
        "inv_freq": angles[0].tolist(),
        "attention_factor": float(cos[skipped, 0]),
    }


def main(cases: str, output: str) -> None:
    """Write what SGLang does with each case of a file."""
    does = [read(*case) for case in json.loads(Path(cases).read_text())]
    told = {"version": sglang.__version__, "transformers": transformers.__version__, "does": does}
    Path(output).write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
