"""Adapters that carry their rope: saved whole, loaded on the base that they were trained on, merged into it."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, from_config, logits, tiny_config, tiny_model, token_ids
from huggingface_hub import constants
from live import METHODS, arguments, rotary_of
from peft import LoraConfig, LoraModel, PeftModel, get_peft_model
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    BloomConfig,
    MptConfig,
    T5Config,
    T5ForConditionalGeneration,
)

import ctxext
from ctxext.assets import MODEL
from ctxext.extension.adapter_config import WARNING, plain_name
from ctxext.extension.metadata_file import weights_fingerprint
from ctxext.extension.peft_hooks import watch_peft
from ctxext.hub.adapters import (
    AdapterBase,
    check_all_saved,
    merge,
    save_trained,
    write_model_card,
    write_record,
)
from ctxext.hub.checkpoint import checkpoint_folder, extend_folder

IDS = torch.randint(2, 4096, (1, 96), generator=torch.Generator().manual_seed(0))
NORMS = ["input_layernorm", "post_attention_layernorm", "norm"]


def lora(**changes: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **changes})


# The trainable set: LoRA, with the tied embeddings and the norms whole.
LONG = dict(modules_to_save=[*NORMS, "embed_tokens"], ensure_weight_tying=True)


def trained(base: Path, config: LoraConfig, unfreeze: str | None = None, **how: Any) -> PeftModel:
    """A few real steps, with a rate that moves every trained parameter visibly."""
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, **how), config).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or (unfreeze is not None and unfreeze in name))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(3):
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


class Run:
    """A finished fine-tune: a copy of the bundled model, its extended base, and the adapter trained on that."""

    def __init__(self, folder: Path, config: LoraConfig, original: Path = MODEL) -> None:
        self.original, self.base, self.adapter = folder / "original", folder / "run/extended", folder / "run/adapter"
        shutil.copytree(original, self.original)
        extend_folder(self.original, self.base, 4)
        model = trained(self.base, config)
        self.logits = logits(model, IDS)
        self.record = AdapterBase.of(self.base, self.original, provenance={"tokens": 288})
        save_trained(model, self.adapter, self.record, AutoTokenizer.from_pretrained(self.original))

    def copy(self, folder: Path) -> Run:
        """For tests that change it. The extended base is left behind."""
        other = copy.copy(self)
        other.original, other.base, other.adapter = folder / "original", folder / "run/extended", folder / "run/adapter"
        shutil.copytree(self.original, other.original)
        shutil.copytree(self.adapter, other.adapter)
        other.record = replace(self.record, base=str(other.original), extended=str(other.base))
        write_record(other.adapter, other.record)
        return other


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("run"), lora(**LONG))


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ----------------------------------------------------------------------------------------- saving


def test_plain_peft_and_ctxext_give_the_trained_logits(run: Run) -> None:
    with pytest.warns(UserWarning, match=WARNING):
        plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(run.base), run.adapter).eval()
    assert torch.equal(logits(plain, IDS), run.logits)
    loaded = ctxext.load(run.adapter)
    assert not loaded.training
    assert torch.equal(logits(loaded, IDS), run.logits)
    base = AutoModelForCausalLM.from_pretrained(run.base).eval()
    assert (logits(base, IDS) - run.logits).abs().max() > 1  # or the training would be nothing to lose


def test_the_adapter_stores_no_base_and_says_what_it_was_trained_on(run: Run) -> None:
    with safe_open(run.adapter / "adapter_model.safetensors", "pt") as tensors:
        names = {name.rpartition("layers.")[2] for name in tensors.keys()}  # noqa: SIM118
    assert not any("mlp" in name or name.endswith("_proj.weight") for name in names)
    assert {"3.self_attn.v_proj.lora_B.weight", "3.input_layernorm.weight"} < names
    config = json.loads((run.adapter / "adapter_config.json").read_text())
    extended = "(extended by ctxext, yarn ×4: 512 → 2,048 tokens; load this adapter with ctxext.load)"
    assert config["base_model_name_or_path"] == f"../extended {extended}"
    assert json.loads((run.adapter / "ctxext.json").read_text())["extended"] == "../extended"
    record = AdapterBase.of_folder(run.adapter)
    assert record == run.record
    assert record.method["name"] == "yarn"
    assert (record.original_max_position_embeddings, record.max_position_embeddings) == (512, 2048)
    assert record.config["rope_parameters"] == AutoConfig.from_pretrained(run.base).rope_parameters
    assert record.provenance == {"tokens": 288}
    assert AutoTokenizer.from_pretrained(run.adapter).model_max_length == 2048


def test_the_adapter_of_a_base_elsewhere_names_it_absolutely(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the model was loaded by a path that means nothing elsewhere."""
    monkeypatch.chdir(run.base.parent)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained("extended"), lora())
    save_trained(model, tmp_path / "adapter", AdapterBase.of("extended", run.original))
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert plain_name(config["base_model_name_or_path"]) == str(run.base)


