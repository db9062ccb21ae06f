"""A GGUF file of every architecture, extended, is in llama.cpp what transformers makes of the extended model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from families import LENGTH, tiny_model
from gguf_files import logprobs, save_gguf
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ctxext import extend_context
from ctxext.assets import MODEL, PERSUASION
from ctxext.export.gguf import context_of_gguf, extend_gguf, write_gguf
from ctxext.export.llama_cpp import GGUFModel
from ctxext.extension.request import plan_extension
from ctxext.methods import PI, ContextMethod, LongRoPE, NTKAware, NTKByParts, YaRN
from ctxext.models.context import read_context

FACTOR, TARGET, SCORED = 4, 4 * LENGTH, 12
CLOSE = 1e-3  # nats; the largest difference seen is 2e-5
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    "gpt_oss": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32, "sliding_window": 32, "num_hidden_layers": 6},
}
METHODS: dict[str, ContextMethod] = {
    "yarn": YaRN(factor=FACTOR),
    "ntk": NTKAware(factor=FACTOR),
    "pi": PI(factor=FACTOR),
    "ntk_by_parts": NTKByParts(factor=FACTOR),
}


def small(family: str, **changes: Any) -> PreTrainedModel:
    """A random model with the bundled tokenizer's vocabulary, whose log-probabilities depend on positions."""
    values = {**SHAPES[family], "vocab_size": 4096, "hidden_size": 128, **changes}
    if family != "gemma3_text":
        return tiny_model(family, **values)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96, query_pre_attn_scalar=32,
        max_position_embeddings=LENGTH, initializer_range=0.1, **values,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokens_of(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "bundled.gguf"
    write_gguf(MODEL, path, "Q8_0")
    return path


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return AutoTokenizer.from_pretrained(MODEL)(PERSUASION.read_text()[3000:6000]).input_ids[: TARGET - 1]


def check(method: ContextMethod, family: str, tokens_of: Path, ids: list[int], tmp_path: Path) -> None:
    model = small(family)
    plain, out, start = tmp_path / "plain.gguf", tmp_path / "out.gguf", len(ids) - SCORED
    save_gguf(model, plain, tokens_of)
    short = ids[: LENGTH - 1]
    with GGUFModel(plain) as unextended:
        found = unextended.logprobs(short, LENGTH - 1 - SCORED)
    torch.testing.assert_close(found, logprobs(model, short, LENGTH - 1 - SCORED), atol=CLOSE, rtol=0)
    before = logprobs(model, ids, start)
    plan = extend_gguf(plain, out, method=method)
    facts = read_context(context_of_gguf(out))
    assert facts.mark is not None
    torch.testing.assert_close(facts.rope.inv_freq, plan.extended.inv_freq, rtol=1e-6, atol=0)
    extend_context(model, method=method)
    after = logprobs(model, ids, start)
    assert (after - before).abs().mean() > 20 * CLOSE
    with GGUFModel(out) as extended:
        torch.testing.assert_close(extended.logprobs(ids, start), after, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("family", SHAPES)
def test_yarn_is_exact(family: str, tokens_of: Path, ids: list[int], tmp_path: Path) -> None:
    check(METHODS["yarn"], family, tokens_of, ids, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ntk", "pi", "ntk_by_parts"])
@pytest.mark.parametrize("family", SHAPES)
def test_every_method_of_the_metadata_is_exact(
    name: str, family: str, tokens_of: Path, ids: list[int], tmp_path: Path
) -> None:
    if (family, name) == ("gemma3_text", "ntk_by_parts"):
        save_gguf(small(family), tmp_path / "plain.gguf", tokens_of)
        with pytest.raises(ValueError, match=r"windowed layers of 'gemma3' too.*Use 'yarn'"):
            extend_gguf(tmp_path / "plain.gguf", tmp_path / "out.gguf", method=METHODS[name])
        return
    check(METHODS[name], family, tokens_of, ids, tmp_path)


def test_phi_3_takes_any_factors_at_every_context_size(tokens_of: Path, ids: list[int], tmp_path: Path) -> None:
    pairs = read_context(small("phi3").config).rotary_dim // 2
    wavy = LongRoPE(factor=FACTOR, attention_factor=1.07, long_factor=tuple(1.0 + i % 3 for i in range(pairs)))
    check(wavy, "phi3", tokens_of, ids, tmp_path)
    model = extend_context(small("phi3"), method=wavy)
    with GGUFModel(tmp_path / "out.gguf", n_ctx=LENGTH) as short:  # where llama.cpp takes the other tensor
        found = short.logprobs(ids[: LENGTH - 1], LENGTH - 9)
    torch.testing.assert_close(found, logprobs(model, ids[: LENGTH - 1], LENGTH - 9), atol=CLOSE, rtol=0)
    weights = {tensor.name: tensor.data.tobytes() for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    kept = {tensor.name: tensor.data.tobytes() for tensor in gguf.GGUFReader(tmp_path / "plain.gguf").tensors}
    assert weights.keys() - kept.keys() == {"rope_factors_long.weight", "rope_factors_short.weight"}
    assert all(weights[name] == value for name, value in kept.items())


def test_what_a_file_holds_is_read_as_llama_cpp_reads_it(tokens_of: Path, tmp_path: Path) -> None:
    """Gemma-3-4B's linear scaling of its global layers, and windows by the file's own pattern."""
    path = tmp_path / "linear.gguf"
    more = {"rope.scaling.factor": 8.0, "attention.sliding_window_pattern": 3, "rope.freq_base_swa": 5000.0}
    save_gguf(small("gemma3_text"), path, tokens_of, **more)
    config = context_of_gguf(path)
    assert config.rope_parameters["full_attention"]["factor"] == 8.0
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 5000.0
    assert config.layer_types == (["sliding_attention"] * 2 + ["full_attention"]) * 2
    plan = extend_gguf(path, tmp_path / "out.gguf", 4, "yarn", existing="replace", original_max_position_embeddings=64)
    again = context_of_gguf(tmp_path / "out.gguf")
    assert again.rope_parameters["sliding_attention"]["rope_theta"] == 5000.0
    assert read_context(again).reach == plan.target_length == TARGET


@pytest.mark.parametrize(
    ("family", "more", "said"),
    [
        ("gemma3_text", {"rope.scaling.attn_factor": 1.1}, "multiplies cos and sin of windowed layers too"),
        ("gpt_oss", {"rope.freq_base_swa": 5.0}, "windowed layers have a base of 5, and gpt_oss has one for all"),
        ("phi3", {"attention.sliding_window": 128}, "window of 128 tokens, which llama.cpp ignores for 'phi3'"),
    ],
)
def test_what_llama_cpp_would_run_differently_is_refused(
    family: str, more: dict[str, Any], said: str, tokens_of: Path, tmp_path: Path
) -> None:
    save_gguf(small(family), tmp_path / "plain.gguf", tokens_of, **more)
    with pytest.raises(ValueError, match=said):
        extend_gguf(tmp_path / "plain.gguf", tmp_path / "out.gguf", 4)
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "gpt_oss"])
def test_factors_for_a_graph_without_them_are_refused(family: str, tokens_of: Path, tmp_path: Path) -> None:
    model = small(family)
    save_gguf(model, tmp_path / "plain.gguf", tokens_of)
    plan_extension(model.config, 4, "llama3")  # which transformers can
    with pytest.raises(ValueError, match=r"takes no frequency factors.*Use 'ntk'"):
        extend_gguf(tmp_path / "plain.gguf", tmp_path / "out.gguf", 4, "llama3")
