"""The table of published checkpoints, and what describe_context makes of it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from families import tiny_config, tiny_model
from transformers import AutoConfig, BertConfig, JambaConfig, LlamaConfig, Qwen3Config

from ctxext import describe_context, extend_config
from ctxext.models.checkpoints import checkpoints

QWEN3 = Qwen3Config(max_position_embeddings=40960, rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0})
LLAMA31 = LlamaConfig(
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    num_hidden_layers=32,
    vocab_size=128256,
    max_position_embeddings=131072,
    dtype="bfloat16",
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)


DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def table() -> Any:
    """docs/checkpoints.py, and what it says today."""
    spec = importlib.util.spec_from_file_location("checkpoints_table", DOCS / "checkpoints.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, module.rows()


def test_the_table_of_checkpoints_is_what_the_code_says_today(table: Any) -> None:
    module, rows = table
    written = json.loads((DOCS / "checkpoints.json").read_text())
    assert written == {"factor": module.FACTOR, "rows": rows}, "run python docs/checkpoints.py"
    assert (DOCS / "checkpoints.md").read_text() == module.page(rows), "run python docs/checkpoints.py"


def test_no_known_checkpoint_meets_an_untrained_angle_under_compose_or_replace(table: Any) -> None:
    _, rows = table
    found = [row[verb] for row in rows for verb in ("compose", "replace") if "ratio" in row.get(verb, {})]
    assert len(found) > len(rows)
    assert max(cell["ratio"] for cell in found) <= 1.0
    kept = [row["keep"]["ratio"] for row in rows if "ratio" in row.get("keep", {})]
    assert max(kept) == 4.0  # the measure sees what interpolates nothing


@pytest.mark.parametrize("row", checkpoints(), ids=lambda row: row.name)
def test_every_row_has_facts_and_a_source(row) -> None:
    assert row.source.startswith("https://")
    assert row.trained_length >= 1024
    assert row.scaling in ("none", "trained-in", "bolted-on")
    assert "model_type" in row.match
    assert (row.scaling == "none") == (row.match["rope_type"] == "default")
    assert row.original_length is None or row.scaling == "trained-in"


def test_the_trained_length_is_not_always_what_the_config_says() -> None:
    description = describe_context(QWEN3, target_length=131072)
    assert description.trained_length == 32768
    assert "checkpoints.toml" in description.trained_length_source
    assert description.would_do == "yarn ×4: 32,768 → 131,072 tokens"
    assert extend_config(QWEN3, 4).rope_parameters["original_max_position_embeddings"] == 32768


def test_keep_raises_the_window_of_yarn_as_qwen_has_it_switched_on() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
    config = LlamaConfig(max_position_embeddings=32768, rope_parameters=yarn)
    for how in ({}, {"factor": 4}, {"target_length": 131072}):
        kept = extend_config(config, existing="keep", **how)
        assert kept.max_position_embeddings == 131072
        assert kept.rope_parameters["factor"] == 4.0
    with pytest.raises(ValueError, match=r"its context is 131072 \(the maximum of its scaling\)"):
        extend_config(config, target_length=65536, existing="compose")


def test_what_the_caller_knows_wins() -> None:
    extended = extend_config(QWEN3, target_length=81920, original_max_position_embeddings=40960)
    assert extended.rope_parameters["original_max_position_embeddings"] == 40960
    assert extended.rope_parameters["factor"] == 2.0


def test_the_kv_cache_is_counted_from_heads_and_layers() -> None:
    description = describe_context(LLAMA31, 2, existing="keep")
    assert description.target_length == 262144
    assert description.kv_cache_bytes == 32 * 2**30  # 32 layers, 8 heads of 128, keys and values, two bytes
    assert description.would_do.startswith("current scaling kept ×2")


def test_linear_attention_keeps_no_kv_cache() -> None:
    config = tiny_config("qwen3_5")  # two of four layers are linear; 2 heads of 32
    assert describe_context(config, 4).kv_cache_bytes == 2 * 2 * 2 * 32 * 256 * 2


@pytest.mark.parametrize(
    ("config", "encoding", "words"),
    [(BertConfig(), "learned", "hierarchical ×4: 512 → 2,048 tokens"), (JambaConfig(), "none", "just raise the limit")],
)
def test_models_without_rope_are_described_not_crashed_on(config, encoding: str, words: str) -> None:
    description = describe_context(config)
    assert description.encoding == encoding
    assert words in description.would_do


def test_describing_changes_nothing() -> None:
    model = tiny_model("llama")
    before = model.config.to_dict()
    assert "trained length" in str(describe_context(model, 4))
    assert model.config.to_dict() == before


def test_layers_that_use_the_keys_of_others_hold_none() -> None:
    sizes = {"num_hidden_layers": 8, "num_key_value_heads": 2, "head_dim": 16, "layer_types": ["full_attention"] * 8}
    config = AutoConfig.for_model("gemma3n_text", max_position_embeddings=64, num_kv_shared_layers=4, **sizes)
    assert describe_context(config, 4).kv_cache_bytes == 4 * 2 * 2 * 16 * 256 * 2