def cached(original: Path, cache: Path) -> Path:
    """The snapshot of owner/name in a cache of the hub, with the files of a folder."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = cache / "models--owner--name"
    shutil.copytree(original, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    return repository / "snapshots" / commit


# In a process that never imports ctxext, in another folder: by its own name of the base, on the base beside, on the
# unextended one.
PLAIN_PEFT = """
import json, sys, warnings
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM
adapter, extended, original, ids, logits = sys.argv[1:]
said = {}
for auto in (AutoPeftModelForCausalLM, AutoModelForCausalLM):
    try:
        auto.from_pretrained(adapter)
    except Exception as error:
        said[auto.__name__] = f"{type(error).__name__}: {error}"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(original), adapter)
said["warned"] = " ".join(str(warning.message) for warning in caught)
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(extended), adapter).eval()
with torch.no_grad():
    torch.save(model(input_ids=torch.load(ids)).logits, logits)
assert "ctxext" not in sys.modules
print(json.dumps(said))
"""


@pytest.mark.slow
@pytest.mark.parametrize("base", ["a folder beside it", "a model on the hub"])
def test_an_adapter_that_was_moved_is_loaded_right_or_refused_with_the_reason(
    base: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the real PEFT, after all folders of the run were moved, and only a cache of the hub is left."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before, after, original = tmp_path / "before", tmp_path / "after", run.original
    if base == "a model on the hub":
        original = cached(run.original, tmp_path / "cache")
    before.mkdir()
    extend_folder(original, before / "base", 4)
    record = AdapterBase.of(before / "base", original if base == "a model on the hub" else before / "base")
    save_trained(ctxext.load(run.adapter), before / "adapter", record)
    before.rename(after)
    monkeypatch.chdir(tmp_path)
    for file in after.rglob("*.json"):
        assert str(tmp_path) not in file.read_text(), file
    assert str(tmp_path) not in (after / "adapter/README.md").read_text()
    named = json.loads((after / "adapter/adapter_config.json").read_text())
    torch.save(IDS, tmp_path / "ids")
    folders = [after / "adapter", after / "base", original, tmp_path / "ids", tmp_path / "logits"]
    done = subprocess.run(
        [sys.executable, "-c", PLAIN_PEFT, *map(str, folders)], capture_output=True, text=True, check=True
    )
    said = json.loads(done.stdout)
    for auto in ("AutoPeftModelForCausalLM", "AutoModelForCausalLM"):
        assert "extended by ctxext, yarn ×4: 512 → 2,048 tokens; load this adapter with ctxext.load" in said[auto]
    assert WARNING in said["warned"]
    assert torch.equal(torch.load(tmp_path / "logits"), run.logits)
    assert torch.equal(logits(ctxext.load(after / "adapter"), IDS), run.logits)
    if base == "a model on the hub":
        assert plain_name(named["base_model_name_or_path"]) == "owner/name"
        assert named["revision"] == original.name
        shutil.rmtree(after / "base")
        assert torch.equal(logits(ctxext.load(after / "adapter"), IDS), run.logits)
    else:
        assert plain_name(named["base_model_name_or_path"]) == "../base"


def test_an_adapter_saved_again_is_loaded_right_or_refused(run: Run, tmp_path: Path) -> None:
    """After `ctxext.load` from the extended base, and after it extended the original."""
    ctxext.load(run.adapter).save_pretrained(tmp_path / "again")
    assert torch.equal(logits(ctxext.load(tmp_path / "again"), IDS), run.logits)
    other = run.copy(tmp_path)
    ctxext.load(other.adapter).save_pretrained(tmp_path / "run/again")
    with pytest.raises(ValueError, match=r"ctxext\.json, of ctxext finetune\) is missing\. Copy that file too"):
        ctxext.load(tmp_path / "run/again")
    shutil.copy(other.adapter / "ctxext.json", tmp_path / "run/again")
    assert torch.equal(logits(ctxext.load(tmp_path / "run/again"), IDS), run.logits)


def test_an_adapter_is_not_put_on_a_base_that_was_extended_in_another_way(run: Run, tmp_path: Path) -> None:
    """In a process that has extended a model; PEFT alone warns."""
    watch_peft()  # as any extension does
    extend_folder(run.original, tmp_path / "other", 8)
    for folder, state in ((run.original, "not extended"), (tmp_path / "other", "extended by yarn ×8")):
        model = AutoModelForCausalLM.from_pretrained(folder)
        with pytest.raises(ValueError, match=f"trained with yarn ×4.*but this model is {state}"):
            PeftModel.from_pretrained(model, run.adapter)


def test_norms_unfrozen_by_hand_are_refused_by_name(run: Run, tmp_path: Path) -> None:
    """PEFT would leave them out without a word."""
    model = trained(run.base, lora(), unfreeze="layernorm")
    with pytest.raises(ValueError, match=r"8 trained parameters would not be saved.*input_layernorm.*modules_to_save"):
        save_trained(model, tmp_path / "adapter", run.record)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "changes",
    [{}, LONG, {"modules_to_save": ["lm_head"]}, {"target_modules": ["embed_tokens"]}, {"bias": "all"}],
    ids=str,
)
def test_what_peft_saves_by_itself_is_not_refused(run: Run, changes: dict) -> None:
    check_all_saved(get_peft_model(AutoModelForCausalLM.from_pretrained(run.base), lora(**changes)))


def gathered(model: Any) -> dict[str, torch.Tensor]:
    """What is trained, as engines that shard a model hand it over: each tensor once, here all zeros."""
    return {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}


def test_a_gathered_state_is_saved_in_the_place_of_the_model_s_own(run: Run, tmp_path: Path) -> None:
    model = ctxext.load(run.adapter, is_trainable=True)
    save_trained(model, tmp_path / "adapter", run.record, state_dict=gathered(model))
    loaded = ctxext.load(tmp_path / "adapter").get_base_model()
    assert not loaded.model.norm.weight.any()
    assert not loaded.model.embed_tokens.weight.any()


def test_a_model_trained_whole_is_a_plain_extended_checkpoint(run: Run, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(run.base).eval()
    with torch.no_grad():
        model.model.norm.weight.mul_(1.1)
    save_trained(model, tmp_path / "model", run.record, AutoTokenizer.from_pretrained(MODEL))
    assert torch.equal(logits(ctxext.load(tmp_path / "model"), IDS), logits(model, IDS))
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert config["rope_parameters"] == config["rope_scaling"] == run.record.config["rope_parameters"]
    assert AutoTokenizer.from_pretrained(tmp_path / "model").model_max_length == 2048
    assert AdapterBase.of_folder(tmp_path / "model") == run.record
    save_trained(model, tmp_path / "model", run.record, state_dict=gathered(model))
    assert not any(parameter.any() for parameter in ctxext.load(tmp_path / "model").parameters())


# RLIMIT_FSIZE stands for a full disk: a write beyond 100 kB fails, of whatever library.
FULL_DISK = """
import resource, sys
from pathlib import Path
import ctxext
from ctxext.hub.adapters import AdapterBase, save_trained
adapter = Path(sys.argv[1])
model = ctxext.load(adapter, is_trainable=True)
for parameter in model.parameters():
    parameter.data.zero_()
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    save_trained(model, adapter, AdapterBase.of_folder(adapter))
except Exception as error:
    print("refused:", type(error).__name__)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no RLIMIT_FSIZE there")
