"""Push extended models and extensions to the hub, each with a card that says what was changed and measured."""

from __future__ import annotations

import json
import re
import shlex
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ctxext import __version__
from ctxext.core.apply import extended_model
from ctxext.core.plan import ENCODINGS, Plan
from ctxext.encodings.rope import RopeGeometry
from ctxext.evals.choice import nats
from ctxext.evals.results import Results, read_results
from ctxext.evals.statistics import in_percent
from ctxext.evals.summary import Summary, label
from ctxext.evals.targets import UNEXTENDED
from ctxext.extension.metadata_file import RECORD, read_record, weights_fingerprint, write_record
from ctxext.extension.method_file import PROBE, SUFFIX, read_saved
from ctxext.extension.request import plan_extension
from ctxext.extension.rope import RopePlan
from ctxext.hub.adapters import RECORD as OF_FINETUNE
from ctxext.hub.adapters import AdapterBase, changed_adapter, render_card, without_folders
from ctxext.hub.checkpoint import (
    check_not_extended,
    checkpoint_folder,
    method_of,
    planned_as_saved,
    read_config,
    visible_files,
)
from ctxext.methods import ContextMethod, PositionRemapping
from ctxext.models.context import has_rope, read_context
from ctxext.models.metadata import Lengths, live_mark
from ctxext.models.text_config import text_config_of
from ctxext.utils.json_files import read_json, read_text

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.repocard import ModelCard

README = "README.md"
BEGIN, END = "<!-- ctxext: begin -->", "<!-- ctxext: end -->"

# Files that plain transformers would load instead, if an earlier push left them there.
LOADED = re.compile(rf"{re.escape(RECORD)}|(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")


@dataclass(frozen=True)
class Extended:
    """What a card says about an extension.

    Attributes:
        before, after: the frequencies before any scaling and in use (a dynamic method's at the target length); None for
            other encodings and where positions are remapped.
        portable: whether plain transformers loads it extended.
    """

    method: ContextMethod
    lengths: Lengths
    before: RopeGeometry | None = None
    after: RopeGeometry | None = None
    portable: bool = True

    @classmethod
    def of_plan(cls, plan: Plan) -> Extended:
        assert plan.method is not None
        before = after = None
        if isinstance(plan, RopePlan) and not isinstance(plan.method, PositionRemapping):
            before, after = plan.facts.original_rope, plan.extended
        return cls(plan.method, plan.lengths, before, after, plan.is_portable)

    @classmethod
    def of_folder(cls, folder: Path) -> Extended:
        """The extension of the checkpoint in `folder`.

        Raises:
            ValueError: the checkpoint is not extended by ctxext.
        """
        method, record = method_of(folder), read_record(folder)
        if method is None:
            raise ValueError(
                f"{folder} is not extended by ctxext; there is no extension to push. Extend it first: ctxext extend "
                f"{folder} --factor 4 --output EXTENDED."
            )
        config = read_config(folder)
        if record is not None:
            return cls.of_plan(planned_as_saved(config, record))
        if has_rope(text_config_of(config)):
            facts = read_context(config)
            return cls(method, facts.lengths, facts.original_rope, facts.rope)
        mark = live_mark(text_config_of(config))
        assert mark is not None
        return cls(method, Lengths.of_mark(mark))

    @property
    def rescale_factors(self) -> str | None:
        """λ in words."""
        if self.before is None or self.after is None:
            return None
        factors = (self.before.inv_freq / self.after.inv_freq).tolist()
        least, most = min(factors), max(factors)
        words = f"{factors[0]:.4g} at the highest frequency, {factors[-1]:.4g} at the lowest"
        if {least, most} != {factors[0], factors[-1]}:
            words += f", between {least:.4g} and {most:.4g}"
        kept = sum(abs(factor - 1) < 1e-9 for factor in factors)
        return f"{words}; {kept} of {len(factors)} pairs are unchanged" if kept else words


