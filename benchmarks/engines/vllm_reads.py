"""What vLLM itself does with overrides: the length that it allows, its frequencies, its multiplier and its table.

versions.py runs it in an environment with vLLM's CPU build; no weights are needed:

    PYTHONPATH=WHEEL ENV/bin/python benchmarks/engines/vllm_reads.py CASES.json OUTPUT.json
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
import transformers
import vllm
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.transformers_utils.config import set_default_rope_theta


def read(config: dict[str, Any], overrides: dict[str, Any], asked: int | None) -> dict[str, Any]:
    """The length, frequencies (radians per token), multiplier of cos and sin and rows; or that it does not start."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        try:
            model = ModelConfig(
                model=folder, hf_overrides=overrides, max_model_len=asked, skip_tokenizer_init=True, dtype="bfloat16"
            )
        except (ValueError, KeyError) as error:
            return {"starts": False, "says": str(error).partition(" [type=")[0]}
        text = model.hf_text_config
        if text.model_type == "qwen3":  # as its class does
            set_default_rope_theta(text, default_theta=1000000)
        parameters = text.rope_parameters
        with set_current_vllm_config(VllmConfig(model_config=model)):
            older = {"rotary_dim": 64} if "rotary_dim" in inspect.signature(get_rope).parameters else {}
            try:
                rope = get_rope(
                    64, max_position=text.max_position_embeddings, rope_parameters=parameters, dtype=torch.float32,
                    **older,
                )  # fmt: skip
            except (ValueError, KeyError) as error:
                return {"starts": False, "says": repr(error)}
        is_long = parameters["rope_type"] == "longrope"
        table = rope.long_short_cos_sin_cache if is_long else rope.cos_sin_cache
        cos, sin = table.float().chunk(2, dim=-1)
        skipped = parameters["original_max_position_embeddings"] if is_long else 0  # the rows of the short list
        return {
            "starts": True,
            "length": model.max_model_len,
            "rows": len(table) - skipped,
            "inv_freq": torch.atan2(sin[skipped + 1], cos[skipped + 1]).tolist(),
            "attention_factor": float(cos[skipped, 0]),
        }


def main(cases: str, output: str) -> None:
    """Write what vLLM does with each case of a file."""
    does = [read(*case) for case in json.loads(Path(cases).read_text())]
    told = {"version": vllm.__version__, "transformers": transformers.__version__, "does": does}
    Path(output).write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
