"""A method in a file is the method."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from families import LENGTH, logits, tiny_model, token_ids

from ctxext import LongRoPE, YaRN, extend_context
from ctxext.extension.method_file import SavedMethod, opened, read_saved

# λ that no named method has, for the eight pairs of the tiny models.
FITTED = LongRoPE(
    factor=4, long_factor=(1, 1.1, 1.0, 1.5, 3, 2.5, 4, 3.5), attention_factor=1.07, fitted_to=(10_000.0, LENGTH)
)


@pytest.mark.parametrize("method", [YaRN(factor=4, beta_fast=16), FITTED], ids=["yarn", "fitted"])
def test_a_method_in_a_file_is_the_method(method: YaRN | LongRoPE, tmp_path: Path) -> None:
    path = tmp_path / "method.json"
    SavedMethod(method, {"model": "tiny"}).save(path)
    assert read_saved(path) == SavedMethod(method, {"model": "tiny"})
    by_file, by_instance = tiny_model("llama"), tiny_model("llama")
    extend_context(by_file, method=str(path))
    extend_context(by_instance, method=method)
    assert torch.equal(logits(by_file, token_ids(LENGTH)), logits(by_instance, token_ids(LENGTH)))


def test_factors_found_for_another_geometry_are_refused() -> None:
    model = tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 500_000.0})
    before = logits(model, token_ids(LENGTH))
    with pytest.raises(ValueError, match="theta 10000 trained at 64 tokens, but this one has theta 500000"):
        extend_context(model, method=FITTED)
    assert torch.equal(logits(model, token_ids(LENGTH)), before)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object"),
        ('{"fingerprint": "a", "input_ids": []}', r"method\.json holds no method\. Pass a file that `ctxext fit`"),
        ('{"method": {"name": "yarn"}}', r"lacks method\.factor"),
        ('{"method": {"name": "yarm", "factor": 4}}', "did you mean 'yarn'"),
        (
            json.dumps({"method": {**FITTED.to_dict(), "long_factor": [1.0] * 7 + [float("nan")]}}),
            r"finite numbers, such as \[1, 2.5\], got nan",
        ),
        (json.dumps({"method": {**FITTED.to_dict(), "long_factor": [1.0] * 7 + [0.0]}}), "finite numbers > 0"),
        (json.dumps({"method": {**FITTED.to_dict(), "long_factor": [1.0] * 7 + [-2.0]}}), "finite numbers > 0"),
        (json.dumps({"method": {**FITTED.to_dict(), "long_factor": [1.0] * 5}}), "5 numbers, but this model has 8"),
        (json.dumps({"method": {**FITTED.to_dict(), "attention_factor": 0}}), "attention_factor must be"),
    ],
)
def test_a_bad_file_is_refused_by_name(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "method.json"
    path.write_text(content)
    model = tiny_model("llama")
    before = logits(model, token_ids(LENGTH))
    with pytest.raises(ValueError, match=message):
        extend_context(model, method=str(path))
    assert torch.equal(logits(model, token_ids(LENGTH)), before)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        extend_context(model, method=str(tmp_path / "absent.json"))


def test_what_was_begun_does_not_stay_where_it_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "taken.json").mkdir()
    with pytest.raises(OSError, match="taken"):
        SavedMethod(YaRN(factor=4)).save(tmp_path / "taken.json")
    assert [path.name for path in tmp_path.iterdir()] == ["taken.json"]


def test_a_folder_is_no_method_and_the_hub_is_not_asked(tmp_path: Path) -> None:
    for path in (tmp_path, "./nowhere"):
        with pytest.raises(ValueError, match=r"is not a method\. Pass a name"):
            opened(str(path))
