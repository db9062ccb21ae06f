"""lm-eval with extended models: the extension is in effect, recorded, and shared out to processes."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.registry import get_model
from lm_eval.config.group import GroupConfig
from lm_eval.tasks import TaskManager
from survey.small import LENGTH, small_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ctxext import extend_config
from ctxext.assets import MODEL, PERSUASION
from ctxext.evals import harness
from ctxext.evals.harness.tasks.documents import mean_of_present, passkey_documents
from ctxext.evals.haystack import Haystack
from ctxext.evals.needle import Passkey
from ctxext.evals.prompts import Prompter
from ctxext.evals.ruler import RULER
from ctxext.evals.samples import Place, list_tasks, make_task
from ctxext.evals.targets import LiveModel
from ctxext.hub.checkpoint import extend_folder

pytestmark = pytest.mark.slow
harness.register()
YARN = {"pretrained": str(MODEL), "method": "yarn", "factor": 4}


def load(**arguments: Any):
    return get_model("ctxext").create_from_arg_obj({"pretrained": str(MODEL), **arguments}, {"device": "cpu"})


def offline_tasks(**metadata: Any) -> TaskManager:
    return TaskManager(include_path=harness.TASKS, include_defaults=False, metadata={**YARN, **metadata})


def evaluate(model: Any, task: str, metadata: dict[str, Any], **options: Any) -> dict[str, Any]:
    results = simple_evaluate(
        model=model, tasks=[task], task_manager=offline_tasks(**metadata), bootstrap_iters=0, **options
    )
    return results["results"][task]


@pytest.fixture(scope="module")
def yarn():
    return load(method="yarn", factor=4, batch_size=4)


@pytest.fixture(scope="module")
def plain():
    """The same model not extended, with room for the same prompts."""
    return load(method="none", max_length=2048, batch_size=4)


# ------------------------------------------------------------------------------------ the model


def test_the_length_limit_is_the_extended_one(yarn) -> None:
    assert yarn.max_length == 2048
    ids, _ = yarn.tok_batch_encode(["word " * 3000], truncation=True)
    assert ids.shape[1] == 2048


def test_a_length_limit_that_is_given_stays() -> None:
    assert load(method="yarn", factor=4, max_length=1000).max_length == 1000


def test_without_an_extension_it_is_plain_hf() -> None:
    """No argument, method=none, and None as lm-eval's parser makes it."""
    for arguments in ({}, {"method": "none"}, {"method": None}):
        lm = load(**arguments)
        assert lm.max_length == 512
        assert lm.get_model_info()["context_extension"] is None


def test_what_is_extended_late_comes_back_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    late = str(tmp_path / "late")
    extend_folder(MODEL, Path(late), 4, "self_extend")
    lm = load(pretrained=late)
    assert lm.get_model_info()["context_extension"]["method"]["name"] == "self_extend"
    assert lm.max_length == 2048
    assert load(pretrained=late, method="none").get_model_info()["context_extension"] is None
    with pytest.raises(ValueError, match=r"already extended by self_extend .*existing='replace'"):
        load(pretrained=late, method="yarn", factor=4)
    lm = load(pretrained=late, method="dynamic_ntk", factor=4, existing="replace")
    assert lm.get_model_info()["context_extension"]["method"]["name"] == "dynamic_ntk"


def test_a_model_without_rope_is_extended_by_its_own_default_method(tmp_path: Path) -> None:
    small_model("gpt2", "causal", vocab_size=4096).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(tmp_path)
    lm = load(pretrained=str(tmp_path), factor=4)
    assert lm.get_model_info()["context_extension"]["method"]["name"] == "hierarchical"
    assert lm.max_length == 4 * LENGTH