@dataclass(frozen=True)
class Push:
    """What a push would upload.

    Attributes:
        files: by their path in the repository; README.md is made by `card`.
        readme: the folder's own README.md; "" without one.
        about: the origin of a saved method, or the settings of a fine-tune.
        license: the licence fields of the base model's card.
        changed: the adapter beside a merged model, if it has other weights than were merged.
    """

    repo_id: str
    files: dict[str, Path]
    readme: str
    extended: Extended
    base_model: str | None
    measured: dict[str, Any] | None
    config: Any
    about: dict[str, Any]
    license: dict[str, Any]
    finetuned: bool = False
    changed: Path | None = None

    def card(self, readme: str | None = None) -> str:
        """README.md with our metadata, and our section between markers in the existing text.

        Args:
            readme: the repository's, for a folder without one.

        Raises:
            ValueError: the metadata of the existing README.md cannot be read.
        """
        card = _read_card(self.readme or readme or "")
        section = f"{BEGIN}\n{self._section()}{END}"
        text = card.text.strip("\n")
        if BEGIN in text and END in text:
            before, _, rest = text.partition(BEGIN)
            text = before + section + rest.partition(END)[2]
        else:
            text = "\n\n".join([section, text] if text else [f"# {self.repo_id.partition('/')[2]}", section])
        card.data.__dict__.update(self._metadata(card.data.to_dict()))
        card.text = f"\n{text}\n"
        return str(card.content)

    @property
    def alone(self) -> bool:
        """Whether it is an extension without a model."""
        return "config.json" not in self.files

    @property
    def _is_plain(self) -> bool:
        """Whether plain transformers loads it extended."""
        return self.extended.portable and not self.alone

    def _metadata(self, there: dict[str, Any]) -> dict[str, Any]:
        tags = [there["tags"]] if isinstance(there.get("tags"), str) else there.get("tags") or []
        data: dict[str, Any] = {
            "library_name": "transformers" if self._is_plain else "ctxext",
            "tags": list(dict.fromkeys([*tags, "ctxext", "long-context", self.extended.method.name])),
        }
        if self.base_model is not None:
            # The hub knows adapter, merge, quantized and finetune.
            data |= {"base_model": self.base_model, "base_model_relation": "adapter" if self.alone else "finetune"}
        data |= {name: value for name, value in self.license.items() if name not in there}
        if "pipeline_tag" not in there and str((self.config.architectures or [""])[0]).endswith("ForCausalLM"):
            data["pipeline_tag"] = "text-generation"
        return data

    def _section(self) -> str:
        extended = self.extended
        options = {name: value for name, value in extended.method.to_dict().items() if name != "name"}
        return render_card(
            "extension_card.md",
            repo_id=self.repo_id,
            base_model=self.base_model,
            alone=self.alone,
            extended=extended,
            encoding=ENCODINGS[extended.method.encoding],
            options={name: value for name, value in options.items() if value is not None},
            measured=self.measured,
            about=without_folders({name: value for name, value in self.about.items() if name != "history"}),
            finetuned=self.finetuned,
            servers=serving(self.repo_id, self.config, self.files["config.json"].parent) if self._is_plain else (),
            probe=PROBE in self.files,
            architecture=(self.config.architectures or ["AutoModelForCausalLM"])[0],
            version=__version__,
        )

    def notes(self) -> tuple[str, ...]:
        """Notes for the user, a sentence each."""
        notes = []
        if self.changed:
            notes.append(f"{self.changed} has other weights than were merged. To push those, merge it again")
        if self.measured is None:
            notes.append("the card has no measurements. Pass results='FILE' of ctxext eval or ctxext finetune")
        if self.base_model is None:
            notes.append("the card links no base model and names no licence. Pass base_model='owner/name' for both")
        elif not self.license:
            notes.append(f"the card of {self.base_model} names no licence or cannot be read, so this card names none")
        return tuple(notes)

    def sizes(self) -> dict[str, int]:
        """Bytes of each file that would be uploaded."""
        return {README: len(self.card().encode())} | {name: path.stat().st_size for name, path in self.files.items()}


def serving(repo_id: str, config: Any, folder: Path) -> list[dict[str, Any]]:
    """How each engine serves the checkpoint in `folder`: its name, a command ("" if it cannot), and notes."""
    from ctxext.export.readings import ENGINE_NAMES
    from ctxext.export.rules import NotExportable, export_for

    served: list[dict[str, Any]] = []
    source = read_json(folder / "config.json").content
    for engine in ("vllm", "sglang", "llama.cpp"):
        name = ENGINE_NAMES.get(engine, engine)
        try:
            export = export_for(engine, config, model=repo_id, source=source)
        except NotExportable as error:
            served.append({"engine": name, "command": "", "notes": [str(error)]})
            continue
        if export.flags:
            notes = [f"{name} {export.least_version} or newer.", *export.warnings]
            served.append({"engine": name, "command": shlex.join(export.flags), "notes": notes})
    return served


