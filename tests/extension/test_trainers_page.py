"""docs/trainers.md: its blocks run as they stand, and adapters of trainers that know nothing of ctxext reload."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from families import logits
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

import ctxext
from ctxext.assets import MODEL
from ctxext.extension.metadata_file import RECORD
from ctxext.hub.adapters import merge

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/trainers.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
IDS = torch.randint(2, 4096, (1, 700), generator=torch.Generator().manual_seed(0))  # beyond the trained 512


@pytest.mark.slow
def test_the_pages_blocks_run_in_order_and_what_they_save_reloads_extended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the base of `rewarded` is a relative path
    (tmp_path / "page.py").write_text("\n".join(BLOCKS))
    ran = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "'rope_type': 'yarn'" in ran.stdout
    assert "no longer distance is trained" not in ran.stderr
    for adapter in ("adapter", "preferred"):  # extended in memory
        assert (tmp_path / adapter / RECORD).is_file()
    assert not (tmp_path / "rewarded" / RECORD).exists()  # trained on a folder
    for folder in ("full", "adapter", "preferred", "rewarded"):
        assert ctxext.load(tmp_path / folder).config.rope_parameters["factor"] == 4
    console = "".join(re.findall(r"```console\n(.*?)```", PAGE, re.S))
    for line in re.findall(r"^\$ ctxext (.*?)(?:  #.*)?$", console, re.M):
        command = [sys.executable, "-m", "ctxext", *line.split()]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stderr[-2000:])


def test_no_trainer_takes_more_than_eight_lines() -> None:
    setup, *rest = BLOCKS
    assert "small" in setup
    assert all(len([line for line in block.splitlines() if line.strip()]) <= 8 for block in rest)


def test_every_yaml_trains_the_extended_folder_and_sets_a_length() -> None:
    axolotl, llamafactory, torchtune = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", PAGE, re.S))
    assert axolotl["base_model"] == llamafactory["model_name_or_path"] == "/models/extended"
    assert torchtune["checkpointer"]["checkpoint_dir"] == "/models/extended"
    assert axolotl["sequence_len"] == llamafactory["cutoff_len"] == 131072
    assert not {"rope_scaling", "model_config"} & (axolotl.keys() | llamafactory.keys())


def test_torchtunes_rope_base_is_the_theta_that_ntk_gives() -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=4096, num_attention_heads=32, max_position_embeddings=8192)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 500000.0}
    extended = ctxext.extend_config(config, factor=4, method="ntk")
    model = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, re.S)[2])["model"]
    assert model["rope_base"] == extended.rope_parameters["rope_theta"]
    assert model["max_seq_len"] == extended.max_position_embeddings


NAMES = {"llamafactory": "LLaMA-Factory", "unsloth": "Unsloth"}


def test_the_page_names_the_versions_that_were_run() -> None:
    results = json.loads((ROOT / "docs/trainers.json").read_text())
    assert {key.split()[0] for key in results} == {"axolotl", "llamafactory", "torchtune", "unsloth"}
    for key in results:
        trainer, number = key.split(",")[0].split()
        assert f"| {NAMES.get(trainer, trainer)} {number} | " in PAGE, key


def test_the_page_says_what_was_run() -> None:
    """The rows with "run" of the evidence, from the JSON."""
    results = json.loads((ROOT / "docs/trainers.json").read_text())
    by = {key: result["cases"] for key, result in results.items()}
    axolotl = by["axolotl 0.19.0, transformers 5.16.1"]
    assert [case.get("rope_is_the_folders") for case in axolotl] == [True, True, None, False, True]
    assert axolotl[1]["max_position_embeddings"] == 8192
    assert "TypeError" in axolotl[2]["error"]
    new, old = (by[f"llamafactory 0.9.5, transformers {number}"] for number in ("5.6.0", "4.57.6"))
    assert [case.get("rope_is_the_folders") for case in new] == [True, True, None, None, None, True, None]
    assert [case.get("rope_is_the_folders") for case in old] == [True, True, True, False, False, True, False]
    assert old[6]["max_position_embeddings"] == 2 * 512
    for number in ("5.16.1", "4.57.6"):
        chosen = "rope_scaling_with_max_seq_length_of_twice_the_maximum"
        for case in by[f"unsloth 2026.10.9, transformers {number}"]:
            assert case["rope_is_the_folders"]
            assert (case[chosen] == "the folder's") == (case["folder"] == "llama3")
            assert case["folder"] == "llama3" or case[chosen]["type"] == "linear"
    yarn, ntk, llama3 = by["torchtune 0.6.1, transformers 5.23.0"]
    assert yarn["logits_from_the_folders"] > 1 > 1e-4 > yarn["logits_from_plain_rope_with_that_theta"]
    assert ntk["logits_from_the_folders"] < 1e-4
    assert llama3.popitem()[1]["rope_is_the_folders"]


def test_every_version_of_transformers_that_was_run_loads_the_folders_frequencies() -> None:
    rope = ctxext.extend_context(AutoModelForCausalLM.from_pretrained(MODEL), 4, "yarn").model.rotary_emb
    results = json.loads((ROOT / "docs/trainers.json").read_text())
    assert {key.split()[-1] for key in results} == {"4.57.6", "5.6.0", "5.16.1", "5.23.0"}
    for result in results.values():
        loaded = result["yarn folder as transformers loads it"]
        assert loaded["inv_freq"] == pytest.approx(rope.inv_freq.tolist(), rel=1e-6)
        assert loaded["attention_factor"] == pytest.approx(rope.attention_scaling)


def test_trls_default_length_is_the_one_that_the_page_gives() -> None:
    from trl import DPOConfig, SFTConfig

    assert [config.__dataclass_fields__["max_length"].default for config in (SFTConfig, DPOConfig)] == [1024, 1024]


# A trainer that never imports ctxext, as axolotl and LLaMA-Factory.
WITHOUT_CTXEXT = """
import sys
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = get_peft_model(AutoModelForCausalLM.from_pretrained(sys.argv[1]), LoraConfig(r=4, task_type="CAUSAL_LM"))
rows = Dataset.from_dict({"input_ids": [list(range(2, 602))] * 2, "labels": [list(range(2, 602))] * 2})
args = TrainingArguments(sys.argv[2] + "-run", max_steps=2, learning_rate=1e-2, report_to=[], use_cpu=True)
trainer = Trainer(model, args, train_dataset=rows)
trainer.train()
trainer.save_model(sys.argv[2])
assert "ctxext" not in sys.modules
"""


@pytest.mark.slow
def test_an_adapter_of_an_extended_folder_loses_nothing_without_ctxext(tmp_path: Path) -> None:
    folder, adapter = tmp_path / "folder", tmp_path / "adapter"
    ctxext.extend_context(AutoModelForCausalLM.from_pretrained(MODEL), 4, "yarn").save_pretrained(folder)
    subprocess.run([sys.executable, "-c", WITHOUT_CTXEXT, folder, adapter], check=True, capture_output=True)
    assert not (adapter / RECORD).exists()
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(folder)
    expected = logits(AutoPeftModelForCausalLM.from_pretrained(adapter).eval(), IDS)
    base = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert not torch.allclose(expected, logits(base, IDS))  # it was trained
    assert torch.equal(logits(ctxext.load(adapter), IDS), expected)
    merge(adapter, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert merged.config.rope_parameters == base.config.rope_parameters
    assert (logits(merged, IDS) - expected).abs().max() < 1e-3
