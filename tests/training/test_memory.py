"""The modelled memory of a fine-tune: the allocator's own count on a CPU, and what follows from the settings."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MistralConfig

from ctxext.assets import MODEL
from ctxext.training.documents import use_document_attention
from ctxext.training.loss import use_chunked_loss
from ctxext.training.memory import Memory, memory_of, report
from ctxext.training.settings import read_settings
from ctxext.training.tiled import use_tiled_mlp

TINY = Path(__file__).parents[2] / "recipes/configs/tiny_yarn_4x.yaml"
LORA = ("trainable={kind: lora, targets: attention}", "data.documents=joined", "training.micro_batch_size=1",
        "training.precision=bf16")  # fmt: skip
RECOMPUTED = "training.gradient_checkpointing=recompute"
SMALL = LlamaConfig(hidden_size=64, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4,
                    vocab_size=1000, tie_word_embeddings=False)  # fmt: skip


def modelled(*changes: str, length: int = 1024, config: Any = SMALL, device: str = "cuda") -> Memory:
    return memory_of(config, read_settings(TINY, [*LORA, *changes])[0], length, device=device)


def allocated(model: Any, *changes: str, length: int = 1024) -> tuple[int, Any]:
    """The most that a forward and backward pass of the model with LoRA allocates, in bytes; and that model."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    model = get_peft_model(model, LoraConfig(r=16, target_modules=targets, task_type="CAUSAL_LM"))
    use_document_attention(model)
    if "training.mlp_tokens=64" in changes:
        use_tiled_mlp(model, 64)
    if "training.loss=stock" not in changes:
        use_chunked_loss(model)
    if RECOMPUTED in changes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids, now, most = torch.zeros(1, length, dtype=torch.long), 0, 0
    model.train()
    gc.collect()  # what earlier tests left would be freed within, and lower the count
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most, model


@pytest.mark.parametrize(
    "changes", [(), (RECOMPUTED,), (RECOMPUTED, "training.mlp_tokens=64"), ("training.loss=stock",)]
)
def test_it_is_what_torch_allocates(changes: tuple[str, ...]) -> None:
    most, model = allocated(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32), *changes)
    config = AutoConfig.from_pretrained(MODEL)
    found = modelled(*changes, "training.precision=fp32", config=config, device="cpu")
    assert found.activations == pytest.approx(most, rel=0.15)
    assert found.weights == sum(parameter.nbytes for parameter in model.parameters())
    assert 2 * found.gradients == found.optimizer == 8 * sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("window", [256, 512, 1024])
def test_a_sliding_window_allocates_no_more_than_full_attention(window: int) -> None:
    sizes = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1000}
    config = MistralConfig(**sizes, intermediate_size=512, num_hidden_layers=2, sliding_window=window)
    most, _ = allocated(AutoModelForCausalLM.from_config(config), RECOMPUTED, length=2048)
    found = modelled(RECOMPUTED, "training.precision=fp32", config=config, length=2048, device="cpu")
    assert found.activations == pytest.approx(most, rel=0.15)


def test_each_setting_that_saves_memory_saves_activations_alone() -> None:
    tiles, offloaded = "training.mlp_tokens=16k", "training.gradient_checkpointing=offload"
    kept, recomputed, tiled, offloaded = (
        modelled(*changes, length=2**18) for changes in ((), (RECOMPUTED,), (RECOMPUTED, tiles), (offloaded, tiles))
    )
    assert kept.activations > recomputed.activations > tiled.activations > offloaded.activations
    assert len({(each.weights, each.gradients, each.optimizer) for each in (kept, recomputed, tiled, offloaded)}) == 1


def test_offloading_moves_the_input_of_each_layer_to_the_cpu() -> None:
    one, two = (modelled("training.gradient_checkpointing=offload", length=n) for n in (1024, 2048))
    inputs = SMALL.num_hidden_layers * 1024 * SMALL.hidden_size * 4  # of float32 embeddings
    assert inputs <= two.offloaded - one.offloaded <= 2 * inputs
    assert modelled(RECOMPUTED).offloaded == 0