def test_each_argument_reaches_its_owner() -> None:
    lm = load(target_length=1024, beta_fast=16, original_max_position_embeddings=256, dtype="bfloat16")
    record = lm.get_model_info()["context_extension"]
    assert record["method"]["beta_fast"] == 16
    assert (record["original_max_position_embeddings"], record["max_position_embeddings"]) == (256, 1024)
    assert record["summary"] == "yarn ×4: 256 → 1,024 tokens"
    assert lm.model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"method": "yarm", "factor": 4}, "did you mean 'yarn'"),
        ({"method": "yarn", "factor": 0.5}, "factor must be >= 1, got 0.5"),
        ({"method": "yarn", "beta_fats": 16}, "unknown model argument 'beta_fats'; did you mean 'beta_fast'"),
        ({"method": "pi", "beta_fast": 16}, "unknown model argument 'beta_fast'"),
        ({"method": "none", "factor": 4}, "factor would have no effect"),
        ({"method": "dca", "factor": 4, "length": 2048}, "has no static form, so length=2048"),
        ({"pretrained": torch.nn.Linear(1, 1), "factor": 4}, "a Linear"),
    ],
)
def test_a_mistake_is_refused_by_name(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        load(**arguments)


def test_a_cache_of_answers_belongs_to_one_extension(yarn, plain, tmp_path: Path) -> None:
    """Its keys are the prompts alone, so another method would be given this one's answers."""
    task = ("ctxext_passkey", {"max_seq_lengths": 128, "depths": [0.5], "trials": 1})
    cache = str(tmp_path / "answers")
    assert evaluate(yarn, *task, use_cache=cache) == evaluate(yarn, *task, use_cache=cache)
    with pytest.raises(ValueError, match="answers of another model"):
        evaluate(plain, *task, use_cache=cache)


# ------------------------------------------------------------------------------------ the tasks


def test_prompts_reach_the_model_exact_in_tokens(yarn) -> None:
    task = offline_tasks(max_seq_lengths=[129, 2048], trials=2).load("ctxext_passkey")["tasks"]["ctxext_passkey"]
    task.build_all_requests()
    assert len(task.instances) == 2 * 5 * 2
    for request in task.instances:
        context, answer = yarn._encode_pair(*request.args)
        assert len(context) + len(answer) == request.doc["length"]
        assert context[0] == yarn.tokenizer.bos_token_id
        assert yarn.tokenizer.decode(answer) == request.doc["answer"]


def test_the_passkey_is_found_beyond_the_trained_length_by_the_extended_model_alone(yarn, plain) -> None:
    metadata = {"max_seq_lengths": [512, 1024], "depths": [0.0, 0.25], "trials": 4}
    extended, unextended = (evaluate(lm, "ctxext_passkey", metadata) for lm in (yarn, plain))
    assert extended["acc@512,none"] >= 0.75
    assert unextended["acc@512,none"] >= 0.75
    assert extended["acc@1024,none"] >= 0.75
    assert unextended["acc@1024,none"] <= 0.25


@pytest.mark.parametrize("how", [{"method": "none", "max_length": 2048}, YARN, {"method": "pi", "factor": 8}])
def test_the_passkey_has_the_score_of_ctxext_eval_sample_by_sample(how: dict[str, Any]) -> None:
    """Though lm-eval leaves the space before the number to the model: this one always writes it."""
    lm, lengths, depths, trials = load(**how, batch_size=4), (256, 512, 1024), (0.0, 0.5, 1.0), 2
    theirs = simple_evaluate(
        model=lm, tasks=["ctxext_passkey"], bootstrap_iters=0, log_samples=True,
        task_manager=offline_tasks(max_seq_lengths=list(lengths), depths=list(depths), trials=trials),
    )["samples"]["ctxext_passkey"]  # fmt: skip
    found = {
        (doc["length"], doc["depth"], doc["trial"]): sample[f"acc@{doc['length']}"]
        for sample in theirs
        for doc in [sample["doc"]]
    }
    target = LiveModel(lm.model, Prompter(lm.tokenizer, "base"), "model")
    text = Haystack.from_file(PERSUASION, lm.tokenizer)
    places = Passkey().places(lengths, depths, trials, 0)
    batches = [[[Passkey().sample(place, target.prompter, text)]] for place in places]
    ours = {
        (sample.place.length, sample.place.depth, sample.place.trial): record["score"]
        for part in target.outcomes(batches, False)
        for sample, record in part
    }
    assert found == ours
    assert len(found) == len(places)
    assert (0.0 in found.values()) == (how != YARN)


def test_lengths_are_multiples_of_the_trained_one_by_default() -> None:
    lengths = passkey_documents(pretrained=str(MODEL), trials=1)["test"]["length"]
    assert sorted(set(lengths)) == [512, 1024, 2048]


def test_lengths_go_as_far_as_the_checkpoint_is_extended(tmp_path: Path) -> None:
    extend_folder(MODEL, tmp_path / "out", 8)
    lengths = passkey_documents(pretrained=str(tmp_path / "out"), trials=1, depths=[0.5])["test"]["length"]
    assert sorted(lengths) == [512, 1024, 2048, 4096]


def test_a_small_limit_leaves_prompts_of_every_length_to_every_process() -> None:
    lengths = passkey_documents(tokenizer=str(MODEL), max_seq_lengths=[64, 128], trials=1)["test"]["length"][:4]
    assert set(lengths[0::2]) == set(lengths[1::2]) == {64, 128}


def test_prompts_cannot_be_sized_without_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="needs the model"):
        passkey_documents(max_seq_lengths=[512])
    with pytest.raises(ValueError, match="needs the model"):
        passkey_documents(tokenizer=str(MODEL))


