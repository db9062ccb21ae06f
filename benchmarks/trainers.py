"""What other trainers' own code makes of a folder that `ctxext extend` wrote (docs/trainers.md). It trains nothing.

    pip download --no-deps -d wheels llamafactory==0.9.5 && unzip -d WHEELS/llamafactory wheels/llamafactory-*.whl
    pip install --target TRANSFORMERS transformers==5.6.0      # one that the trainer's wheel allows
    for METHOD in yarn pi ntk llama3 resonance; do
        ctxext extend MODEL --factor 4 --method $METHOD -o FOLDERS/$METHOD
    done
    PYTHONPATH=TRANSFORMERS python benchmarks/trainers.py llamafactory WHEELS/llamafactory FOLDERS

`axolotl` and `unsloth` do the same. `torchtune` also needs its wheel and its requirements on the path. Functions that
need a GPU or a whole installation to be imported are taken out of their files and run alone, on a CPU. MODEL is the
bundled model. The results go to docs/trainers.json, by trainer and version of transformers.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import logging
import math
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

OUT = Path(__file__).resolve().parents[1] / "docs/trainers.json"
TARGET = 2048
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1250.0}
# Settings that a user may add to an extended folder, by what they would be in the trainer's YAML.
LLAMAFACTORY = [
    {"cutoff_len": 2048},
    {"cutoff_len": 8192},
    {"cutoff_len": 2048, "rope_scaling": "yarn"},
    {"cutoff_len": 2048, "rope_scaling": "llama3"},
    {"cutoff_len": 2048, "rope_scaling": "linear"},
    {"cutoff_len": 512, "rope_scaling": "yarn"},
    {"rope_scaling": "yarn"},  # inference and export
]
AXOLOTL = [
    {"sequence_len": 2048},
    {"sequence_len": 8192},
    {"sequence_len": 2048, "model_config": {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}},
    {"sequence_len": 2048, "model_config": {"rope_parameters": LINEAR}},
    {"sequence_len": 2048, "model_config": {"rope_theta": 500000.0}},
]
UNSLOTH = [
    "_get_rope_theta", "_rope_scaling_as_dict", "_user_rope_scaling", "_extended_rope_scaling",
    "_llama3_inv_freq_from_config", "_vanilla_inv_freq_from_config", "_compute_config_rope_inv_freq",
    "_round_rope_size", "_PerDeviceRopeCache", "LlamaRotaryEmbedding",
]  # fmt: skip


class Settings(dict):  # type: ignore[type-arg]
    __getattr__ = dict.get
    __setattr__ = dict.__setitem__


def rope_of(folder: Path, config: Any = None) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, config=config).model.rotary_emb


def compared(case: dict[str, Any], folder: Path, config: Callable[[], Any]) -> dict[str, Any]:
    """Whether the config that a trainer makes has the frequencies of the folder."""
    expected = rope_of(folder)
    try:
        made = config()
        rope = rope_of(folder, made)
    except Exception as error:  # whatever the trainer would raise
        return {**case, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
    same = torch.equal(rope.inv_freq, expected.inv_freq) and rope.attention_scaling == expected.attention_scaling
    length = made.max_position_embeddings
    return {**case, "rope_is_the_folders": same, "max_position_embeddings": length, "type": type(length).__name__}


def taken(file: Path, names: list[str], into: dict[str, Any], within: str | None = None) -> dict[str, Any]:
    """The functions and classes `names` of a file that cannot be imported here, or of its class `within`."""
    nodes = ast.parse(file.read_text()).body
    if within is not None:
        nodes = next(node.body for node in nodes if isinstance(node, ast.ClassDef) and node.name == within)
    found = [node for node in nodes if getattr(node, "name", None) in names]
    if missing := set(names) - {node.name for node in found}:
        raise SystemExit(f"error: {file} has no {', '.join(sorted(missing))}: this is another version")
    exec(compile(ast.Module(found, []), str(file), "exec"), into)
    return into


def llamafactory(wheel: Path, folders: Path) -> Iterator[dict[str, Any]]:
    root = wheel / "llamafactory"
    for name in ("llamafactory", "llamafactory.extras", "llamafactory.model", "llamafactory.model.model_utils"):
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    from llamafactory.extras.constants import RopeScaling
    from llamafactory.model.model_utils.rope import configure_rope

    for case in LLAMAFACTORY:

        def config(case: dict[str, Any] = case) -> Any:
            made, scaling = AutoConfig.from_pretrained(folders / "yarn"), case.get("rope_scaling")
            given = Settings(rope_scaling=scaling and RopeScaling(scaling), model_max_length=case.get("cutoff_len"))
            configure_rope(made, given)
            return made

        yield compared(case, folders / "yarn", config)


def axolotl(wheel: Path, folders: Path) -> Iterator[dict[str, Any]]:
    names: dict[str, Any] = {
        "transformers": transformers, "AutoConfig": AutoConfig, "PretrainedConfig": object, "DictDefault": Settings,
        "LOG": logging.getLogger("axolotl"), "addict": types.SimpleNamespace(Dict=dict),
    }  # fmt: skip
    loaders = wheel / "axolotl/loaders"
    utilities = ["load_model_config", "check_model_config", "get_linear_embedding_layers"]
    taken(loaders / "utils.py", utilities, names)
    taken(loaders / "model.py", ["_adjust_model_config"], names, within="ModelLoader")
    for case in AXOLOTL:

        def config(case: dict[str, Any] = case) -> Any:
            folder = folders / "yarn"
            given = Settings(base_model=str(folder), overrides_of_model_config=case.get("model_config"), **case)
            model = AutoModelForCausalLM.from_pretrained(folder, config=names["load_model_config"](given))
            tokenizer = types.SimpleNamespace(bos_token_id=0, eos_token_id=1)
            names["_adjust_model_config"](types.SimpleNamespace(model=model, cfg=given, tokenizer=tokenizer))
            return model.config

        yield compared(case, folders / "yarn", config)


def unsloth(wheel: Path, folders: Path) -> Iterator[dict[str, Any]]:
    names = {
        "torch": torch, "math": math, "contextlib": contextlib, "logger": logging.getLogger("unsloth"),
        "DEVICE_COUNT": 1, "DEVICE_TYPE_TORCH": "cpu", "get_current_device": lambda: "cpu",
    }  # fmt: skip
    taken(wheel / "unsloth/models/llama.py", UNSLOTH, names)
    for folder in sorted(path for path in folders.iterdir() if (path / "config.json").is_file()):
        expected, config = rope_of(folder), AutoConfig.from_pretrained(folder)
        rope = names["LlamaRotaryEmbedding"](config=config)
        scaling, _ = names["_extended_rope_scaling"](config, 2.0)
        yield {
            "folder": folder.name,
            "rope_is_the_folders": torch.equal(rope.inv_freq, expected.inv_freq)
            and rope.attention_scaling == expected.attention_scaling,
            "rope_scaling_with_max_seq_length_of_twice_the_maximum": scaling or "the folder's",
        }


def torchtune(wheel: Path, folders: Path) -> Iterator[dict[str, Any]]:
    sys.path.insert(0, str(wheel))
    from safetensors.torch import load_file
    from torchtune.models.convert_weights import hf_to_tune
    from torchtune.models.llama3 import llama3
    from torchtune.models.llama3_1._position_embeddings import Llama3ScaledRoPE

    ids = torch.randint(2, 4096, (1, 700), generator=torch.Generator().manual_seed(0))  # beyond the trained 512
    for method in ("yarn", "ntk"):
        folder = folders / method
        of, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        heads, dim = of["num_attention_heads"], of["hidden_size"]
        theta = of["rope_parameters"]["rope_theta"]
        model = llama3(
            of["vocab_size"], of["num_hidden_layers"], heads, heads, dim, max_seq_len=TARGET, rope_base=theta,
            intermediate_dim=of["intermediate_size"], norm_eps=of["rms_norm_eps"],
        )  # fmt: skip
        converted = hf_to_tune(weights, num_heads=heads, num_kv_heads=heads, dim=dim)
        model.load_state_dict({**converted, "output.weight": converted["tok_embeddings.weight"]})  # tied
        extended = AutoModelForCausalLM.from_pretrained(folder).eval()
        plain = AutoConfig.from_pretrained(folder)
        plain.rope_parameters = {"rope_type": "default", "rope_theta": theta}
        unscaled = AutoModelForCausalLM.from_pretrained(folder, config=plain).eval()
        with torch.no_grad():
            logits = model.eval()(ids)
            yield {
                "folder": method,
                "rope_base": theta,
                "logits_from_the_folders": (logits - extended(ids).logits).abs().max().item(),
                "logits_from_plain_rope_with_that_theta": (logits - unscaled(ids).logits).abs().max().item(),
            }
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(hidden_size=4096, num_attention_heads=32, max_position_embeddings=32768)
    config.rope_parameters = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    theta = Llama3ScaledRoPE(dim=128, max_seq_len=8, base=500_000, scale_factor=4).theta
    yield {"llama3 ×4 of a model trained at 8,192 tokens": {"rope_is_the_folders": torch.equal(theta, expected)}}


def main() -> None:
    trainers = {"llamafactory": llamafactory, "axolotl": axolotl, "unsloth": unsloth, "torchtune": torchtune}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=trainers)
    parser.add_argument("wheel", type=Path, help="the unpacked wheel")
    parser.add_argument("folders", type=Path, help="extended folders, named by method")
    given = parser.parse_args()
    metadata = next(given.wheel.glob(f"{given.trainer}-*.dist-info"))
    version = metadata.name.removeprefix(f"{given.trainer}-").removesuffix(".dist-info")
    key = f"{given.trainer} {version}, transformers {transformers.__version__}"
    results = json.loads(OUT.read_text()) if OUT.is_file() else {}
    rope = rope_of(given.folders / "yarn")
    loaded = {"inv_freq": rope.inv_freq.tolist(), "attention_factor": rope.attention_scaling}
    cases = list(trainers[given.trainer](given.wheel, given.folders))
    results[key] = {"yarn folder as transformers loads it": loaded, "cases": cases}
    OUT.write_text(json.dumps(dict(sorted(results.items())), indent=1, ensure_ascii=False) + "\n")
    print(key, json.dumps(results[key], indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