def test_distillation_adds_the_last_hidden_states_of_another_pass() -> None:
    without, with_it = (modelled("data.documents=separate", f"training.distillation={share}") for share in (0, 0.5))
    assert with_it.activations - without.activations == 1024 * 64 * 2  # in bfloat16


def test_more_length_never_needs_less() -> None:
    peaks = [modelled(RECOMPUTED, length=length).peak for length in (256, 512, 1024, 1536, 2048)]
    assert peaks == sorted(set(peaks))


def test_fsdp2_divides_the_states_among_its_processes_and_ddp_does_not() -> None:
    full = "trainable={kind: full}"
    one, sharded, ddp = (
        modelled(full, f"engine={{kind: {kind}, processes: {n}}}")
        for kind, n in (("single", 1), ("fsdp2", 4), ("ddp", 4))
    )
    for part in ("weights", "gradients", "optimizer"):
        assert getattr(sharded, part) == pytest.approx(getattr(one, part) / 4, abs=4)
    assert (ddp.weights, ddp.optimizer) == (one.weights, one.optimizer)
    assert sharded.gathered > 0 == one.gathered == ddp.gathered


def test_tiles_go_with_lora_on_the_mlp_and_on_embeddings_under_autocast() -> None:
    everything = "trainable={kind: lora, targets: all-linear, embeddings: true, norms: true}"
    whole, tiled = (modelled(everything, RECOMPUTED, *more, length=2**14) for more in ((), ("training.mlp_tokens=1k",)))
    assert tiled.activations < whole.activations


def test_a_ring_divides_the_tokens() -> None:
    ring = modelled("trainable.dropout=0.0", "engine={kind: context_parallel, processes: 4, context_parallel_size: 4}")
    assert ring.activations == modelled("engine={kind: fsdp2, processes: 4}", length=256).activations
    with pytest.raises(ValueError, match="divisible by 8"):
        modelled("engine={kind: context_parallel, context_parallel_size: 4}", length=1028)


def test_the_scores_of_eager_attention_are_not_left_out_unsaid() -> None:
    with pytest.raises(ValueError, match=r"eager holds scores of tokens × tokens, .* Set it to sdpa, or measure with"):
        modelled("training.attention=eager")


def test_packed_documents_take_no_more_memory_than_joined_ones() -> None:
    joined, separate = (modelled(f"data.documents={how}", RECOMPUTED) for how in ("joined", "separate"))
    assert separate.activations == joined.activations


def test_four_bits_take_less_than_sixteen_and_leave_embeddings_alone() -> None:
    half, four = (modelled(f"trainable.quantization={how}") for how in ("null", "nf4"))
    linear = 2 * (4 * 64 * 64 + 3 * 64 * 1024)
    assert half.weights - four.weights == pytest.approx(linear * (2 - 0.5625), abs=1)


def test_what_fits_has_a_tenth_to_spare() -> None:
    assert Memory(21_600_000_000, 0, 0, 0, 0, 0).fits(24)
    assert not Memory(21_600_000_001, 0, 0, 0, 0, 0).fits(24)


@pytest.mark.slow
def test_the_report_names_what_saves_memory_most_first_and_loads_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    said: list[str] = []
    report(TINY, [*LORA, "data.length=1024", "training.loss=stock"], said.append)
    assert said[0] == "runs/tiny_yarn_4x: modelled memory per process of bundled, for rows of 1,024 tokens:"
    assert "Fits in 24, 48, 80 and 141 GB. Up to 90% of a card is used." in said
    assert not any("trainable={kind: lora}" in line for line in said)  # it is LoRA already
    assert any("offload" in line and "are moved to CPU memory" in line for line in said)
    saved = [float(line.split(" saves ")[1].split()[0]) for line in said if " saves " in line]
    assert saved == sorted(saved, reverse=True) != []
    assert any(line.strip().startswith(RECOMPUTED) for line in said)