def test_a_length_that_no_prompt_has_has_no_score() -> None:
    assert mean_of_present([None, 1.0, 0.0, None]) == 0.5
    assert mean_of_present([None]) is None


def test_novel_perplexity_is_that_of_plain_transformers(yarn) -> None:
    """One chapter, the windows written out, in a model that transformers itself built from the config."""
    measured = evaluate(yarn, "ctxext_novel", {}, limit=1)
    config = extend_config(AutoConfig.from_pretrained(MODEL), 4, "yarn")
    model = AutoModelForCausalLM.from_pretrained(MODEL, config=config).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    novel = PERSUASION.read_text()
    chapter = novel[novel.index("Chapter 1\n") : novel.index("Chapter 2\n")].strip()
    tokens = tokenizer(chapter)["input_ids"]
    ids = torch.tensor([[tokenizer.bos_token_id, *tokens]])
    nats, scored = 0.0, 0
    while scored < len(tokens):
        # Disjoint windows of at most 2048 scored tokens; the last one reaches back to be as long as the others.
        end = min(scored + 2048, len(tokens))
        start = max(0, end - 2048)
        with torch.no_grad():
            logits = model(input_ids=ids[:, start:end]).logits[0]
        losses = torch.nn.functional.cross_entropy(logits, ids[0, start + 1 : end + 1], reduction="none")
        nats += losses[scored - start :].double().sum().item()
        scored = end
    assert len(tokens) > 2048
    words, n_bytes = len(re.split(r"\s+", chapter)), len(chapter.encode())
    assert measured["word_perplexity,none"] == pytest.approx(math.exp(nats / words), rel=1e-4)
    assert measured["byte_perplexity,none"] == pytest.approx(math.exp(nats / n_bytes), rel=1e-4)
    assert measured["bits_per_byte,none"] == pytest.approx(nats / n_bytes / math.log(2), rel=1e-4)


def test_the_novel_has_24_chapters_or_is_one_document() -> None:
    chapters = offline_tasks().load("ctxext_novel")["tasks"]["ctxext_novel"].eval_docs["text"]
    assert [re.match(r"Chapter \d+", chapter)[0] for chapter in chapters] == [f"Chapter {n}" for n in range(1, 25)]
    whole = offline_tasks(chapters_per_document=24).load("ctxext_novel")["tasks"]["ctxext_novel"].eval_docs["text"]
    assert len(whole) == 1
    assert len(whole[0]) >= sum(map(len, chapters))


# -------------------------------------------------------------------- processes and command line

SHARED = """
import json, os, sys
from lm_eval import simple_evaluate
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager
from ctxext.evals import harness

harness.register()
arguments, metadata, folder = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
lm = get_model("ctxext").create_from_arg_obj(arguments, {"device": "cpu"})
calls = []
lm.model.register_forward_pre_hook(lambda module, args: calls.append(args[0].shape[1]))
tasks = TaskManager(include_path=harness.TASKS, include_defaults=False, metadata=metadata)
results = simple_evaluate(
    model=lm, tasks=["ctxext_passkey", "ctxext_novel"], task_manager=tasks, limit=2, bootstrap_iters=0
)
with open(f"{folder}/{os.environ.get('RANK', 'alone')}.json", "w") as file:
    json.dump({"calls": calls, "results": results and results["results"]}, file)
"""


def numbers(results: dict[str, Any]) -> dict[str, float]:
    return {
        f"{task}/{name}": value
        for task, measured in results.items()
        for name, value in measured.items()
        if not isinstance(value, str)
    }