# ------------------------------------------------------------------------------------------- pushing


def push_to_hub(
    source: nn.Module | str | Path,
    repo_id: str,
    *,
    base_model: str | None = None,
    results: str | Path | None = None,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
) -> str:
    """Upload an extended model, or its extension alone, with a model card.

    Transformers loads a whole model if its config expresses the extension, and `ctxext.load` always does. The tokenizer
    of a live model is not pushed. A saved method is pushed as an extension alone, of a few kB: `ctxext.load` loads the
    model that its card names and extends it.

    Everything is in one commit, which also removes weights and metadata of an earlier push that would be loaded
    instead. On errors nothing on the hub changes, except that a failed upload may leave a new repository empty.

    Args:
        source: a live extended model, a folder that holds one, or the .json file of a saved method.
        repo_id: a name on the hub, owner/name; created if missing.
        base_model: the hub's name of the model that was extended; required for a saved method.
        results: a file of `ctxext eval` or `ctxext compare` that measured this extension on these weights, for the
            card.
        private: create the repository as a private one.
        token: of the hub; None for that of `hf auth login` or HF_TOKEN.
        revision: the branch to push to, created if missing.

    Returns:
        The URL of the commit.

    Raises:
        ValueError: a wrong name; nothing is extended; results of something else; a saved method without a base model,
            or that does not extend it; a README.md whose metadata cannot be read.
        FileNotFoundError: no such folder, or the hub has no such base.
        PermissionError: not logged in, or no right to write there; or `private` and the repository is public.
        FileExistsError: an extension alone, and the repository holds a whole model.
        RuntimeError: the upload failed.
    """
    with prepared(source, repo_id, base_model=base_model, results=results) as push:
        return upload(push, private=private, token=token, revision=revision)


@contextmanager
def prepared(
    source: nn.Module | str | Path,
    repo_id: str,
    *,
    base_model: str | None = None,
    results: str | Path | None = None,
) -> Iterator[Push]:
    """What `push_to_hub` would upload, checked, within a `with` block. Arguments and errors are those of that."""
    if _hub_name(repo_id) is None:
        raise ValueError(
            f"{repo_id!r} is not a hub name. Write owner/name, such as ada/my-model-32k: letters, digits, '-', '_' "
            "and '.'."
        )
    with tempfile.TemporaryDirectory() as scratch:
        about, readme, weights, trained = {}, "", None, None
        if isinstance(source, nn.Module):
            model = extended_model(source)
            if model is None:
                raise ValueError("this model is not extended by ctxext. Call extend_context on it first.")
            if base_model is None and not Path(model.name_or_path or "").is_dir():
                base_model = _hub_name(model.name_or_path)
            weights = Path(scratch, "model")
            with warnings.catch_warnings():  # no warning that config.json cannot express it: the card says so
                warnings.simplefilter("ignore", UserWarning)
                model.save_pretrained(weights)
        elif not str(source).endswith(SUFFIX):
            weights = checkpoint_folder(str(source))
            readme = read_text(weights / README) if (weights / README).is_file() else ""
            card = _read_card(readme)
            if base_model is None and BEGIN in readme:
                base_model = _only_base(card)
        if base_model is not None and _hub_name(base_model) is None:
            raise ValueError(
                f"base_model={base_model!r} is not a hub name (owner/name). Pass the hub name of the base "
                "model, or leave it out for a whole model."
            )
        if weights is None:
            saved = read_saved(str(source))
            about, (config, plan) = saved.about, _extension(saved.method, base_model)
            write_record(Path(scratch), plan)
            extended, files = Extended.of_plan(plan), {RECORD: Path(scratch, RECORD)}
        else:
            extended, config = Extended.of_folder(weights), read_config(weights)
            files = {path.as_posix(): weights / path for path in visible_files(weights)}
            files.pop(README, None)
            if files.pop(OF_FINETUNE, None):
                trained = AdapterBase.of_folder(weights).provenance
                about = {name: value for name, value in trained.items() if name not in ("figures", "merged_from")}
        measured = None if trained is None else _figures_of_run(trained)
        if results is not None:
            folder = weights or checkpoint_folder(str(base_model))
            name = "FOLDER" if isinstance(source, nn.Module) else str(folder)
            known = (weights_fingerprint(folder), (trained or {}).get("merged_from"))
            measured = _measured(read_results(results), extended.method, known, name)
        terms = {} if base_model is None else _license(base_model)
        changed = None if weights is None else changed_adapter(weights)
        finetuned = trained is not None
        yield Push(repo_id, files, readme, extended, base_model, measured, config, about, terms, finetuned, changed)