def test_a_full_disk_leaves_the_former_adapter_whole(run: Run, tmp_path: Path) -> None:
    other = run.copy(tmp_path)
    before = files_of(tmp_path)
    script = [sys.executable, "-c", FULL_DISK, str(other.adapter)]
    done = subprocess.run(script, capture_output=True, text=True)
    assert "refused:" in done.stdout, done.stderr
    assert files_of(tmp_path) == before


def test_saving_again_replaces_the_adapter(run: Run, tmp_path: Path) -> None:
    other = run.copy(tmp_path)
    model = ctxext.load(other.adapter, is_trainable=True)
    with torch.no_grad():
        model.get_base_model().model.norm.modules_to_save["default"].weight.zero_()
    (other.adapter / "stale").touch()
    save_trained(model, other.adapter, other.record)
    assert not logits(ctxext.load(other.adapter), IDS).any()
    assert not (other.adapter / "stale").exists()
    assert [path.name for path in other.adapter.parent.iterdir()] == ["adapter"]


# ---------------------------------------------------------------------------------------- loading


def test_without_its_extended_base_the_adapter_extends_the_original_itself(run: Run, tmp_path: Path) -> None:
    other = run.copy(tmp_path)
    assert not other.base.exists()
    loaded = ctxext.load(other.adapter)
    assert torch.equal(logits(loaded, IDS), run.logits)
    assert loaded.config.max_position_embeddings == 2048


