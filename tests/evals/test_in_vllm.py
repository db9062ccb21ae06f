"""What vLLM is refused for and given; `benchmarks/evaluators_vllm.py` measures in it, in vLLM's own environment."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from transformers import AutoConfig

from ctxext.assets import MODEL
from ctxext.evals.in_vllm import InVLLM, overrides_for
from ctxext.evals.prompts import Prompter
from ctxext.hub.checkpoint import extend_folder, load_tokenizer, read_config


def extended(path: Path, method: str) -> Path:
    extend_folder(MODEL, path / method, 2, method, say=lambda line: None)
    return path / method


@pytest.mark.parametrize("method", ["self_extend", "rerope", "dynamic_yarn"])
def test_methods_in_attention_are_refused_by_name(method: str, tmp_path: Path) -> None:
    remedy = rf"vLLM cannot run {method}, .* Use --backend transformers, or `ctxext serve` and --server\.$"
    with pytest.raises(ValueError, match=remedy):
        InVLLM(extended(tmp_path, method), Prompter(load_tokenizer(MODEL)), "model")


def test_a_scaling_that_vllm_reads_otherwise_is_refused(tmp_path: Path) -> None:
    config = read_config(MODEL)
    config.rope_parameters = {**config.rope_parameters, "rope_type": "dynamic", "factor": 2.0}
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"cannot run this model's scaling .*unlike in transformers.*--backend transf"):
        overrides_for(tmp_path)


def test_vllm_gets_what_export_prints(tmp_path: Path) -> None:
    assert overrides_for(Path(MODEL)) == {}
    assert overrides_for(extended(tmp_path, "yarn"))["rope_scaling"]["factor"] == 2


def test_without_vllm_the_remedy_is_to_install_it() -> None:
    assert importlib.util.find_spec("vllm") is None
    with pytest.raises(ImportError, match="--backend vllm needs vLLM, which is not installed: pip install vllm"):
        InVLLM(Path(MODEL), Prompter(load_tokenizer(MODEL)), "model")


def test_what_the_header_states_is_no_option() -> None:
    for name in ("seed", "logprobs_mode", "load_format"):
        with pytest.raises(ValueError, match=rf"{name} of vLLM is set here\. Drop it from the options"):
            InVLLM(Path(MODEL), Prompter(load_tokenizer(MODEL)), "model", options={"max_num_seqs": 4, name: 1})


@pytest.mark.parametrize("limit", ["auto", "8k", -1, 0])
def test_a_maximum_length_is_a_number_of_tokens(limit: object) -> None:
    with pytest.raises(ValueError, match=r"max_model_len must be a number of tokens >= 1, got "):
        InVLLM(Path(MODEL), Prompter(load_tokenizer(MODEL)), "model", options={"max_model_len": limit})


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown dtype 'float33'\. Pass one of auto, "):
        InVLLM(Path(MODEL), Prompter(load_tokenizer(MODEL)), "model", dtype="float33")


def test_what_continues_no_text_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("t5").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"T5Config .* cannot be evaluated"):
        InVLLM(tmp_path, Prompter(load_tokenizer(MODEL)), "model")
