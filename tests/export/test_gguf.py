"""What llama.cpp makes of a GGUF file of ours is what transformers makes of the model that we extend."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Regex, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from ctxext import describe_context, extend_context
from ctxext.assets import MODEL, PERSUASION
from ctxext.cli import commands
from ctxext.encodings.rope import RopeGeometry
from ctxext.export.gguf import ARCHITECTURES, context_of_gguf, extend_gguf, write_gguf
from ctxext.export.llama_cpp import GGUFModel
from ctxext.extension.method_file import SavedMethod
from ctxext.extension.rope import RopePlan
from ctxext.methods import PI, ContextMethod, LongRoPE, NTKAware, NTKByParts, RopeScaling, YaRN, list_methods
from ctxext.models.context import read_context

FACTOR = 4.0
# Twice the trained length, and what is scored behind it.
START, END = 1024, 1040
# In nats; the largest difference seen is 8e-5.
CLOSE = 1e-3
# Up, down and up again.
WAVY = LongRoPE(
    factor=FACTOR, attention_factor=1.07,
    long_factor=tuple((1 + torch.linspace(0, 2, 32) + torch.linspace(0, 9, 32).sin()).clamp(min=0.9).tolist()),
)  # fmt: skip
METHODS: dict[str, ContextMethod] = {
    "yarn": YaRN(factor=FACTOR),
    "ntk": NTKAware(factor=FACTOR),
    "pi": PI(factor=FACTOR),
    "ntk_by_parts": NTKByParts(factor=FACTOR),
    "longrope": WAVY,
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def ids(tokenizer: Any) -> list[int]:
    return tokenizer(PERSUASION.read_text()[3000:9000]).input_ids[:END]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model as a GGUF file."""
    path = tmp_path_factory.mktemp("gguf") / "plain.gguf"
    write_gguf(MODEL, path)
    return path


@pytest.fixture(scope="module")
def without_factors(plain: Path) -> Path:
    """The same weights for llama.cpp's `qwen2`, whose graph takes no factors, rotates halves and has biases."""
    path = plain.with_name("qwen2.gguf")
    reader = gguf.GGUFReader(plain)
    writer = gguf.GGUFWriter(path, "qwen2")
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.arch")):
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name.replace("llama.", "qwen2."), field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        data, part = np.array(tensor.data), tensor.name.split(".")[-2]
        if part in ("attn_q", "attn_k"):
            data = data.reshape(4, 32, 2, 256).swapaxes(1, 2).reshape(256, 256)
        if part in ("attn_q", "attn_k", "attn_v"):
            writer.add_tensor(tensor.name.replace("weight", "bias"), np.zeros(256, np.float32))
        writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def theirs(ids: list[int]) -> Callable[[ContextMethod | None], Tensor]:
    """Transformers' log-probabilities of the last tokens, by the method that the model is extended by."""
    found: dict[ContextMethod | None, Tensor] = {}

    def logprobs(method: ContextMethod | None) -> Tensor:
        if method not in found:
            model = AutoModelForCausalLM.from_pretrained(MODEL).eval()
            if method is not None:
                extend_context(model, method=method)
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([ids]), logits_to_keep=END - START + 1).logits[0, :-1]
            found[method] = logits.double().log_softmax(-1)[range(END - START), ids[START:]]
        return found[method]

    return logprobs


def llama_cpp(path: Path, ids: list[int], start: int = START) -> Tensor:
    with GGUFModel(path) as model:
        return model.logprobs(ids, start)


