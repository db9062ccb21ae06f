"""What is served: the bundled model, small random ones of other families with the same tokenizer, and SmolLM2; as they
are, and extended by each method, with what transformers makes of them."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ctxext.assets import MODEL, PERSUASION
from ctxext.export.probe import (
    FAR_TOKENS,
    MAX_TOKENS,
    TEXT,
    Probe,
    around,
    logprobs_of,
    long_text,
    make_probe,
    read_probe,
)
from ctxext.export.rules import EngineExport, export_for
from ctxext.extension.request import plan_extension
from ctxext.hub.checkpoint import extend_folder, read_config
from ctxext.methods import Llama3, LongRoPE, RopeScaling, YaRN, list_methods
from ctxext.models.context import read_context

sys.path.append(str(Path(__file__).parents[2] / "recipes"))
from smollm2 import fetch

RUNS = Path("runs/engines")
SMOLLM2 = Path("runs/SmolLM2-135M-Instruct")
FACTOR, TRAINED = 4, 512
TARGET = FACTOR * TRAINED
CHUNK = 4096  # tokens that transformers reads at once: their logits take memory
FOLDER, OVERRIDES = "extended folder", "unextended folder and overrides"

# What is served by mistake, by the method that is meant.
MISTAKES: dict[str, dict[str, RopeScaling]] = {
    "yarn": {"temperature removed": YaRN(factor=4.0, attention_factor=1.0),
             "factor 2": YaRN(factor=2.0), "factor 8": YaRN(factor=8.0)},
    "resonance": {},
    "llama3": {"factor 2": Llama3(factor=2.0), "factor 8": Llama3(factor=8.0)},
}  # fmt: skip

COMMON: dict[str, Any] = dict(
    vocab_size=4096, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=TRAINED, initializer_range=0.1, bos_token_id=0,
    eos_token_id=1, pad_token_id=1,
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "mistral_window": {"model_type": "mistral", "sliding_window": 1024},
    "qwen2": {},
    "qwen3": {},
    "phi3": {"original_max_position_embeddings": TRAINED, "sliding_window": None},
    # Its scalar is the head dimension in Gemma-3 up to 12B, and llama.cpp takes it so.
    "gemma3_text": {"sliding_window": 256, "num_hidden_layers": 6, "query_pre_attn_scalar": 64,
                    "layer_types": [*["sliding_attention"] * 5, "full_attention"]},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128,
                "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
    "deepseek_v3": {"q_lora_rank": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64,
                    "v_head_dim": 64, "head_dim": None, "num_key_value_heads": 4, "first_k_dense_replace": 2,
                    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
                    "moe_intermediate_size": 64},
    # As people have it: nested, with a vision model.
    "gemma3": {"vision_config": {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48,
                                 "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56, "patch_size": 14},
               "mm_tokens_per_image": 4, "boi_token_index": 4, "eoi_token_index": 5, "image_token_index": 6,
               "vocab_size": 4096},  # which mlx-lm reads there
}  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A model at ×4 of 512 tokens; SmolLM2 at ×2 of 8,192."""

    name: str

    @property
    def is_public(self) -> bool:
        return self.name == "smollm2"

    @property
    def trained(self) -> int:
        """Tokens."""
        return 8192 if self.is_public else TRAINED

    @property
    def target(self) -> int:
        """Tokens."""
        return self.trained * (2 if self.is_public else FACTOR)

    @cached_property
    def base(self) -> Path:
        """The unextended checkpoint."""
        if self.name == "bundled":
            return Path(os.path.relpath(MODEL))
        if self.is_public:
            fetch(SMOLLM2)
            return SMOLLM2
        folder = RUNS / self.name / "base"
        if not (folder / "model.safetensors").is_file():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(self._random_config(), dtype=torch.float32)
            model.save_pretrained(folder)
            AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
        return folder

    def _random_config(self) -> Any:
        more = FAMILIES[self.name]
        text = f"{self.name}_text" if "vision_config" in more else self.name
        values = {name: value for name, value in {**COMMON, **FAMILIES[text]}.items()
                  if value is not None or name == "sliding_window"}  # fmt: skip
        if text == self.name:
            return AutoConfig.for_model(values.pop("model_type", self.name), **values)
        return AutoConfig.for_model(self.name, **more, text_config={**values, "model_type": text})

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.base)

    @cached_property
    def methods(self) -> dict[str, RopeScaling]:
        """Every static method, and one that no formula gives."""
        rope = read_context(read_config(self.base)).rope
        factor = self.target / self.trained
        made = [method.example(rope, factor) for method in list_methods("rope")]
        static = {each.name: each for each in made if isinstance(each, RopeScaling) and not each.in_attention}
        wave = torch.linspace(0, 9, rope.dim // 2).sin() + torch.linspace(1, 3, rope.dim // 2)
        wavy = LongRoPE(factor=factor, attention_factor=1.07, long_factor=tuple(wave.clamp(min=0.9).tolist()))
        return {**static, "longrope": wavy}

    @cached_property
    def scalings(self) -> dict[str, RopeScaling]:
        """The methods, and what is served by mistake."""
        mistakes = {f"{method}, {name}": wrong for method, each in MISTAKES.items() for name, wrong in each.items()}
        return {**self.methods, **mistakes}

    def reach(self, method: str) -> int:
        """Tokens up to which a method is read: STRING covers less than twice the trained length."""
        return min(self.target, round(self.trained * self.methods[method].factor))

    def extended(self, method: str) -> Path:
        """The extended checkpoint."""
        folder = RUNS / self.name / method
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            extend_folder(self.base, folder, method=self.scalings[method], say=lambda line: None)
        return folder

    def export(self, engine: str, method: str, form: str) -> EngineExport:
        """Raises NotExportable."""
        config = read_config(self.base)
        if form == FOLDER:
            folder = self.extended(method)
            source = json.loads((folder / "config.json").read_text())
            return export_for(engine, read_config(folder), model=str(folder), source=source)
        plan = plan_extension(config, method=self.scalings[method])
        source = json.loads((self.base / "config.json").read_text())
        return export_for(engine, config, plan, model=str(self.base), source=source)

    # --------------------------------------------------------------------------------- by transformers

    def text(self) -> list[int]:
        """The long text of a probe, one token shorter than the target."""
        ids = self.tokenizer(TEXT).input_ids[:MAX_TOKENS]
        pieces = around(self.tokenizer, TEXT, ids)
        return long_text(ids, pieces["far_start"], pieces["far_end"], self.target)

    def loaded(self, method: str | None) -> Any:
        """By plain transformers, in float32; None: unextended."""
        folder = self.base if method is None else self.extended(method)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def reference(self, method: str | None) -> list[float]:
        """log p of each token of `text` but the first, by plain transformers in float32; None: unextended."""
        path = RUNS / self.name / f"{method or 'unextended'}.json"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(logprobs_of(self.loaded(method), self.text(), CHUNK).tolist()))
        return json.loads(path.read_text())

    def adapter(self, method: str) -> tuple[Path, torch.Tensor]:
        """A random LoRA adapter on the extended checkpoint, and log p of each token of `text` but the first with it."""
        folder = RUNS / self.name / f"{method} adapter"
        model = self.loaded(method)
        torch.manual_seed(0)
        lora = peft.LoraConfig(
            r=4,
            target_modules=["q_proj", "k_proj", "v_proj", "up_proj"],
            init_lora_weights=False,
            task_type="CAUSAL_LM",
        )
        adapted = peft.get_peft_model(model, lora).eval()
        adapted.save_pretrained(folder)
        return folder, logprobs_of(adapted, self.text(), CHUNK)

    def probe(self, method: str) -> Probe:
        """Raises ValueError if the method changes a short text too little to tell."""
        path = self.probe_path(method)
        if not path.is_file():
            made = make_probe(self.loaded(method), self.tokenizer, far=0 if self.is_public else None)
            if self.is_public:  # a second pass over its long text would take minutes
                made = replace(made, far={self.target: tuple(self.reference(method)[-FAR_TOKENS:])})
            made.save(path)
        return read_probe(path)

    def probe_path(self, method: str) -> Path:
        return RUNS / self.name / f"{method}.probe.json"

    def probe_of_novel(self, method: str, k: int) -> Probe | None:
        """A probe of another text, the k-th 5,000 characters of a novel; None if the method changes it too little."""
        path = RUNS / self.name / f"{method}.{k}.probe.json"
        if not path.is_file():
            model = self.loaded(method)
            text = PERSUASION.read_text(encoding="utf-8")[5000 * k : 5000 * (k + 1)]
            try:
                make_probe(model, self.tokenizer, text).save(path)
            except ValueError:
                return None
        return read_probe(path)
