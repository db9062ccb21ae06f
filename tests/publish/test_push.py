"""Models and extensions pushed to the hub and fetched from it, against a stand-in that speaks its protocol."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers.utils.hub
from families import logits, tiny_config, tiny_model, token_ids
from hub import Fault, LocalHub
from huggingface_hub import ModelCard, constants
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import ctxext
from ctxext.assets import MODEL, PERSUASION
from ctxext.cli import commands
from ctxext.evals.choice import nats
from ctxext.evals.results import read_results
from ctxext.evals.summary import Summary
from ctxext.evals.targets import compared_variants
from ctxext.extension.metadata_file import RECORD
from ctxext.extension.method_file import SavedMethod, read_saved
from ctxext.hub.adapters import AdapterBase, merge, save_trained
from ctxext.hub.checkpoint import checkpoint_folder, extend_folder
from ctxext.methods import LongRoPE, YaRN, make_method
from ctxext.publish.push import BEGIN, END, prepared, push_to_hub

IDS = token_ids(150)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalHub]:
    """An empty hub, to which everything in this process speaks as Ada."""
    with LocalHub() as hub:
        # huggingface_hub reads its settings as it is imported.
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)
        monkeypatch.setenv("HF_TOKEN", "token-of-ada")
        yield hub


@pytest.fixture
def base(tmp_path: Path, hub: LocalHub) -> Path:
    """An unextended model here, which the hub has as meta/tiny."""
    tiny_model("llama").save_pretrained(tmp_path / "base")
    (tmp_path / "base/README.md").write_text("---\nlicense: other\nlicense_name: tiny-1\n---\n# Tiny\n\nFor tests.\n")
    hub.create("meta/tiny", {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()})
    return tmp_path / "base"


@pytest.fixture
def extended(base: Path, tmp_path: Path) -> Path:
    extend_folder(base, tmp_path / "extended", 4, "yarn")
    (tmp_path / "extended/README.md").unlink()
    return tmp_path / "extended"


def run(*command: str) -> None:
    commands(list(command), standalone_mode=False)


def card_of(hub: LocalHub, name: str) -> ModelCard:
    return ModelCard(hub.repositories[name].files()["README.md"].decode())


# ------------------------------------------------------------------------------------------- there and back


@pytest.mark.slow
def test_a_pushed_model_is_loaded_by_its_name_without_ctxext(extended: Path, hub: LocalHub, tmp_path: Path) -> None:
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "home")}
    run("push", str(extended), "ada/tiny-256", "--base-model", "meta/tiny", "--private")
    assert hub.repositories["ada/tiny-256"].private
    code = (
        "import sys, torch; sys.modules['ctxext'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained('ada/tiny-256').eval()\n"
        f"torch.save(model(input_ids=torch.load(r'{tmp_path}/ids')).logits, r'{tmp_path}/logits')"
    )
    torch.save(IDS, tmp_path / "ids")
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    live = ctxext.extend_context(tiny_model("llama"), 4, "yarn")
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "logits"), live(input_ids=IDS).logits)


@pytest.mark.parametrize("method", ["yarn", "self_extend"])
def test_a_pushed_live_model_comes_back_by_load(method: str, base: Path, hub: LocalHub) -> None:
    model = ctxext.extend_context(AutoModelForCausalLM.from_pretrained("meta/tiny").eval(), 4, method)
    push_to_hub(model, "ada/tiny", revision="long")
    files = hub.repositories["ada/tiny"].files("long")
    assert (RECORD in files) == (method == "self_extend")
    assert "config.json" not in hub.repositories["ada/tiny"].files("main")
    card = ModelCard(files["README.md"].decode())
    assert card.data.base_model == "meta/tiny"
    assert card.data.library_name == ("ctxext" if method == "self_extend" else "transformers")
    assert torch.equal(logits(ctxext.load("ada/tiny", revision="long"), IDS), logits(model, IDS))


@pytest.mark.parametrize("method", ["yarn", "ntk", "dynamic_yarn", "self_extend"])
def test_an_extension_alone_gives_the_same_logits_on_its_base(
    method: str, base: Path, hub: LocalHub, tmp_path: Path
) -> None:
    SavedMethod(make_method(method, 4)).save(tmp_path / "method.json")
    push_to_hub(tmp_path / "method.json", "ada/alone", base_model="meta/tiny")
    files = hub.repositories["ada/alone"].files()
    assert files.keys() == {".gitattributes", "README.md", RECORD}
    assert sum(map(len, files.values())) < 5000
    live = ctxext.extend_context(AutoModelForCausalLM.from_pretrained("meta/tiny").eval(), 4, method)
    assert torch.equal(logits(ctxext.load("ada/alone"), IDS), logits(live, IDS))


def test_the_card_of_fitted_factors_says_that_they_were_fitted(base: Path, hub: LocalHub, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(base)
    fitted_to = (config.rope_parameters["rope_theta"], config.max_position_embeddings)
    SavedMethod(LongRoPE(factor=4.0, long_factor=(2.0,) * 8, fitted_to=fitted_to)).save(tmp_path / "fitted.json")
    run("extend", str(base), "--method", str(tmp_path / "fitted.json"), "--output", str(tmp_path / "out"))
    assert ctxext.describe_context(AutoConfig.from_pretrained(tmp_path / "out")).summary.startswith(
        "longrope (fitted by ctxext fit) ×4: "
    )
    push_to_hub(tmp_path / "out", "ada/fitted", base_model="meta/tiny")
    assert "extended by `longrope (fitted by ctxext fit)` (" in card_of(hub, "ada/fitted").text


def test_a_saved_method_is_pushed_and_named_as_a_method(base: Path, hub: LocalHub, tmp_path: Path) -> None:
    method = LongRoPE(factor=4.0, long_factor=(1.0, 1.1, 1.0, 1.7, 2.5, 2.0, 4.0, 5.0), attention_factor=1.07)
    SavedMethod(method, {"found": "by hand"}).save(tmp_path / "fitted.json")
    run("push", str(tmp_path / "fitted.json"), "ada/fitted", "--base-model", "meta/tiny")
    assert '"found": "by hand"' in card_of(hub, "ada/fitted").text
    live = ctxext.extend_context(ctxext.load(base), method=method)
    named = ctxext.extend_context(ctxext.load(base), method="ada/fitted")
    run("extend", str(base), "--method", "ada/fitted", "--output", str(tmp_path / "out"))
    for model in (named, ctxext.load("ada/fitted"), ctxext.load(tmp_path / "out")):
        assert torch.equal(logits(model, IDS), logits(live, IDS))
    with pytest.raises(FileNotFoundError, match="is not an extension"):
        ctxext.extend_context(ctxext.load(base), method="meta/tiny")
    with pytest.raises(FileNotFoundError, match="does not exist or is private"):
        ctxext.extend_context(ctxext.load(base), method="ada/none")


def test_an_extension_by_name_is_refused_where_its_record_says_more_than_its_method(
    base: Path, hub: LocalHub, tmp_path: Path
) -> None:
    model = ctxext.extend_context(ctxext.load("meta/tiny"), 4, "yarn", original_max_position_embeddings=32)
    model.save_pretrained(tmp_path / "whole")
    SavedMethod(YaRN(factor=4)).save(tmp_path / "yarn.json")
    push_to_hub(tmp_path / "yarn.json", "ada/short", base_model="meta/tiny")
    record = json.loads(hub.repositories["ada/short"].files()[RECORD])
    record |= {"original_max_position_embeddings": 32}
    hub.commit("ada/short", "main", {RECORD: json.dumps(record).encode()})
    live = logits(
        ctxext.extend_context(ctxext.load(base), method="ada/short", original_max_position_embeddings=32), IDS
    )
    assert torch.equal(live, logits(model, IDS))
    with pytest.raises(ValueError, match="original_max_position_embeddings=32"):
        ctxext.extend_context(ctxext.load(base), method="ada/short")
    with pytest.raises(ValueError, match="original_max_position_embeddings=32"):
        run("eval", str(base), "--method", "ada/short")
    with pytest.raises(ValueError, match="original_max_position_embeddings=32"):
        compared_variants(tiny_config("llama"), ["ada/short"], factor=4)
    said = json.dumps({**record, "existing": "replace"}).encode()
    hub.commit("ada/short", "main", {**hub.repositories["ada/short"].files(), RECORD: said})
    with pytest.raises(ValueError, match=r"which its method does not include.*ctxext.load\('ada/short'\)"):
        ctxext.extend_context(ctxext.load(base), method="ada/short", original_max_position_embeddings=32)


@pytest.mark.parametrize("by", ["push_to_hub", "save_pretrained"])
@pytest.mark.parametrize("method", ["yarn", "dynamic_yarn"])
def test_transformers_own_ways_of_pushing_keep_the_extension(
    by: str, method: str, hub: LocalHub, tmp_path: Path
) -> None:
    model = ctxext.extend_context(tiny_model("llama"), 4, method)
    if by == "push_to_hub":
        model.push_to_hub("ada/tiny")
    else:
        model.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="ada/tiny", commit_message="Mine")
        assert torch.equal(logits(ctxext.load(tmp_path / "saved"), IDS), logits(model, IDS))
    assert torch.equal(logits(ctxext.load("ada/tiny"), IDS), logits(model, IDS))


def test_what_an_earlier_push_left_is_not_loaded_in_its_place(base: Path, hub: LocalHub) -> None:
    """transformers prefers model.safetensors to shards, and ctxext.load extends by any record."""
    left = {"model-00001-of-00002.safetensors": b"old", "model.safetensors.index.json": b"{}", RECORD: b"{}"}
    mine = {"notes.txt": b"mine", "adapter.safetensors": b"mine", "training_args.bin": b"mine"}
    hub.create("ada/tiny", {**left, **mine})
    model = ctxext.extend_context(ctxext.load(base), 4, "yarn")
    push_to_hub(model, "ada/tiny")
    files = hub.repositories["ada/tiny"].files()
    assert not left.keys() & files.keys()
    assert {name: files[name] for name in mine} == mine
    assert torch.equal(logits(ctxext.load("ada/tiny"), IDS), logits(model, IDS))


def test_folders_of_the_hub_are_found_by_name_and_revision(base: Path, hub: LocalHub, tmp_path: Path) -> None:
    hub.commit("meta/tiny", "bad", {"config.json": b"{}", "other.txt": b""})
    for revision in ("main", hub.repositories["meta/tiny"].branches["main"]):
        assert (checkpoint_folder("meta/tiny", revision) / "model.safetensors").is_file()
    assert json.loads((checkpoint_folder("meta/tiny", "bad") / "config.json").read_text()) == {}
    hub.create("meta/configs", hub.repositories["meta/tiny"].files())
    assert not (checkpoint_folder("meta/configs", config_only=True) / "model.safetensors").exists()
    result = extend_folder(checkpoint_folder("meta/tiny"), tmp_path / "out", 4, "yarn")
    assert result.linked_bytes > 0
    assert (tmp_path / "out/model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("name", "revision", "words"),
    [
        ("meta/none", None, "it does not exist or is private"),
        ("bob/hidden", None, "it does not exist or is private"),
        ("meta/tiny", "v9", "no branch, tag or commit 'v9'"),
        ("meta/-tiny", None, "-tiny.*Check the name and the connection"),
        ("./tiny", None, "[Cc]heck the path"),
        ("meta/empty", None, r"config\.json"),
    ],
)
def test_what_the_hub_does_not_give_is_said(
    name: str, revision: str | None, words: str, base: Path, hub: LocalHub
) -> None:
    hub.create("bob/hidden", hub.repositories["meta/tiny"].files(), private=True)
    hub.create("meta/empty")
    for find in (checkpoint_folder, lambda name, revision: ctxext.load(name, revision=revision)):
        with pytest.raises(FileNotFoundError, match=words):
            find(name, revision)


# ------------------------------------------------------------------------------------------------ the card


def test_the_card_says_what_was_done_and_invents_no_numbers(extended: Path, hub: LocalHub) -> None:
    push_to_hub(extended, "ada/tiny-256", base_model="meta/tiny")
    card = card_of(hub, "ada/tiny-256")
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "tags": ["ctxext", "long-context", "yarn"],
        "base_model": "meta/tiny",
        "base_model_relation": "finetune",
        "license": "other",
        "license_name": "tiny-1",
        "pipeline_tag": "text-generation",
    }
    for words in (
        "64 → 256 tokens",
        "arxiv.org",
        "| attention factor | 1.13863 |",
        "[meta/tiny](https://huggingface.co/meta/tiny) has rotary",
        "at the lowest",
        "Not measured.",
    ):
        assert words in card.text
    assert "vllm serve ada/tiny-256 --max-model-len 256" in card.text
    assert "\nvLLM:\n" in card.text


def test_a_readme_that_is_there_is_kept_and_the_section_replaced(extended: Path, hub: LocalHub) -> None:
    own = "---\nlanguage: en\ntags:\n- mine\nlibrary_name: other\n---\n# Mine\n\nMy words.\n"
    (extended / "README.md").write_text(own)
    push_to_hub(extended, "ada/tiny-256")
    assert (extended / "README.md").read_text() == own
    first = hub.repositories["ada/tiny-256"].files()["README.md"]
    card = card_of(hub, "ada/tiny-256")
    assert (card.data.language, card.data.library_name) == ("en", "transformers")
    assert card.data.tags == ["mine", "ctxext", "long-context", "yarn"]
    assert card.text.endswith("# Mine\n\nMy words.\n")
    # Once more, from a folder that has none: the repository's own is kept, and the section where it was put.
    (extended / "README.md").unlink()
    moved = first.replace(BEGIN.encode(), b"A word before.\n\n" + BEGIN.encode())
    hub.commit("ada/tiny-256", "main", {**hub.repositories["ada/tiny-256"].files(), "README.md": moved})
    push_to_hub(extended, "ada/tiny-256")
    assert hub.repositories["ada/tiny-256"].files()["README.md"] == moved
    assert first.decode().count(BEGIN) == first.decode().count(END) == 1


def test_a_readme_that_cannot_be_read_is_refused_beforehand(extended: Path, hub: LocalHub) -> None:
    (extended / "README.md").write_text("---\ntags: [\n---\n# Mine\n")
    with pytest.raises(ValueError, match=r"metadata of the existing README\.md"):
        push_to_hub(extended, "ada/tiny")
    assert "ada/tiny" not in hub.repositories
    # Nor one that is on the hub, where the folder has none.
    (extended / "README.md").unlink()
    before = hub.create("ada/tiny", {"README.md": b"---\ntags: [\n---\n# Mine\n"}).branches["main"]
    with pytest.raises(ValueError, match=r"metadata of the existing README\.md"):
        push_to_hub(extended, "ada/tiny")
    assert hub.repositories["ada/tiny"].branches["main"] == before


def test_a_licence_that_is_not_found_is_said(extended: Path, hub: LocalHub, capsys: pytest.CaptureFixture[str]) -> None:
    for name, missing in (("meta/tiny", False), ("meta/none", True)):
        run("push", str(extended), "ada/tiny", "--base-model", name, "--dry-run")
        assert ("names no licence or cannot be read" in capsys.readouterr().err) == missing


def test_a_card_leaves_the_history_of_a_fit_out(base: Path, hub: LocalHub, tmp_path: Path) -> None:
    about = {"found": "by steps", "history": [{"seconds": 12.5}]}
    SavedMethod(YaRN(factor=4), about).save(tmp_path / "fitted.json")
    with prepared(tmp_path / "fitted.json", "ada/fitted", base_model="meta/tiny") as push:
        text = push.card()
    assert "<details><summary>Provenance</summary>" in text
    assert "by steps" in text
    assert "12.5" not in text


@pytest.mark.slow
def test_the_card_shows_the_numbers_of_the_results_file(hub: LocalHub, tmp_path: Path) -> None:
    results, out = tmp_path / "comparison.jsonl", tmp_path / "long"
    command = ["compare", str(MODEL), "--factor", "2", "--methods", "yarn,ntk", "--tasks", "passkey,perplexity,short"]
    small = ["--lengths", "256,1024", "--trials", "1", "--windows", "2", "--depths", "0.5", "--output", str(results)]
    run(*command, *small)
    extend_folder(MODEL, out, 2, "yarn")
    with prepared(out, "ada/long", results=results) as push:
        text = push.card()
    summary = Summary(read_results(results))
    share = summary.by_length("yarn", "passkey")[1024].percent()
    assert f"| passkey, 1,024 tokens | {summary.by_length('none', 'passkey')[1024].percent()} | {share} |" in text
    ppl = [f"{summary.perplexity(name, 1024, 512):.4g}" for name in ("none", "yarn")]
    assert f"| perplexity, positions 513–1,024 | {ppl[0]} | {ppl[1]} |" in text
    assert nats(summary.gate("yarn").loss) in text
    assert "Not measured" not in text
    # A saved method is known by the weights of its base.
    hub.create("meta/austen", {path.name: path.read_bytes() for path in MODEL.iterdir()})
    SavedMethod(YaRN(factor=2)).save(tmp_path / "yarn.json")
    for source in (out, tmp_path / "yarn.json"):
        with prepared(source, "ada/long", base_model="meta/austen", results=results) as push:
            assert share in push.card()
    # Of another method, of the same with other options, and of other weights.
    extend_folder(MODEL, tmp_path / "pi", 2, "pi")
    extend_folder(MODEL, tmp_path / "fast", 2, "yarn", beta_fast=16)
    other = ctxext.extend_context(ctxext.load(MODEL), 2, "yarn")
    other.lm_head.weight.data[0] += 1
    other.save_pretrained(tmp_path / "other")
    for folder, words in (
        ("pi", "no results for this extension"),
        ("fast", "no results for this extension"),
        ("other", "another model"),
    ):
        with pytest.raises(ValueError, match=words):
            push_to_hub(tmp_path / folder, "ada/long", results=results)
    with pytest.raises(ValueError, match=r"another model.*ctxext eval FOLDER"):
        push_to_hub(other, "ada/long", results=results)
    assert "ada/long" not in hub.repositories


@pytest.fixture
def merged(base: Path, tmp_path: Path) -> Path:
    """A model that was fine-tuned on this machine, with what `ctxext finetune` records."""
    extend_folder(base, tmp_path / "run/base", 4, "yarn")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/base")
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    record = AdapterBase.of(
        tmp_path / "run/base",
        "meta/tiny",
        provenance={
            "settings": {"model": "meta/tiny", "data": {"sources": [{"path": str(tmp_path / "secret/docs.jsonl")}]}},
            "figures": {"baseline": {"passkey at 64": "10%"}, "trained": {"passkey at 64": "98%"}},
        },
    )
    save_trained(get_peft_model(model, lora), tmp_path / "run/adapter", record)
    return merge(tmp_path / "run/adapter", tmp_path / "run/merged")


def test_the_card_of_a_fine_tune_is_one_and_names_no_folder(hub: LocalHub, merged: Path, tmp_path: Path) -> None:
    with prepared(merged, "ada/long") as push:
        card, files = push.card(), push.files
    assert "ctxext.json" not in files  # the paths of this machine
    assert str(tmp_path) not in card
    assert "secret" not in card
    assert '"docs.jsonl"' in card
    for once in ("### Load it", "### Measured", "### Serve it", "| passkey at 64 | 10% | 98% |", BEGIN, END):
        assert card.count(once) == 1, once
    assert "## Load it" not in card.replace("### Load it", "")
    assert card.count("\n# ") == 1
    front = ModelCard(card).data
    assert (front.base_model, front.license) == ("meta/tiny", "other")
    assert "fine-tuned after that" in card


def test_a_card_without_measurements_or_base_says_what_is_missing(
    base: Path, hub: LocalHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extend_folder(base, tmp_path / "out", 4)
    (tmp_path / "out/README.md").unlink()
    run("push", str(tmp_path / "out"), "ada/long", "--dry-run")
    said = capsys.readouterr().err
    assert "note: the card has no measurements. Pass --results FILE of ctxext eval or ctxext finetune." in said
    assert "note: the card links no base model and names no licence. Pass --base-model OWNER/NAME for both." in said
    assert f"next: ctxext push {tmp_path / 'out'} ada/long\n" in said


@pytest.mark.parametrize("how", ["itself", "--factor 2", "--target-length 1024"])
def test_results_of_eval_are_known_however_it_was_extended(how: str, hub: LocalHub, tmp_path: Path) -> None:
    out, results = tmp_path / "long", tmp_path / "results.jsonl"
    extend_folder(MODEL, out, 2, "ntk")
    model = [str(out)] if how == "itself" else [str(MODEL), "--method", "ntk", *how.split()]
    small = ["--tasks", "passkey", "--lengths", "128", "--trials", "1", "--depths", "1", "--output", str(results)]
    run("eval", *model, *small)
    with prepared(out, "ada/long", results=results) as push:
        assert "| passkey, 128 tokens | 100% " in push.card()
    extend_folder(MODEL, tmp_path / "more", 3, "ntk")
    with (
        pytest.raises(ValueError, match=r"this extension \(ntk ×3\), only for "),
        prepared(tmp_path / "more", "ada/long", results=results),
    ):
        pass


# --------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("repo_id", "arguments", "error", "words"),
    [
        ("tiny", {}, ValueError, "owner/name"),
        ("ada/ti ny", {}, ValueError, "owner/name"),
        ("ada/tiny", {"base_model": "/somewhere/base"}, ValueError, "not a hub name"),
        ("bob/tiny", {}, PermissionError, "the namespace \"bob\".*hf auth login"),
        ("ada/tiny", {"token": "stolen"}, PermissionError, "Invalid credentials"),
    ],
)  # fmt: skip
def test_refused_pushes_leave_nothing_on_the_hub(
    repo_id: str, arguments: dict, error: type, words: str, extended: Path, hub: LocalHub
) -> None:
    other = tiny_config("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    hub.create("meta/other", {"config.json": json.dumps(other.to_dict()).encode()})
    before = set(hub.repositories)
    with pytest.raises(error, match=words):
        push_to_hub(extended, repo_id, **arguments)
    assert set(hub.repositories) == before


def test_a_saved_method_needs_a_base_that_it_extends(extended: Path, hub: LocalHub, tmp_path: Path) -> None:
    SavedMethod(YaRN(factor=4)).save(tmp_path / "yarn.json")
    hub.create("meta/long", {path.name: path.read_bytes() for path in extended.iterdir()})
    for name, words in (
        (None, "needs base_model="),
        ("/base", "not a hub name"),
        ("meta/long", "yarn does not extend meta/long"),
    ):
        with pytest.raises(ValueError, match=words):
            push_to_hub(tmp_path / "yarn.json", "ada/tiny", base_model=name)
    assert set(hub.repositories) == {"meta/tiny", "meta/long"}


def test_without_a_login_nothing_is_asked_of_the_hub(
    extended: Path, hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(PermissionError, match="hf auth login"):
        push_to_hub(extended, "ada/tiny")
    assert not hub.requests


def test_what_is_not_extended_is_not_pushed(base: Path, hub: LocalHub) -> None:
    for source in (base, tiny_model("llama")):
        with pytest.raises(ValueError, match="not extended by ctxext"):
            push_to_hub(source, "ada/tiny")
    assert "ada/tiny" not in hub.repositories


def test_a_private_push_does_not_go_to_a_public_repository(extended: Path, hub: LocalHub) -> None:
    before = hub.create("ada/tiny", {"a.txt": b""}).branches["main"]
    with pytest.raises(PermissionError, match="public"):
        push_to_hub(extended, "ada/tiny", private=True)
    assert hub.repositories["ada/tiny"].branches["main"] == before


def test_an_extension_alone_is_not_put_beside_a_model(extended: Path, hub: LocalHub, tmp_path: Path) -> None:
    SavedMethod(YaRN(factor=4)).save(tmp_path / "yarn.json")
    push_to_hub(extended, "ada/tiny")
    before = hub.repositories["ada/tiny"].branches["main"]
    with pytest.raises(FileExistsError, match="another name"):
        push_to_hub(tmp_path / "yarn.json", "ada/tiny", base_model="meta/tiny")
    assert hub.repositories["ada/tiny"].branches["main"] == before


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault("/commit/", 500), RuntimeError),
        (Fault("/commit/", 0), RuntimeError),
        (Fault("PUT /storage", 413, "too large"), RuntimeError),
        (Fault("PUT /storage", 403, "no room is left"), PermissionError),
    ],
)
def test_a_failed_upload_says_what_and_can_be_tried_again(
    fault: Fault, error: type, extended: Path, hub: LocalHub
) -> None:
    hub.create("ada/tiny", {"a.txt": b""})
    hub.faults.append(fault)
    words = "no room is left" if fault.status == 403 else r"ada/tiny failed .* Run the same command again"
    with pytest.raises(error, match=words):
        push_to_hub(extended, "ada/tiny")
    assert not hub.faults
    assert hub.repositories["ada/tiny"].files() == {"a.txt": b""}
    push_to_hub(extended, "ada/tiny")
    assert "config.json" in hub.repositories["ada/tiny"].files()


def test_a_dry_run_prints_the_card_and_the_files_and_asks_for_no_login(
    extended: Path, hub: LocalHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    run("push", str(extended), "ada/tiny", "--dry-run")
    said = capsys.readouterr()
    assert ModelCard(said.out).data.library_name == "transformers"
    size = (extended / "model.safetensors").stat().st_size
    assert f"{size / 1024:.1f} KiB  model.safetensors" in said.err
    assert set(hub.repositories) == {"meta/tiny"}


def test_a_fit_of_a_model_on_the_hub_says_its_name_and_its_revision(
    hub: LocalHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "model", tmp_path / "fitted.json"
    tiny_model("llama", vocab_size=4096, initializer_range=0.1).save_pretrained(folder)
    files = {path.name: path.read_bytes() for path in (*folder.iterdir(), *MODEL.glob("tokenizer*"))}
    hub.create("meta/fresh", files)
    text = tmp_path / "prose.txt"
    text.write_text(PERSUASION.read_text(encoding="utf-8")[:20_000])
    quick = ("--factor", "2", "--evaluations", "1", "--rows", "1", "--start", "yarn", "--text", str(text))
    run("fit", "meta/fresh", "--revision", "main", "-o", str(out), *quick)
    assert read_saved(out).about["model"] == "meta/fresh"
    said = capsys.readouterr().err
    assert f"ctxext extend meta/fresh --method {out} -o FOLDER --revision main" in " ".join(said.split())


def test_the_base_in_a_card_may_be_a_list_of_one(extended: Path, hub: LocalHub) -> None:
    own = f"---\nbase_model:\n- meta/tiny\n---\n{BEGIN}\n{END}\n"
    (extended / "README.md").write_text(own)
    push_to_hub(extended, "ada/tiny-256")
    assert card_of(hub, "ada/tiny-256").data.base_model == "meta/tiny"
    (extended / "README.md").write_text(own.replace("- meta/tiny", "- meta/tiny\n- meta/other"))
    with pytest.raises(ValueError, match="names several models as base_model"):
        push_to_hub(extended, "ada/tiny-256")
    (extended / "README.md").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"README\.md is not UTF-8"):
        push_to_hub(extended, "ada/tiny-256")
    with pytest.raises(ValueError, match="is not a hub name"):
        push_to_hub(extended, None)


def test_the_card_serves_by_the_commands_of_export(extended: Path, hub: LocalHub) -> None:
    """The uploaded config.json says it all, so that no override does."""
    push_to_hub(extended, "ada/tiny-256")
    text = card_of(hub, "ada/tiny-256").text
    assert "vllm serve ada/tiny-256 --max-model-len 256" in text
    assert "--hf-overrides" not in text