def test_on_the_base_that_was_not_extended_an_adapter_is_another_model(run: Run, tmp_path: Path) -> None:
    """Trap 5: PEFT puts one of its own there without a word, and a config.json beside it would not be read."""
    own = shutil.copytree(run.adapter, tmp_path / "adapter")
    config = json.loads((own / "adapter_config.json").read_text()) | {"base_model_name_or_path": str(run.base)}
    (own / "adapter_config.json").write_text(json.dumps(config))
    wrong = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(run.original), own).eval()
    assert (logits(wrong, IDS) - run.logits).abs().max() > 0.1
    assert torch.equal(logits(ctxext.load(run.adapter), IDS), run.logits)


def test_a_rope_edited_after_loading_changes_nothing(run: Run) -> None:
    """Trap 4, the reason for extending the config before the weights are loaded."""
    model = AutoModelForCausalLM.from_pretrained(run.original).eval()
    before = logits(model, IDS)
    model.config.rope_parameters = run.record.config["rope_parameters"]
    assert torch.equal(logits(model, IDS), before)


@pytest.mark.parametrize("place", ["run/adapter/base", "run/base", "base"])
def test_a_base_in_beside_or_above_the_adapter_is_found(run: Run, tmp_path: Path, place: str) -> None:
    other = run.copy(tmp_path)
    shutil.rmtree(other.original)
    shutil.copytree(run.base, tmp_path / place)
    assert torch.equal(logits(ctxext.load(other.adapter), IDS), run.logits)


def test_a_base_extended_in_another_way_is_passed_over(run: Run, tmp_path: Path) -> None:
    other = run.copy(tmp_path)
    extend_folder(other.original, other.base, 8, "ntk")
    assert torch.equal(logits(ctxext.load(other.adapter), IDS), run.logits)


def test_a_base_of_other_weights_is_refused(run: Run, tmp_path: Path) -> None:
    other = run.copy(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(other.original)
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.mul_(1.01)
    shutil.rmtree(other.original)
    model.save_pretrained(other.original)
    with pytest.raises(ValueError, match=r"was changed\. Searched:(\n.*)+original: other weights\nPut the extended"):
        ctxext.load(other.adapter)


def test_a_base_that_was_saved_in_another_dtype_is_refused_by_its_dtype(run: Run, tmp_path: Path) -> None:
    other = run.copy(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(other.original, dtype=torch.bfloat16)
    shutil.rmtree(other.original)
    model.save_pretrained(other.original)
    with pytest.raises(ValueError, match=r"original: bfloat16 weights instead of float32\nPut .* pass dtype="):
        ctxext.load(other.adapter)


def test_a_lost_base_is_reported_with_all_places(run: Run, tmp_path: Path) -> None:
    other = run.copy(tmp_path)
    shutil.rmtree(other.original)
    with pytest.raises(FileNotFoundError, match="not found") as error:
        ctxext.load(other.adapter)
    for place in (other.base, other.adapter / "base", tmp_path / "run/base", tmp_path / "base", other.original):
        assert str(place) in str(error.value)


def test_a_model_that_reads_its_rope_in_another_way_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a version of transformers might that ignores a key."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    native = ROPE_INIT_FUNCTIONS["yarn"]

    def another(*args: Any, **kwargs: Any) -> Any:
        inv_freq, factor = native(*args, **kwargs)
        return inv_freq * 1.001, factor

    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "yarn", another)
    with pytest.raises(RuntimeError, match=r"differ from ctxext\.json \(relative error 1\.0e-03\)"):
        ctxext.load(run.adapter)


def test_an_adapter_of_peft_alone_loads_on_the_base_that_it_names(run: Run, tmp_path: Path) -> None:
    model = trained(run.base, lora())
    model.save_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(ctxext.load(tmp_path / "adapter"), IDS), logits(model, IDS))


def test_an_adapter_of_a_plain_base_loads_with_a_warning(tmp_path: Path) -> None:
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(MODEL), lora())
    model.save_pretrained(tmp_path / "adapter")
    with pytest.warns(UserWarning, match=r"is not extended \(plain RoPE, 512 tokens\)"):
        ctxext.load(tmp_path / "adapter")


def test_a_folder_of_a_model_loads_as_that_model(run: Run) -> None:
    expected = logits(AutoModelForCausalLM.from_pretrained(run.base).eval(), IDS)
    assert torch.equal(logits(ctxext.load(run.base), IDS), expected)