def test_two_processes_share_the_documents_and_find_what_one_finds(tmp_path: Path) -> None:
    """On CPUs, over gloo. With two documents each process has one of the two lengths."""
    script = tmp_path / "shared.py"
    script.write_text(SHARED)
    metadata = {**YARN, "max_seq_lengths": [256, 640], "depths": [0.5], "trials": 1}
    arguments = [str(script), json.dumps(YARN), json.dumps(metadata), str(tmp_path)]
    # `accelerate launch --cpu --num_processes 2` starts one process; its launcher for GPUs starts two on CPUs as well.
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    for command in (arguments, [*launch, *arguments]):
        run = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)
        assert run.returncode == 0, run.stderr
    alone, first, second = (json.loads((tmp_path / f"{who}.json").read_text()) for who in ("alone", "0", "1"))
    assert second["results"] is None
    # A prompt's last token is only predicted, so it is no input. The first calls are the passkey's.
    assert [sorted(run["calls"][:n]) for run, n in ((alone, 2), (first, 1), (second, 1))] == [[255, 639], [255], [639]]
    assert sum(first["calls"]) + sum(second["calls"]) < 1.5 * sum(alone["calls"])
    assert numbers(first["results"]) == pytest.approx(numbers(alone["results"]), rel=1e-5)