def _extension(method: ContextMethod, base_model: str | None) -> tuple[Any, Plan]:
    """The config of the base, and the plan of the method for it.

    Raises:
        ValueError: no base is named, or the method does not extend it.
    """
    if base_model is None:
        raise ValueError("a saved method needs base_model=, the hub name of the model that it extends.")
    folder = checkpoint_folder(base_model, config_only=True)
    check_not_extended(folder)
    config = read_config(folder)
    try:
        return config, plan_extension(config, method=method)
    except ValueError as error:
        raise ValueError(
            f"{method.name} does not extend {base_model}: {error} Pass another base model, or push an extended folder."
        ) from error


def upload(push: Push, *, private: bool | None = None, token: str | None = None, revision: str | None = None) -> str:
    """Upload what was prepared. Arguments, return value and errors are those of `push_to_hub`."""
    from huggingface_hub import HfApi, get_token

    if (token or get_token()) is None:
        raise PermissionError("not logged in to the hub. Run `hf auth login` with a write token, or set HF_TOKEN.")
    api = HfApi(token=token, library_name="ctxext", library_version=__version__)
    try:
        return _upload(api, push, private, revision)
    except (PermissionError, FileExistsError, UnreadableCard):
        raise
    except Exception as error:  # the error classes of its HTTP library differ between versions
        causes = [error, *([error.__cause__] if error.__cause__ else [])]
        status = next((r.status_code for cause in causes if (r := getattr(cause, "response", None)) is not None), None)
        words = "; ".join(" ".join(f"{type(cause).__name__}: {cause}".split()) for cause in causes)
        if status in (401, 403):
            raise PermissionError(
                f"no permission to write to {push.repo_id} ({words}). Check the owner's name, and log in with a "
                "token that may write there: `hf auth login`."
            ) from error
        raise RuntimeError(
            f"the upload to {push.repo_id} failed ({words}). The push is one final commit, so nothing changed unless "
            "the repository shows it. Run the same command again; uploaded large files are not sent twice."
        ) from error


def _upload(api: HfApi, push: Push, private: bool | None, revision: str | None) -> str:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    api.create_repo(push.repo_id, private=private, exist_ok=True)
    if private and not api.repo_info(push.repo_id).private:
        raise PermissionError(
            f"{push.repo_id} already exists and is public, so the push would not be private. Choose another name, or "
            "make it private in its settings first."
        )
    if revision is not None:
        api.create_branch(push.repo_id, branch=revision, exist_ok=True)
    there = api.list_repo_files(push.repo_id, revision=revision)
    if push.alone and "config.json" in there:
        raise FileExistsError(
            f"{push.repo_id} holds a whole model, which this {RECORD} would extend. Push the extension under "
            "another name."
        )
    readme = None
    if not push.readme and README in there:
        readme = Path(api.hf_hub_download(push.repo_id, README, revision=revision)).read_text(encoding="utf-8")
    replaced = [path for path in there if LOADED.fullmatch(path) and path not in push.files]
    operations: list[Any] = [
        CommitOperationAdd(README, push.card(readme).encode()),
        *(CommitOperationAdd(path, str(file)) for path, file in push.files.items()),
        *(CommitOperationDelete(path) for path in ([] if push.alone else replaced)),
    ]
    name = push.extended.method.title
    what = "extension" if push.alone else "extended model"
    message = f"Upload {what} ({name}, {push.extended.lengths.words})"
    commit = api.create_commit(push.repo_id, operations, commit_message=message, revision=revision)
    return str(commit.commit_url)