def test_what_is_neither_adapter_nor_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neither an adapter"):
        ctxext.load(tmp_path)


def test_the_folder_of_a_run_points_to_what_it_contains(run: Run) -> None:
    for command in (ctxext.load, lambda folder: merge(folder, "merged"), lambda folder: checkpoint_folder(str(folder))):
        with pytest.raises(FileNotFoundError, match=rf"Pass one of the checkpoints in it: {run.adapter}, {run.base}\."):
            command(run.adapter.parent)


def test_a_misspelt_path_is_answered_by_its_neighbour(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it could be a hub name."""
    monkeypatch.chdir(run.adapter.parents[1])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("run/adaptr", "./run/adaptr", str(run.adapter.with_name("adaptr"))):
        with pytest.raises(FileNotFoundError, match=r"Did you mean '.*run/adapter'\?"):
            merge(name, tmp_path / "merged")


def test_a_record_of_another_version_is_refused(run: Run, tmp_path: Path) -> None:
    other = run.copy(tmp_path)
    values = asdict(other.record) | {"news": 1, "version": "9.0"}
    (other.adapter / "ctxext.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"unknown: 'news'; written by version '9\.0'"):
        ctxext.load(other.adapter)


def test_a_loaded_adapter_is_frozen_unless_it_is_to_be_trained_on(run: Run) -> None:
    assert not any(p.requires_grad for p in ctxext.load(run.adapter).parameters())
    model = ctxext.load(run.adapter, is_trainable=True)
    assert any(p.requires_grad for p in model.parameters())
    assert not model.training


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_s_original_base_is_extended_as_its_folder_was(family: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path / "original")
    extend_folder(tmp_path / "original", tmp_path / "extended", 4)
    _check_original_base(tmp_path)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_brought_back_on_the_original_base(method: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "original")
    extend_folder(tmp_path / "original", tmp_path / "extended", **arguments(method, model))
    _check_original_base(tmp_path)


def _check_original_base(folder: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder / "extended").eval()
    expected = logits(base, token_ids(150))
    model = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    save_trained(model, folder / "adapter", AdapterBase.of(folder / "extended", folder / "original"))
    shutil.rmtree(folder / "extended")
    assert torch.equal(logits(ctxext.load(folder / "adapter"), token_ids(150)), expected)


def test_the_fingerprint_is_of_the_weights_however_they_are_sharded(run: Run, tmp_path: Path) -> None:
    assert weights_fingerprint(run.base) == weights_fingerprint(run.original) == run.record.fingerprint
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    model.save_pretrained(tmp_path / "shards", max_shard_size="5MB")
    shards = sorted((tmp_path / "shards").glob("*.safetensors"))
    assert len(shards) > 1
    shards[0].rename(shards[0].with_name("z.safetensors"))
    index = tmp_path / "shards" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(shards[0].name, "z.safetensors"))
    assert weights_fingerprint(tmp_path / "shards") == run.record.fingerprint
    model.to(torch.bfloat16).save_pretrained(tmp_path / "cast")
    assert weights_fingerprint(tmp_path / "cast") != run.record.fingerprint


def test_a_cast_rounds_the_frequencies_of_a_stock_model_and_not_of_one_extended_live(run: Run) -> None:
    """Trap 8: casts belong into from_pretrained(dtype=...), which keeps them."""
    stock = AutoModelForCausalLM.from_pretrained(run.base)
    exact = rotary_of(stock).inv_freq.clone()
    assert rotary_of(stock.to(torch.bfloat16)).inv_freq.dtype == torch.bfloat16
    live = ctxext.extend_context(AutoModelForCausalLM.from_pretrained(MODEL)).to(torch.bfloat16)
    assert torch.equal(rotary_of(live).inv_freq, exact)
    loaded = ctxext.load(run.adapter, dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(rotary_of(loaded).inv_freq, exact)


# ---------------------------------------------------------------------------------------- merging

PLAIN_RELOAD = """
import sys
sys.modules["ctxext"] = sys.modules["peft"] = None
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
assert model.lm_head.weight is model.model.embed_tokens.weight
assert AutoTokenizer.from_pretrained(sys.argv[1]).model_max_length == 2048
with torch.no_grad():
    torch.save(model(input_ids=torch.load(sys.argv[2])).logits, sys.argv[3])
"""


@pytest.mark.slow
def test_a_merged_model_is_plain_extended_and_the_same(run: Run, tmp_path: Path) -> None:
    """In a process where ctxext and PEFT cannot be imported."""
    assert merge(run.adapter, tmp_path / "merged") == tmp_path / "merged"
    torch.save(IDS, tmp_path / "ids.pt")
    arguments = [tmp_path / "merged", tmp_path / "ids.pt", tmp_path / "logits.pt"]
    subprocess.run([sys.executable, "-c", PLAIN_RELOAD, *map(str, arguments)], check=True)
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), run.logits, rtol=1e-5, atol=2e-5)
    config = json.loads((tmp_path / "merged/config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == config["rope_scaling"]["rope_type"] == "yarn"
    assert config["max_position_embeddings"] == 2048
    assert (tmp_path / "merged/generation_config.json").is_file()
    assert "lora" not in (tmp_path / "merged/README.md").read_text()


def test_a_merge_in_bfloat16_rounds_once(run: Run, tmp_path: Path) -> None:
    exact = AutoModelForCausalLM.from_pretrained(merge(run.adapter, tmp_path / "exact"))
    rounded = AutoModelForCausalLM.from_pretrained(merge(run.adapter, tmp_path / "rounded", "bfloat16"))
    for name, parameter in rounded.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, exact.get_parameter(name).to(torch.bfloat16)), name


@pytest.mark.parametrize(
    ("changes", "tied"),
    [({"modules_to_save": ["embed_tokens"]}, False), ({"modules_to_save": ["lm_head"]}, False), ({}, True)],
    ids=str,
)
def test_embeddings_trained_on_one_side_are_untied_by_the_merge(
    run: Run, tmp_path: Path, changes: dict, tied: bool
) -> None:
    other = Run(tmp_path, lora(**changes))
    merged = AutoModelForCausalLM.from_pretrained(merge(other.adapter, tmp_path / "merged")).eval()
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) is tied
    torch.testing.assert_close(logits(merged, IDS), other.logits, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("more", [{}, {"ensure_weight_tying": True}], ids=str)
@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_lora_on_a_tied_embedding_is_not_merged(target: str, more: dict, tmp_path: Path) -> None:
    """Trap 7: one matrix would take a change that was trained for one of its two uses."""
    other = Run(tmp_path, lora(target_modules=["q_proj", target], **more))
    assert torch.equal(logits(ctxext.load(other.adapter), IDS), other.logits)  # unmerged it works
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match=rf"{target}.* is tied.*ensure_weight_tying=True"):
        merge(other.adapter, tmp_path / "merged")
    assert files_of(tmp_path) == before


def test_a_merge_that_is_not_the_adapter_is_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reason: here one norm is not what was trained."""
    faithful = LoraModel.merge_and_unload

    def unfaithful(self: Any, **kwargs: Any) -> Any:
        model = faithful(self, **kwargs)
        model.model.layers[3].input_layernorm.weight.data.mul_(1.01)
        return model

    monkeypatch.setattr(LoraModel, "merge_and_unload", unfaithful)
    with pytest.raises(RuntimeError, match="merging changed the model"):
        merge(run.adapter, tmp_path / "merged")
    assert list(tmp_path.iterdir()) == []


def test_a_merged_folder_that_lost_its_weights_is_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lossy(model: Any, folder: Path) -> None:
        model.model.embed_tokens.weight.data.mul_(1.1)
        model.save_pretrained(folder)

    monkeypatch.setattr("ctxext.hub.adapters.save_portable", lossy)
    with pytest.raises(RuntimeError, match="writing it in float32 changed the model"):
        merge(run.adapter, tmp_path / "merged")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bf16", torch.int8])
def test_a_merge_in_other_types_is_refused(run: Run, tmp_path: Path, dtype: Any) -> None:
    with pytest.raises(ValueError, match="dtype must be one of float32, float16, bfloat16"):
        merge(run.adapter, tmp_path / "merged", dtype)


def test_merging_refuses_an_existing_folder_and_what_is_no_adapter(run: Run, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="already exists"):
        merge(run.adapter, tmp_path)
    with pytest.raises(ValueError, match="not an adapter"):
        merge(run.base, tmp_path / "merged")


def test_an_adapter_trained_on_a_base_quantised_at_load_merges_onto_the_base_as_stored(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    extend_folder(MODEL, tmp_path / "extended", 4)
    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = trained(tmp_path / "extended", lora(), quantization_config=four_bit)
    save_trained(model, tmp_path / "adapter", AdapterBase.of(tmp_path / "extended", MODEL))
    merged = AutoModelForCausalLM.from_pretrained(merge(tmp_path / "adapter", tmp_path / "merged")).eval()
    expected = logits(ctxext.load(tmp_path / "adapter"), IDS)
    torch.testing.assert_close(logits(merged, IDS), expected, rtol=1e-5, atol=2e-5)


def test_a_base_stored_quantised_is_not_merged_into(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    AutoModelForCausalLM.from_pretrained(MODEL, quantization_config=four_bit).save_pretrained(tmp_path / "quantised")
    extend_folder(tmp_path / "quantised", tmp_path / "extended", 4)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "extended"), lora())
    save_trained(model, tmp_path / "adapter", AdapterBase.of(tmp_path / "extended", tmp_path / "quantised"))
    with pytest.raises(ValueError, match="stored quantised"):
        merge(tmp_path / "adapter", tmp_path / "merged")


SIZES = {
    "bloom": BloomConfig(vocab_size=4096, hidden_size=32, n_layer=2, n_head=4),
    "mpt": MptConfig(vocab_size=4096, d_model=32, n_layers=2, n_heads=4, max_seq_len=96),
    "t5": T5Config(vocab_size=4096, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0),
}
TARGETS = {"bloom": ["query_key_value"], "mpt": ["Wqkv"], "t5": ["q", "v"]}


def without_rope(family: str, folder: Path, extended: bool = True) -> Any:
    """A tiny model of a family without RoPE, saved with a tokenizer in `folder`, and loaded extended from there."""
    cls = T5ForConditionalGeneration if family == "t5" else AutoModelForCausalLM
    torch.manual_seed(0)
    (cls(SIZES[family]) if family == "t5" else cls.from_config(SIZES[family])).save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    length = {} if family == "mpt" else {"original_max_position_embeddings": 512}
    model = cls.from_pretrained(folder)
    return ctxext.extend_context(model, 4, **length) if extended else model


def on(model: Any, family: str) -> Any:
    kind = "SEQ_2_SEQ_LM" if family == "t5" else "CAUSAL_LM"
    return get_peft_model(model, lora(target_modules=TARGETS[family], task_type=kind, init_lora_weights=False)).eval()


def answers(model: Any) -> torch.Tensor:
    return logits(model, IDS, **({"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}))


@pytest.mark.filterwarnings("ignore:.*saved without it")
@pytest.mark.parametrize("extended", [True, False])
@pytest.mark.parametrize("family", SIZES)
def test_adapters_of_families_without_rope_load_and_merge(family: str, extended: bool, tmp_path: Path) -> None:
    """BLOOM and T5 have no length in their configs, and T5 is no causal model."""
    model = on(without_rope(family, tmp_path / "base", extended), family)
    model.save_pretrained(tmp_path / "adapter")
    assert torch.equal(answers(ctxext.load(tmp_path / "adapter")), answers(model))
    merged = ctxext.load(merge(tmp_path / "adapter", tmp_path / "merged"))
    torch.testing.assert_close(answers(merged), answers(model), rtol=1e-5, atol=2e-5)
    length = 2048 if extended and family != "mpt" else 512
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").model_max_length == length


def test_a_t5_adapter_trained_on_an_extended_folder_is_saved_and_loaded(tmp_path: Path) -> None:
    without_rope("t5", tmp_path / "original")
    base = tmp_path / "run/extended"
    extend_folder(tmp_path / "original", base, 4, original_max_position_embeddings=512)
    model, record = on(T5ForConditionalGeneration.from_pretrained(base), "t5"), AdapterBase.of(base, "t5")
    save_trained(model, tmp_path / "run/adapter", record, AutoTokenizer.from_pretrained(MODEL))
    assert AutoTokenizer.from_pretrained(tmp_path / "run/adapter").model_max_length == 2048
    assert torch.equal(answers(ctxext.load(tmp_path / "run/adapter")), answers(model))
    shutil.rmtree(base)
    shutil.copytree(tmp_path / "original", base)  # the same weights, unextended
    with pytest.raises(FileNotFoundError, match=r"extended: its extension differs from ctxext\.json"):
        ctxext.load(tmp_path / "run/adapter")


def test_a_base_without_length_and_extension_gets_no_record(tmp_path: Path) -> None:
    without_rope("bloom", tmp_path / "base")
    with pytest.raises(ValueError, match=r"config\.json has no maximum length and no extension\. Extend the model"):
        AdapterBase.of(tmp_path / "base", tmp_path / "base")


def test_an_untied_model_merges_with_lora_on_its_head(tmp_path: Path) -> None:
    from_config(tiny_config("llama", tie_word_embeddings=False)).save_pretrained(tmp_path / "original")
    extend_folder(tmp_path / "original", tmp_path / "extended", 4)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "extended"),
        lora(target_modules=["lm_head"], init_lora_weights=False),
    ).eval()
    save_trained(model, tmp_path / "adapter", AdapterBase.of(tmp_path / "extended", tmp_path / "original"))
    merged = AutoModelForCausalLM.from_pretrained(merge(tmp_path / "adapter", tmp_path / "merged")).eval()
    torch.testing.assert_close(logits(merged, token_ids(150)), logits(model, token_ids(150)), rtol=1e-5, atol=2e-5)


# ----------------------------------------------------------------------------------- the model card


def test_the_card_s_ways_of_loading_work(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "path/to/this").mkdir(parents=True)
    (tmp_path / "path/to/original").symlink_to(run.original)
    (tmp_path / "path/to/this/folder").symlink_to(run.adapter)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", (run.adapter / "README.md").read_text(), re.S | re.M)
    assert len(blocks) == 2
    for block in blocks:
        scope: dict[str, Any] = {}
        exec(block, scope)
        assert torch.equal(logits(scope["model"], IDS), run.logits)


def test_nothing_in_the_provenance_breaks_out_of_the_card(run: Run, tmp_path: Path) -> None:
    awkward = {"settings": {"note": "```\n\n# | <b> \\ é", "deep": [{"a": "~~~"}]}, "figures": {"base": {"a": 1}}}
    text = write_model_card(tmp_path, replace(run.record, provenance=awkward)).read_text()
    extension, training = (json.loads(block) for block in re.findall(r"^```json\n(.*?)^```$", text, re.S | re.M))
    assert extension["rope_parameters"] == run.record.config["rope_parameters"]
    assert training == {"settings": awkward["settings"]}


def test_the_card_shows_the_figures_given_and_no_others(run: Run, tmp_path: Path) -> None:
    figures = {
        "base": {"perplexity": 74.31234},
        "before | after": {"perplexity": 73.0, "passkey <at> 2,048\n": "100% [72, 100]", "loss": None},
        "after": {"tokens": 1_234_567.0},
    }
    text = write_model_card(tmp_path, run.record, figures).read_text()
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert table == [
        "| | perplexity | passkey &lt;at&gt; 2,048 | loss | tokens |",
        "|---|---|---|---|---|",
        "| base | 74.31 |  |  |  |",
        "| before \\| after | 73 | 100% [72, 100] |  |  |",
        "| after |  |  |  | 1,234,567 |",
    ]
    assert "## Measured" not in (run.adapter / "README.md").read_text()


def test_figures_stay_with_the_adapter_and_its_merged_model(run: Run, tmp_path: Path) -> None:
    other = run.copy(tmp_path)
    write_record(other.adapter, other.record, {"after": {"perplexity": 73.5}})
    kept = AdapterBase.of_folder(other.adapter)
    assert kept == replace(other.record, provenance={"tokens": 288, "figures": {"after": {"perplexity": 73.5}}})
    for folder in (other.adapter, merge(other.adapter, tmp_path / "merged")):
        assert "| after | 73.5 |" in (folder / "README.md").read_text()


@pytest.mark.parametrize(("base", "expected"), [("owner/name", "owner/name"), ("/home/me/name", None)])
def test_the_card_s_front_matter_is_yaml_and_names_no_folder(
    run: Run, tmp_path: Path, base: str, expected: str | None
) -> None:
    import yaml

    text = write_model_card(tmp_path, replace(run.record, base=base)).read_text()
    front = yaml.safe_load(text.split("---\n")[1])
    assert front.get("base_model") == expected
    assert front["library_name"] == "transformers"  # no adapter in this folder
    assert front["tags"] == ["ctxext", "long-context", "yarn"]
    assert "/home/me" not in text
    adapter = yaml.safe_load((run.adapter / "README.md").read_text().split("---\n")[1])
    assert adapter["library_name"] == "peft"
    assert "lora" in adapter["tags"]


def test_an_adapter_that_names_no_base_is_found_by_its_record_or_told(run: Run, tmp_path: Path) -> None:
    folder = shutil.copytree(run.adapter, tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    (folder / "base").mkdir()
    shutil.copy(run.base / "config.json", folder / "base")  # of the same config, and no weights
    assert torch.equal(logits(ctxext.load(folder), IDS), logits(ctxext.load(run.adapter), IDS))
    (folder / "ctxext.json").unlink()
    with pytest.raises(ValueError, match="names no base model"):
        ctxext.load(folder)