def test_the_command_line_records_the_extension_and_knows_tasks_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(
        (harness.TASKS / "ctxext_novel.yaml").read_text().replace("ctxext_novel", "mine")
    )
    monkeypatch.setattr(sys, "argv", ["ctxext"])
    arguments = f"--model ctxext --model_args pretrained={MODEL},method=ntk,factor=2 --device cpu --limit 1"
    harness.main([*arguments.split(), "--tasks", "ctxext_passkey,mine", "--include_path", str(tmp_path),
                  "--metadata", "max_seq_lengths=128", "--output_path", str(tmp_path / "out")])  # fmt: skip
    assert "acc@128" in capsys.readouterr().out
    (written,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(written.read_text())
    assert set(results["results"]) == {"ctxext_passkey", "mine"}
    record = results["config"]["context_extension"]
    assert record["summary"] == "ntk ×2: 512 → 1,024 tokens"
    assert record["fields"]["rope_parameters"]["rope_theta"] > 1250
    assert results["config"]["max_length"] == 1024


def test_an_include_path_of_a_config_file_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval._cli import HarnessCLI

    seen = []
    monkeypatch.setattr(HarnessCLI, "execute", lambda self, parsed: seen.append(parsed.include_path))
    monkeypatch.setattr(sys, "argv", ["ctxext"])
    (tmp_path / "run.yaml").write_text("include_path: theirs\n")
    harness.main(["run", "--config", str(tmp_path / "run.yaml")])
    harness.main(["ls", "tasks"])
    assert seen == [[str(harness.TASKS), "theirs"], [str(harness.TASKS)]]


def test_every_task_of_the_short_preset_exists_in_lm_eval() -> None:
    index = TaskManager(include_path=harness.TASKS).task_index
    preset = GroupConfig(**index["ctxext_short"].cfg)
    assert len(preset.task) >= 8
    assert [task for task in preset.task if task not in index] == []


# --------------------------------------------------------------------- all retrieval tasks, by generation


def test_the_group_has_every_task_that_hides_sentences() -> None:
    index = TaskManager(include_path=harness.TASKS, include_defaults=False).task_index
    group = GroupConfig(**index["ctxext_retrieval"].cfg)
    assert {task.removeprefix("ctxext_") for task in group.task} == {*list_tasks()} - {*RULER}


@pytest.mark.parametrize("name", ["needles", "nolima", "mrcr", "counting", "code"])
def test_a_generated_answer_has_the_score_of_ctxext_eval(name: str, yarn) -> None:
    """And prompts leave room for it, so that lm-eval cuts none."""
    metadata = {"max_seq_lengths": [1200], "depths": [0.5], "trials": 2}
    task = offline_tasks(**metadata).load(f"ctxext_{name}")["tasks"][f"ctxext_{name}"]
    task.build_all_requests()
    ours, text = make_task(name), Haystack.from_file(PERSUASION, yarn.tokenizer)
    for request in task.instances:
        doc = request.doc
        place = Place(name, doc["length"], doc["depth"], doc["trial"], 0)
        sample = ours.sample(place, Prompter(yarn.tokenizer, "base", 96), text)
        prompt = yarn.tok_encode(request.args[0])
        assert len(prompt) <= doc["length"] - 96
        assert len(prompt) == pytest.approx(sample.n_prompt, abs=1)  # the space before the answer
        for said in (
            sample.references[0],
            "I do not know",
            f" {', '.join(sample.references)}.",
            "7",
            *sample.rivals[:1],
        ):
            (score,) = [s for s in task.process_results(doc, [said]).values() if s is not None]
            assert score == sample.score(said)


STOCK = """
import json, sys
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

assert "ctxext" not in sys.modules
folder, metadata = sys.argv[1], json.loads(sys.argv[2])
tasks = TaskManager(include_path=folder, include_defaults=False, metadata=metadata)
found = simple_evaluate(
    model="hf", model_args=metadata["pretrained"] and f"pretrained={metadata['pretrained']}", device="cpu",
    tasks=["ctxext_retrieval"], task_manager=tasks, limit=1, bootstrap_iters=0,
)
print(json.dumps(found["results"]))
"""


def test_stock_lm_eval_runs_the_group_with_its_own_model() -> None:
    metadata = {"pretrained": str(MODEL), "max_seq_lengths": [512], "depths": [0.5], "trials": 1}
    run = subprocess.run(
        [sys.executable, "-c", STOCK, str(harness.TASKS), json.dumps(metadata)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    results = json.loads(run.stdout.splitlines()[-1])
    measured = {task: found["acc@512,none"] for task, found in results.items() if task != "ctxext_retrieval"}
    assert len(measured) == len({*list_tasks()} - {*RULER})
    assert all(0 <= score <= 1 for score in measured.values())
    assert measured["ctxext_passkey"] == 1.0


# ------------------------------------------------------------------------------------ the short preset

# Two rows or more for each task, our own, in the columns of its data set.
MINIATURE = json.loads((Path(__file__).parents[1] / "support/short_preset.json").read_text(encoding="utf-8"))
# lm-eval's own settings of each.
SETTINGS = {
    "arc_easy": "arc/arc_easy", "arc_challenge": "arc/arc_challenge", "hellaswag": "hellaswag/hellaswag",
    "piqa": "piqa/piqa", "winogrande": "winogrande/default", "lambada_openai": "lambada/lambada_openai",
    "mmlu_anatomy": "mmlu/default/mmlu_anatomy", "gsm8k": "gsm8k/gsm8k", "ifeval": "ifeval/ifeval",
}  # fmt: skip


def miniature_tasks(folder: Path) -> None:
    """Write tasks of lm-eval's names and settings that read our rows."""
    for name, rows in MINIATURE.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        splits = {split: str(folder / f"{name}.jsonl") for split in ("train", "validation", "test", "dev")}
        theirs = str(Path(lm_eval.tasks.__file__).parent / f"{SETTINGS[name]}.yaml")
        own = {"include": theirs, "task": name, "dataset_path": "json", "dataset_name": None}
        (folder / f"{name}.yaml").write_text(json.dumps({**own, "dataset_kwargs": {"data_files": splits}}))
    # One of its 57 subjects.
    (folder / "mmlu.yaml").write_text(json.dumps({"group": "mmlu", "task": ["mmlu_anatomy"]}))


def test_the_short_preset_runs_offline_on_miniature_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's own tasks on an extended model: prompts, scores and metrics are lm-eval's, the rows ours."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    miniature_tasks(tmp_path)
    manager = TaskManager(include_path=[str(harness.TASKS), str(tmp_path)], include_defaults=False)
    preset = GroupConfig(**manager.task_index["ctxext_short"].cfg).task
    assert {*preset} - {"mmlu"} == {*MINIATURE} - {"mmlu_anatomy"}
    if not all(map(find_spec, ("langdetect", "immutabledict"))):
        preset.remove("ifeval")
    lm = load(method="yarn", factor=4, batch_size=4)
    found = simple_evaluate(model=lm, tasks=preset, task_manager=manager, limit=2, bootstrap_iters=0, log_samples=True)
    assert {*found["samples"]} == {*preset} - {"mmlu"} | {"mmlu_anatomy"}
    for name, samples in found["samples"].items():
        figures = found["results"][name]
        numbers = [v for metric, v in figures.items() if "," in metric and "stderr" not in metric]
        assert numbers
        assert all(math.isfinite(number) for number in numbers)
        assert {sample["doc_id"] for sample in samples} == {0, 1}
    assert "To keep soup warm," in str(found["samples"]["piqa"][1]["arguments"])