class Read:
    """All that a GGUF file says."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.tensors = {tensor.name: (tensor.tensor_type, tensor.data.tobytes()) for tensor in reader.tensors}
        self.fields = {name: field.contents() for name, field in reader.fields.items() if "GGUF." not in name}

    @property
    def factors(self) -> np.ndarray:
        return np.frombuffer(self.tensors["rope_freqs.weight"][1], np.float32)


def check_read_as_written(path: Path, plan: RopePlan) -> None:
    config = context_of_gguf(path)
    facts = read_context(config)
    torch.testing.assert_close(facts.rope.inv_freq, plan.extended.inv_freq, rtol=1e-6, atol=0)
    assert facts.rope.attention_factor == pytest.approx(plan.extended.attention_factor)
    assert (facts.scaling, facts.original_length, facts.reach) == (plan.method, 512, 2048)
    assert (facts.original_theta, config.max_position_embeddings) == (1250.0, 2048)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_llama_cpp_gives_the_log_probabilities_of_transformers_beyond_the_trained_length(
    method: ContextMethod, plain: Path, ids: list[int], theirs: Any, tmp_path: Path
) -> None:
    plan = extend_gguf(plain, tmp_path / "out.gguf", method=method)
    check_read_as_written(tmp_path / "out.gguf", plan)
    ours = llama_cpp(tmp_path / "out.gguf", ids)
    torch.testing.assert_close(ours, theirs(method), atol=CLOSE, rtol=0)
    assert (ours - theirs(None)).abs().mean() > 50 * CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["yarn", "ntk", "pi", "ntk_by_parts"])
def test_metadata_alone_say_what_they_can_where_the_graph_takes_no_factors(
    name: str, without_factors: Path, ids: list[int], theirs: Any, tmp_path: Path
) -> None:
    plan = extend_gguf(without_factors, tmp_path / "out.gguf", method=METHODS[name])
    check_read_as_written(tmp_path / "out.gguf", plan)
    torch.testing.assert_close(llama_cpp(tmp_path / "out.gguf", ids), theirs(METHODS[name]), atol=CLOSE, rtol=0)


@pytest.mark.parametrize("left_out", [YaRN(factor=FACTOR, attention_factor=1.0), replace(WAVY, attention_factor=1.0)])
def test_a_file_without_the_attention_factor_is_told_apart(
    left_out: Any, plain: Path, ids: list[int], theirs: Any, tmp_path: Path
) -> None:
    extend_gguf(plain, tmp_path / "out.gguf", method=left_out)
    right = YaRN(factor=FACTOR) if isinstance(left_out, YaRN) else WAVY
    assert (llama_cpp(tmp_path / "out.gguf", ids) - theirs(right)).abs().mean() > 20 * CLOSE


def test_an_unextended_file_is_the_unextended_model(plain: Path, ids: list[int], theirs: Any, tmp_path: Path) -> None:
    folder = bundled_copy(tmp_path, max_position_embeddings=2048)  # llama.cpp reads no more than the file says
    write_gguf(folder, tmp_path / "out.gguf")
    torch.testing.assert_close(llama_cpp(tmp_path / "out.gguf", ids), theirs(None), atol=CLOSE, rtol=0)


def bundled_copy(tmp_path: Path, **changes: Any) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    for file in MODEL.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((MODEL / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize(("dtype", "close"), [("F16", 0.01), ("BF16", 0.1), ("Q8_0", 0.1)])
def test_smaller_numbers_say_nearly_the_same(
    dtype: str, close: float, plain: Path, ids: list[int], tmp_path: Path
) -> None:
    write_gguf(MODEL, tmp_path / "out.gguf", dtype)
    assert (tmp_path / "out.gguf").stat().st_size < 0.6 * plain.stat().st_size
    difference = llama_cpp(tmp_path / "out.gguf", ids[:40], 1) - llama_cpp(plain, ids[:40], 1)
    assert 1e-5 < difference.abs().max() < close


def test_a_folder_takes_its_extension_along(plain: Path, tmp_path: Path) -> None:
    model = extend_context(AutoModelForCausalLM.from_pretrained(MODEL), FACTOR)
    model.save_pretrained(tmp_path / "folder")
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(tmp_path / "folder")
    write_gguf(tmp_path / "folder", tmp_path / "ours.gguf")
    extend_gguf(plain, tmp_path / "file.gguf", FACTOR)
    ours, file = Read(tmp_path / "ours.gguf"), Read(tmp_path / "file.gguf")
    assert ours.fields.pop("general.name") != file.fields.pop("general.name")
    assert ours.fields == file.fields
    assert ours.tensors == file.tensors


def test_extending_leaves_every_weight_byte_for_byte(tmp_path: Path) -> None:
    write_gguf(MODEL, tmp_path / "small.gguf", "Q8_0")
    extend_gguf(tmp_path / "small.gguf", tmp_path / "out.gguf", FACTOR)
    before, after = Read(tmp_path / "small.gguf"), Read(tmp_path / "out.gguf")
    assert {kind.name for kind, _ in before.tensors.values()} == {"F32", "F16", "Q8_0"}
    assert after.tensors.pop("rope_freqs.weight")
    assert after.tensors == before.tensors
    changed = {name for name, value in after.fields.items() if before.fields.pop(name, None) != value}
    assert changed == {"llama.context_length", "llama.rope.scaling.attn_factor", "ctxext.extension"}
    assert not before.fields


@pytest.mark.slow
def test_scaling_that_is_there_is_kept_composed_or_replaced_as_asked(plain: Path, tmp_path: Path) -> None:
    once, out = tmp_path / "once.gguf", [tmp_path / f"{n}.gguf" for n in range(4)]
    extend_gguf(plain, once, 4)
    with pytest.raises(ValueError, match="already scaled by ctxext"):
        extend_gguf(once, out[0], 2)
    assert not out[0].exists()
    extend_gguf(once, out[0], 8, existing="replace")
    extend_gguf(plain, out[1], 8)
    extend_gguf(once, out[2], 2, "pi", existing="compose")
    extend_gguf(once, out[3], 2, existing="keep")
    before, (replaced, directly, composed, kept) = Read(once), map(Read, out)
    assert (replaced.tensors, replaced.fields) == (directly.tensors, directly.fields)
    assert composed.factors == pytest.approx(2 * before.factors)
    assert kept.factors == pytest.approx(before.factors)
    assert kept.fields["llama.context_length"] == 4096


def test_a_file_that_was_edited_since_is_nobody_s(plain: Path, tmp_path: Path) -> None:
    extend_gguf(plain, tmp_path / "out.gguf", FACTOR)
    assert read_context(context_of_gguf(tmp_path / "out.gguf")).mark is not None
    reader = gguf.GGUFReader(tmp_path / "out.gguf", "r+")
    reader.get_field("llama.rope.scaling.attn_factor").parts[-1][0] = 1.0
    reader.data.flush()
    facts = read_context(context_of_gguf(tmp_path / "out.gguf"))
    assert facts.mark is None
    assert facts.rope.attention_factor == 1.0


LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPLITTERS = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": [pre_tokenizers.Split(Regex(rf"{LETTERS}|\p{{N}}{{1,3}}|{REST}"), "isolated"), BYTES],
    "qwen2": [pre_tokenizers.Split(Regex(rf"{LETTERS}|\p{{N}}|{REST}"), "isolated"), BYTES],
}
TEXT = PERSUASION.read_text()[:4000] + "\n\n\n  I'll've 12345 ÜBER naïve — 北京 🙂\t\tx=1.5;\r\n  END "


@pytest.mark.parametrize("name", SPLITTERS)
def test_llama_cpp_makes_the_tokenizer_s_tokens(name: str, tokenizer: Any, tmp_path: Path) -> None:
    folder = bundled_copy(tmp_path)
    (folder / "tokenizer.json").unlink()
    backend = AutoTokenizer.from_pretrained(MODEL).backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(SPLITTERS[name])
    backend.model.ignore_merges = name == "llama-bpe"
    backend.save(str(folder / "tokenizer.json"))
    write_gguf(folder, tmp_path / "out.gguf", "Q8_0")
    assert Read(tmp_path / "out.gguf").fields["tokenizer.ggml.pre"] == name
    with GGUFModel(tmp_path / "out.gguf") as model:
        assert model.tokenize(TEXT) == AutoTokenizer.from_pretrained(folder)(TEXT, verbose=False).input_ids


def prefixed(spec: dict[str, Any]) -> None:
    spec["pre_tokenizer"] = json.loads(pre_tokenizers.Sequence(SPLITTERS["llama-bpe"]).__getstate__())
    spec["pre_tokenizer"]["pretokenizers"][-1]["add_prefix_space"] = True
    spec["model"]["ignore_merges"] = True


def by_whole_words(spec: dict[str, Any]) -> None:
    spec["model"]["ignore_merges"] = True


def one_too_many(spec: dict[str, Any]) -> None:
    spec["added_tokens"].append({**spec["added_tokens"][0], "id": 4096, "content": "<|beyond|>"})


@pytest.mark.parametrize(
    ("edit", "said"),
    [(prefixed, "unsupported tokenizer"), (by_whole_words, "ignore_merges"), (one_too_many, "<|beyond|>")],
)
def test_a_tokenizer_that_llama_cpp_would_not_have_is_refused(
    edit: Callable[[dict[str, Any]], None], said: str, tmp_path: Path
) -> None:
    folder = bundled_copy(tmp_path)
    spec = json.loads((MODEL / "tokenizer.json").read_text())
    edit(spec)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ValueError, match=rf"{re.escape(said)}.*convert_hf_to_gguf"):
        write_gguf(folder, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_the_weights_are_those_that_transformers_loads(plain: Path, tmp_path: Path) -> None:
    """Beside them there may be the same ones once more, under the names of another library."""
    folder = bundled_copy(tmp_path)
    (folder / "consolidated.safetensors").symlink_to(MODEL / "model.safetensors")
    write_gguf(folder, tmp_path / "out.gguf")
    assert Read(tmp_path / "out.gguf").tensors == Read(plain).tensors
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="5MB")
    (folder / "model.safetensors").unlink()
    write_gguf(folder, tmp_path / "shards.gguf")
    assert Read(tmp_path / "shards.gguf").tensors == Read(plain).tensors


def test_an_end_of_text_within_a_text_is_scored_like_any_token(plain: Path, ids: list[int]) -> None:
    text = [*ids[:20], 1, 0, *ids[20:30]]
    model = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([text])).logits[0, :-1].double()
    expected = logits.log_softmax(-1)[range(len(text) - 1), text[1:]]
    torch.testing.assert_close(llama_cpp(plain, text, 1), expected, atol=CLOSE, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"method": "dynamic_ntk"}, "a GGUF file cannot express.*length="),
        ({"method": "self_extend"}, "a GGUF file cannot express"),
        ({"factor": 1}, "already covers 512"),
        ({"method": replace(WAVY, long_factor=(1.0, 2.0))}, "2 numbers, but this model has 32"),
        ({"method": "fitted.json"}, "theta 10000 trained at 4096"),
        ({"existing": "compose"}, "plain RoPE"),
    ],
)
def test_what_cannot_be_leaves_no_file(arguments: dict[str, Any], said: str, plain: Path, tmp_path: Path) -> None:
    if arguments.get("method") == "fitted.json":
        SavedMethod(replace(WAVY, fitted_to=(10000.0, 4096))).save(tmp_path / "fitted.json")
        arguments = {"method": str(tmp_path / "fitted.json")}
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=said):
        extend_gguf(plain, tmp_path / "out.gguf", **arguments)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("method", [WAVY, YaRN(factor=4, beta_fast=16), NTKByParts(factor=4, truncate=False)])
def test_what_metadata_cannot_say_is_refused_where_the_graph_takes_no_factors(
    method: ContextMethod, without_factors: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"takes no frequency factors.*Use 'ntk'"):
        extend_gguf(without_factors, tmp_path / "out.gguf", method=method)
    assert not list(tmp_path.iterdir())


def test_what_is_no_gguf_file_of_a_known_architecture_is_refused(plain: Path, tmp_path: Path) -> None:
    cut, out = tmp_path / "cut.gguf", tmp_path / "out.gguf"
    no_file, part = "neither a checkpoint folder nor a GGUF file. Check", "not a complete GGUF file. Download"
    cases = [(b"", no_file), (b"nothing", no_file)]
    cases += [(plain.read_bytes()[:n], part) for n in (4, 5000, 5001, -5000)]
    for content, said in cases:
        cut.write_bytes(content)
        with pytest.raises(ValueError, match=said):
            extend_gguf(cut, out)
    with pytest.raises(FileNotFoundError, match="is not a file"):
        extend_gguf(tmp_path / "nowhere.gguf", out)
    known = f"supported: {', '.join(ARCHITECTURES)}"
    for architecture, said in (("mamba", known), ("llama", r"lacks llama\.embedding_length")):
        writer = gguf.GGUFWriter(tmp_path / f"{architecture}.gguf", architecture)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ValueError, match=said):
            extend_gguf(tmp_path / f"{architecture}.gguf", out)
    assert not out.exists()
    with pytest.raises(FileExistsError, match="Choose another"):
        extend_gguf(plain, cut)
    with pytest.raises(ValueError, match="could not load"):
        GGUFModel(cut)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "qwen2"}, "convert_hf_to_gguf.py"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"model_type": "mistral", "sliding_window": 128}, "has a sliding window of 128"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1250.0}}, "length-dependent"),
        ({"dtype": "Q4_K"}, "must be one of F32"),
    ],
)
def test_a_folder_that_llama_cpp_s_llama_cannot_be_is_refused(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    dtype = changes.pop("dtype", "F32")
    with pytest.raises(ValueError, match=said):
        write_gguf(bundled_copy(tmp_path, **changes), tmp_path / "out" / "model.gguf", dtype)
    assert not (tmp_path / "out").exists()


def test_more_tokens_than_the_context_holds_are_refused(plain: Path, ids: list[int]) -> None:
    with GGUFModel(plain) as model:
        with pytest.raises(ValueError, match=r"1024 tokens.*512"):
            model.logprobs(ids, START)
        with pytest.raises(ValueError, match="start must be"):
            model.logprobs(ids[:1])


STATIC = [
    made
    for kind in list_methods("rope")
    for made in [kind.example(RopeGeometry.plain(64, 1250.0, 512), FACTOR)]
    if isinstance(made, RopeScaling) and not made.in_attention
]


@pytest.mark.parametrize("method", STATIC, ids=lambda method: method.name)
def test_a_written_file_is_read_and_extended_again(method: ContextMethod, plain: Path, tmp_path: Path) -> None:
    extend_gguf(plain, tmp_path / "once.gguf", method=method)
    assert context_of_gguf(tmp_path / "once.gguf").max_position_embeddings == FACTOR * 512
    again = extend_gguf(tmp_path / "once.gguf", tmp_path / "twice.gguf", factor=2, method="pi", existing="compose")
    assert again.target_length == 2 * FACTOR * 512


def test_describe_reads_a_gguf_file(plain: Path, tmp_path: Path) -> None:
    extend_gguf(plain, tmp_path / "out.gguf", FACTOR)
    description = describe_context(context_of_gguf(tmp_path / "out.gguf"))
    assert (description.scaling["name"], description.trained_length, description.reach) == ("yarn", 512, 2048)
    printed = CliRunner().invoke(commands, ["describe", str(tmp_path / "out.gguf")]).stdout
    assert "yarn ×4" in printed


def test_factors_without_the_length_before_them_are_not_replaced_from_a_guess(plain: Path, tmp_path: Path) -> None:
    """As llama.cpp's converter writes Llama 3.1 to 3.3: a tensor, and nothing of where it starts."""
    extend_gguf(plain, tmp_path / "marked.gguf", FACTOR, "llama3")
    reader, scaled = gguf.GGUFReader(tmp_path / "marked.gguf"), tmp_path / "scaled.gguf"
    writer = gguf.GGUFWriter(scaled, "llama")
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.arch", "llama.rope.scaling", "ctxext")):
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for existing in ("refuse", "replace"):
        with pytest.raises(ValueError, match=r"not hold its original length.*original_max_position_embeddings=8192"):
            extend_gguf(scaled, tmp_path / "out.gguf", 4, existing=existing)
    plan = extend_gguf(scaled, tmp_path / "out.gguf", 4, existing="replace", original_max_position_embeddings=512)
    assert (plan.original_length, plan.target_length) == (512, 2048)


def test_a_file_of_yarn_that_was_switched_on_has_the_length_that_it_reaches(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1250.0, "original_max_position_embeddings": 512}
    write_gguf(bundled_copy(tmp_path, rope_parameters=scaling), tmp_path / "model.gguf")
    assert Read(tmp_path / "model.gguf").fields["llama.context_length"] == 2048
