"""Files that state a nested text config flat, as Qwen2.5-VL's on the hub do."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText

from ctxext import extend_context
from ctxext.hub.checkpoint import extend_folder
from ctxext.models.text_config import path_to_text, text_config_of, text_section_of
from ctxext.utils.json_files import write_json

# All that transformers 5.23 has.
FLAT = ("qwen2_vl", "qwen2_5_vl", "fuyu", "paddleocr_vl", "hunyuan_vl", "dots3_note", "glm5_next")
STATED = {"vocab_size": 151_936, "intermediate_size": 320, "max_position_embeddings": 512, "rope_theta": 5e5}


@pytest.mark.parametrize("name", FLAT)
def test_a_part_that_is_added_holds_what_the_flat_file_stated(name: str) -> None:
    raw: dict[str, Any] = {"model_type": name, "num_hidden_layers": 6, **STATED}
    config = CONFIG_MAPPING[name].from_dict(copy.deepcopy(raw))
    section = text_section_of(raw, config)
    again = CONFIG_MAPPING[name].from_dict(copy.deepcopy(raw))
    ((part, _),) = path_to_text(config)
    assert raw[part] is section
    assert not {*raw} & {"rope_theta", "max_position_embeddings"}  # they would be read by nobody
    assert text_config_of(again).max_position_embeddings == 512
    assert text_config_of(again).to_dict() == text_config_of(config).to_dict()


def test_an_extended_copy_of_a_flat_vision_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    raw = {
        "model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"], "hidden_size": 64,
        "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
        "vocab_size": 512, "max_position_embeddings": 64, "rope_theta": 1e6, "bos_token_id": 1, "eos_token_id": 2,
        "sliding_window": 32_768, "use_sliding_window": False,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vision_config": {"hidden_size": 32, "depth": 1, "num_heads": 2, "intermediate_size": 32,
                          "out_hidden_size": 64, "fullatt_block_indexes": [0]},
    }  # fmt: skip
    write_json(tmp_path / "flat/config.json", raw)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(tmp_path / "flat"))
    model.save_pretrained(tmp_path / "flat")
    write_json(tmp_path / "flat/config.json", raw)  # as it is on the hub
    extend_folder(tmp_path / "flat", tmp_path / "extended", 4, "yarn", say=lambda _: None)
    # Before it is loaded: the class's defaults have 72 billion parameters.
    assert AutoConfig.from_pretrained(tmp_path / "extended").text_config.hidden_size == 64
    extended, told = AutoModelForImageTextToText.from_pretrained(tmp_path / "extended", output_loading_info=True)
    assert not any(told.values())
    extend_context(model.eval(), 4, "yarn")
    tokens = torch.arange(100)[None]
    with torch.no_grad():
        assert torch.equal(extended(tokens).logits, model(tokens).logits)