def _hub_name(name: object) -> str | None:
    """`name` if it may be a repository's: owner/name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if not isinstance(name, str) or "/" not in name:
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


# --------------------------------------------------------------------------------------------- the card


class UnreadableCard(ValueError):
    """A README.md whose metadata cannot be read."""


def _read_card(text: str) -> ModelCard:
    from huggingface_hub.repocard import ModelCard

    try:
        return ModelCard(text if text.startswith("---") else f"---\n{{}}\n---\n{text}", ignore_metadata_errors=True)
    except Exception as error:  # PyYAML's own, and ValueError
        raise UnreadableCard(f"the metadata of the existing {README} cannot be read ({error}). Correct it.") from error


def _only_base(card: ModelCard) -> str | None:
    """The base model in a card, one name or a list of one.

    Raises:
        ValueError: it names several.
    """
    named = card.data.get("base_model")
    if isinstance(named, list) and len(named) > 1:
        raise ValueError(f"the {README} names several models as base_model ({', '.join(named)}). Pass the right one.")
    return named[0] if isinstance(named, list) and named else named or None


def _license(base_model: str) -> dict[str, Any]:
    """The licence fields of the base model's card, as far as there is one."""
    from huggingface_hub import ModelCard

    try:
        data = ModelCard.load(base_model).data
    except Exception:  # no such model, no card, no connection
        return {}
    return {name: data.get(name) for name in ("license", "license_name", "license_link") if data.get(name)}


def _figures_of_run(provenance: dict[str, Any]) -> dict[str, Any] | None:
    """What a card shows of the figures that a fine-tune measured; None if there are none."""
    figures = provenance.get("figures")
    if not figures:
        return None
    tasks = dict.fromkeys(task for row in figures.values() for task in row)
    rows = [(task, [row.get(task) for row in figures.values()]) for task in tasks]
    with_what = {**provenance.get("versions", {}), "machine": provenance.get("machine")}
    return {"columns": list(figures), "rows": rows, "with": with_what}


def _measured(results: Results, method: ContextMethod, known: tuple[str, str | None], name: str) -> dict[str, Any]:
    """What a card shows of a results file.

    Args:
        known: the fingerprints of the weights to be pushed, and of the adapter that was merged into them, if any.
        name: of the folder in errors.

    Raises:
        ValueError: it was measured on other weights, or not with this extension.
    """
    summary, about = Summary(results), results.header.about
    again = f"Measure this extension: ctxext eval {name} --tasks passkey,perplexity -o RESULTS.jsonl"
    if "weights" not in about:
        raise ValueError(f"{results.path} does not say which weights it was measured on. {again}")
    if about["weights"] not in known:
        raise ValueError(
            f"{results.path} was measured on another model: its weights have fingerprint {about['weights']}, but those "
            f"to be pushed have {known[0]}{f', and the merged adapter {known[1]}' * bool(known[1])}. {again}"
        )
    wanted = json.loads(json.dumps(method.to_dict()))
    methods = {}  # the method of each measured variant
    for name in summary.variants:
        extension = results.header.variants[name]["extension"]
        itself = None if name == UNEXTENDED else about.get("method")
        methods[name] = itself if extension is None else extension["method"]
    # A fine-tune's file also has the extended model without training, whose weights are not these.
    of_method = [name for name, measured in methods.items() if measured == wanted]
    variant = next((name for name in of_method if results.header.variants[name]["extension"] is None), None)
    variant = variant or next(iter(of_method), None)
    if variant is None:
        raise ValueError(
            f"{results.path} has no results for this extension ({method.name} ×{method.factor:g}), only for "
            f"{', '.join(map(label, methods))}. {again}"
        )
    columns = [name for name in (UNEXTENDED, *of_method) if name in summary.variants]
    rows: list[tuple[str, list[Any]]] = []
    for task in summary.retrieval_tasks:
        found = {name: summary.by_length(name, task) for name in columns}
        for length in summary.lengths(task):
            shares = [found[name].get(length) for name in columns]
            rows.append((f"{summary.titled(task)}, {length:,} tokens", [share and share.percent() for share in shares]))
    for after, length in pairwise([0, *summary.read_lengths]):
        perplexities = [summary.perplexity(name, length, after) for name in columns]
        rows.append((f"perplexity, positions {after + 1:,}–{length:,}", perplexities))
    gate, regression = summary.gate(variant), None
    if gate.loss is not None:
        regression = nats(gate.loss)
        if gate.agreement is not None:
            differ = in_percent(1 - gate.agreement.value, 1)
            regression += f"; a different most likely token at {differ}% of positions"
    identity = results.header.identity
    with_what = {name: identity[name] for name in ("text", "dtype", "ctxext", "torch", "transformers")}
    return {"columns": [label(name) for name in columns], "rows": rows, "regression": regression, "with": with_what}
