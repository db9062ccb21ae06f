"""The planning page: its model counts what is there, and the page says what was measured and what was not."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from at_scale.planning import SHAPES
from attention import STOCK, Decoder, cache_bytes, random_models
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaForCausalLM

from ctxext import describe_context

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("planning_page", ROOT / "docs/planning.py")
planning: Any = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = planning
spec.loader.exec_module(planning)


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_those_of_the_model_but_for_its_norms(shape: str) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(planning.config_of(shape))
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    assert planning.parameters(model.config) == model.num_parameters() - norms


def test_the_cache_is_as_large_as_counted() -> None:
    shape = {**SHAPES["0.1B"], "num_hidden_layers": 2, "vocab_size": 64}
    model = random_models((STOCK,), 64, 64, torch.device("cpu"), **shape)[STOCK]
    decoder = Decoder(model, [50], DynamicCache(config=model.config))
    assert cache_bytes(decoder.cache) == planning.kv_cache_bytes(model.config, 50, 4)


def test_each_point_is_modelled_at_the_rate_of_the_others() -> None:
    common = {"shape": "0.1B", "bytes_each": 4, "source": "docs/x.json", "device": "cpu"}
    work = {n: planning.decode_bytes(planning.config_of("0.1B"), n, 4) for n in (1024, 2048, 4096)}
    points = [{**common, "length": n, "decode_seconds": 2 * bytes_} for n, bytes_ in work.items()]
    points[1]["decode_seconds"] *= 1.25
    errors = {row["length"]: row["error"] for row in planning.compared(points)}
    assert errors[2048] == pytest.approx(1 / 1.25 - 1)
    assert abs(errors[1024]) == abs(errors[4096]) < 0.13  # the median of two rates, one of which is off
    (alone,) = planning.compared(points[:1])
    assert alone["error"] is None


@pytest.mark.parametrize(
    ("layers", "kv_heads", "bytes_each", "needed"),
    [
        (2, 8, 2, (1, 1)),
        (80, 8, 2, (5, 8)),
        (80, 8, 1, (3, 4)),
        (60, 3, 2, (2, 3)),
        (80, 4, 2, (3, 4)),
        (320, 4, 2, (10, None)),
    ],
)
def test_tensor_parallelism_takes_the_next_number_that_divides_the_kv_heads(
    layers: int, kv_heads: int, bytes_each: int, needed: tuple[int, int | None]
) -> None:
    shape = {**SHAPES["8B"], "num_hidden_layers": layers, "num_key_value_heads": kv_heads, "intermediate_size": 1}
    config = planning.LlamaConfig(**shape)
    least, parallel = planning.gpus_needed(config, 2**20, bytes_each)
    assert (least, parallel) == needed
    room = planning.H100.room
    held = 2 * planning.parameters(config) + planning.kv_cache_bytes(config, 2**20, bytes_each)
    assert (least - 1) * room < held <= least * room


def test_the_example_is_what_describe_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {**planning.QWEN, "model_type": "qwen2", "dtype": "bfloat16", "max_position_embeddings": 32768}
    (tmp_path / "config.json").write_text(json.dumps({**fields, "rope_theta": 1e6}))
    config = AutoConfig.from_pretrained(tmp_path)
    printed = dict(describe_context(config, target_length=2**20).rows())
    line = f"KV cache at 1,048,576   {printed['KV cache at 1,048,576']}\n"
    assert line in planning.example()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert planning.parameters(config) == pytest.approx(model.num_parameters(), rel=1e-4)


def test_what_was_modelled_is_told_from_what_was_measured() -> None:
    assert planning.cell(None, 3.0, planning.duration) == "*≈ 3.0 s*"
    assert planning.cell(2.0, 3.0, planning.duration) == "2.0 s"
    row = {"shape": "8B", "length": 2**17, "device": "NVIDIA H100 80GB HBM3, 8 threads", "prefill_seconds": 7.0}
    (found,) = [row for row in planning.planning_rows([row]) if row["measured"]]
    assert (found["shape"], found["name"]) == ("8B", "128k")
    table = planning.blocks(planning.planning_rows([row]), [], planning.published(), {})["table"]
    assert "| 7.0 s | *≈ " in table
    assert "1 rows were measured" in table


def test_the_page_is_what_its_json_files_say() -> None:
    found = planning.points()
    rows, tests = planning.planning_rows(found), planning.compared(found)
    text, record = planning.PAGE.read_text(encoding="utf-8"), json.loads(planning.RECORD.read_text(encoding="utf-8"))
    assert planning.page(planning.blocks(rows, tests, planning.published(), record["longest trained"])) == text
    assert f"{planning.REACHED:.0%} of an H100's" in text
    assert f"{planning.READ:.0%} of 3.35 TB/s" in text
    assert record["tests"] == json.loads(json.dumps(tests))
