"""The typed settings of a fine-tune, read from YAML and `key=value` arguments.

    (settings,) = read_settings("recipes/configs/tiny_yarn_4x.yaml", ["training.steps=100"])

A file with `stages:` has the settings of several runs, one after the other. Unknown keys and invalid values are errors
that suggest the nearest known key.
"""

from __future__ import annotations

import math
import shutil
import types
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ctxext.data.sources import Source
from ctxext.extension.method_file import opened
from ctxext.methods import PositionRemapping, method_class
from ctxext.models.metadata import Existing
from ctxext.training.launch import EngineSettings
from ctxext.training.section import Section, check_meant
from ctxext.utils.json_files import read_text
from ctxext.utils.values import (
    MAX_COUNT,
    MAX_FACTOR,
    MAX_SIZE,
    MAX_TOKENS,
    are_words,
    one_line,
    parse_tokens,
    shown,
    suggest,
)

MAX_BUDGET = 2**50  # tokens of a whole run
MAX_VALUES = 10_000  # in a file, an alias counted by all that it repeats

# What all stages of a file share: a stage starts from the model before it, and the processes are started once.
SHARED = ("measured_on", "model", "revision", "output", "engine", "tracker", "training.precision")

# A number of tokens: 2048, or 2k.
_Parsed = BeforeValidator(lambda value: parse_tokens(value) if isinstance(value, str) else value)
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS), _Parsed]
Positive = Annotated[int, Field(ge=1, le=MAX_SIZE)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
_Beta = Annotated[float, Field(ge=0, lt=1)]


class ExtensionSettings(Section):
    """Arguments of `ctxext.extend_context`; `factor` counts from the trained length, and is 4 without `target_length`.

    Attributes:
        method: a name, the path of a file that `ctxext fit` or `compare` wrote, or an extension on the hub
            (owner/name); None for the encoding's default.
        options: options of the method, and `length`, which freezes a dynamic method at that target.
    """

    method: str | None = None
    factor: Annotated[float, Field(ge=1, le=MAX_FACTOR)] | None = None
    target_length: Tokens | None = None
    original_max_position_embeddings: Tokens | None = None
    existing: Existing = "refuse"
    options: dict[str, Any] = Field(default_factory=dict)

    @field_validator("options")
    @classmethod
    def _length_in_tokens(cls, options: dict[str, Any]) -> dict[str, Any]:
        length = options.get("length")
        return {**options, "length": parse_tokens(length)} if isinstance(length, str) else options

    def arguments(self) -> dict[str, Any]:
        return {**self.model_dump(exclude={"options"}, exclude_none=True), **self.options}

    @model_validator(mode="after")
    def _needs_training(self) -> ExtensionSettings:
        method = opened(self.method)
        named = method_class(method) if isinstance(method, str) else type(method)
        if method is not None and issubclass(named, PositionRemapping):
            raise ValueError(
                f"{self.method} remaps positions inside attention: it needs no training, and config.json cannot "
                "express it. Train with a method that changes frequencies, such as yarn, or extend the model without "
                "training, with ctxext.extend_context or `ctxext extend`."
            )
        return self


class DataSettings(Section):
    """The training data.

    Attributes:
        length: tokens per sequence; None for the target length.
        sources: weighted files or datasets; see `ctxext.data.Source`.
        documents: "separate" keeps documents whole where they fit, and isolates them; "joined" concatenates all into
            one document.
        positions: "plain", or skipping positions for shorter sequences: "pose", "cream".
        chunks: number of PoSE's chunks per sequence.
        processes: tokenisation processes; None for one.
    """

    sources: Annotated[list[Source], Field(min_length=1)]
    length: Tokens | None = None
    documents: Literal["separate", "joined"] = "separate"
    positions: Literal["plain", "pose", "cream"] = "plain"
    chunks: Annotated[int, Field(ge=2, le=MAX_COUNT)] = 2
    processes: Count | None = None

    @field_validator("sources", mode="before")
    @classmethod
    def _sources_are_meant(cls, sources: Any) -> Any:
        kinds = typing.get_type_hints(Source)
        for k, source in enumerate(sources if isinstance(sources, list) else []):
            for name in source.keys() & kinds.keys() if isinstance(source, dict) else ():
                check_meant(source[name], kinds[name], f"{name} of source {k} ")
        return sources

    @model_validator(mode="after")
    def _parts_go_together(self) -> DataSettings:
        names = [source.name for source in self.sources]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two sources are named {twice[0]}, but results are kept by name. Set a name: for each.")
        if self.positions != "plain" and self.documents != "joined":
            raise ValueError(
                f"positions: {self.positions} skips positions within one document. Set documents: joined, "
                "because packed documents are separated by their positions."
            )
        return self


class TrainableSettings(Section):
    """The trained parameters.

    Attributes:
        kind: "lora", or "full" for every parameter.
        rank, alpha, dropout: of LoRA.
        targets: names of the projections with LoRA, or "attention", or "all-linear".
        embeddings, norms: also train embeddings and norms (LongLoRA: LoRA on attention alone is not enough for long
            contexts).
        quantization: "nf4" loads the base model in four bits (QLoRA).
    """

    kind: Literal["lora", "full"] = "lora"
    rank: Positive = 16
    alpha: Annotated[float, Field(gt=0)] = 32
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: Literal["attention", "all-linear"] | list[str] = "attention"
    embeddings: bool = False
    norms: bool = False
    quantization: Literal["nf4"] | None = None

    @field_validator("targets", mode="before")
    @classmethod
    def _one_of_three(cls, targets: Any) -> Any:
        if targets in ("attention", "all-linear") or (targets and isinstance(targets, list) and are_words(targets)):
            return targets
        raise ValueError(f"must be attention, all-linear, or a list such as [q_proj, v_proj], got {shown(targets)}")

    @model_validator(mode="after")
    def _full_trains_everything(self) -> TrainableSettings:
        of_lora = sorted(self.model_fields_set - {"kind"})
        if self.kind == "full" and of_lora:
            raise ValueError(f"kind: full trains every parameter; {', '.join(of_lora)} needs kind: lora.")
        return self


class TrainingSettings(Section):
    """The training procedure.

    Attributes:
        steps, tokens: the length of the run; set one of them. With a constant schedule a finished run continues if it
            is raised.
        batch_size: sequences per step, over all processes.
        micro_batch_size: sequences per forward pass of a process.
        learning_rate: the peak, after `warmup_steps` steps of linear warm-up.
        schedule: "constant", or "linear" or "cosine" decay to `final_learning_rate` (a fraction of the peak).
        precision: "bf16" uses autocast; trained parameters stay float32.
        attention: transformers' attn_implementation, such as "sdpa" or "flash_attention_2".
        gradient_checkpointing: "recompute" keeps one hidden state per layer, "offload" keeps it in CPU memory.
        loss: "chunked" never holds all logits; "stock" is the model's own loss.
        mlp_tokens: runs the MLP of every layer on this many tokens at a time; None for all at once.
        mixed_window: documents within the trained length train on the original RoPE, longer ones on the extended
            (LongRoPE2). What is saved is the extended model.
        distillation: the share of the loss of documents within the trained length that is their divergence from the
            model as the run began, on its original RoPE; 0 for none, 1 for nothing else.
        checkpoint_every: in steps; the last `keep_checkpoints` are kept.
        early_stopping: stop after so many evaluations (`evaluation.every`) without a lower loss of the last tokens at
            the target length, and save the weights with the lowest loss, after step 0; None trains to the end and saves
            the last.
    """

    steps: Positive | None = None
    tokens: Annotated[int, Field(ge=1, le=MAX_BUDGET), _Parsed] | None = None
    batch_size: Positive = 8
    micro_batch_size: Positive = 1
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_learning_rate: Annotated[float, Field(ge=0, le=1)] = 0.1
    warmup_steps: Annotated[int, Field(ge=0, le=MAX_SIZE)] = 20
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    precision: Literal["fp32", "bf16"] = "bf16"
    attention: str = "sdpa"
    gradient_checkpointing: Literal["none", "recompute", "offload"] = "recompute"
    loss: Literal["chunked", "stock"] = "chunked"
    mlp_tokens: Tokens | None = None
    mixed_window: bool = False
    distillation: Annotated[float, Field(ge=0, le=1)] = 0.0
    checkpoint_every: Positive = 50
    keep_checkpoints: Positive = 2
    early_stopping: Count | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0

    @field_validator("attention")
    @classmethod
    def _is_known(cls, name: str) -> str:
        """Unless it is a kernel on the hub (owner/name)."""
        known = ["eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]
        known = [each for each in known if not each.startswith(("paged", "ctxext", "in_attention"))]
        if name not in known and "/" not in name:
            raise ValueError(f"unknown attention implementation {shown(name)}{suggest(name, known)}")
        return name

    @model_validator(mode="after")
    def _one_budget(self) -> TrainingSettings:
        if self.steps is None and self.tokens is None:
            raise ValueError("needs its length: set steps or tokens.")
        if self.steps is not None and self.tokens is not None:
            raise ValueError(f"has steps: {self.steps} and tokens: {self.tokens}. Set one of them to null.")
        if self.batch_size % self.micro_batch_size:
            default = "" if "batch_size" in self.model_fields_set else " (its default)"
            raise ValueError(
                f"batch_size must be a multiple of micro_batch_size, got {self.batch_size}{default} and "
                f"{self.micro_batch_size}."
            )
        return self

    def learning_rate_at(self, step: int, steps: int) -> float:
        """The learning rate of one step of `steps`."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        gone = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        left = {"constant": 1.0, "linear": 1 - gone, "cosine": (1 + math.cos(math.pi * gone)) / 2}[self.schedule]
        return self.learning_rate * (self.final_learning_rate * (1 - left) + left)

    def steps_of(self, length: int) -> int:
        """The steps of the run with sequences of `length` tokens; a token budget is not exceeded.

        Raises:
            ValueError: the budget is less than one step.
        """
        if self.steps is not None:
            return self.steps
        assert self.tokens is not None
        steps = self.tokens // (self.batch_size * length)
        if steps == 0:
            raise ValueError(
                f"training.tokens is {self.tokens:,}, less than one step ({self.batch_size} sequences of {length:,} "
                "tokens). Raise it, or lower training.batch_size."
            )
        return steps


class EvaluationSettings(Section):
    """What `ctxext.evals` measures before, during and after training.

    Attributes:
        text: a held-out text file; "bundled" for the package's novel.
        lengths: lengths for passkeys and perplexity; None for the trained length and its doublings up to the target.
        depths, trials: for passkeys: depths, and prompts per length and depth.
        windows: number of text windows.
        every: steps between mid-training evaluations at the target length; None disables them.
        mid_training_trials, mid_training_windows: the size of these evaluations; None for 4 windows, or all if
            there are fewer.
    """

    text: str
    lengths: Annotated[tuple[Tokens, ...], Field(min_length=1)] | None = None
    depths: Count = 5
    trials: Count = 10
    windows: Annotated[int, Field(ge=2, le=MAX_COUNT)] = 16
    every: Positive | None = None
    mid_training_trials: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 4
    mid_training_windows: Positive | None = None

    @model_validator(mode="after")
    def _mid_training_is_shorter(self) -> EvaluationSettings:
        got = self.mid_training_windows
        if got is not None and got > self.windows:
            raise ValueError(f"mid_training_windows must be at most windows ({self.windows}), got {got}.")
        return self


class Settings(Section):
    """The settings of a run.

    Attributes:
        measured_on: for readers: the hardware this file was run on.
        model: a folder, a hub name, or "bundled" for the package's small model. An adapter is merged first. An extended
            model needs `extension.existing: replace`, and factors still count from its original length.
        output: a new folder, or the folder of a run to resume.
        evaluation: null to skip, if the model does not fit on one device.
        tracker: accelerate's log_with; null for none.
        merge: also write a merged, plain checkpoint.
    """

    measured_on: str | None = None
    model: str
    revision: str | None = None
    output: str
    extension: ExtensionSettings = ExtensionSettings()
    data: DataSettings
    trainable: TrainableSettings = TrainableSettings()
    training: TrainingSettings
    evaluation: EvaluationSettings | None = None
    engine: EngineSettings = EngineSettings()
    tracker: str | None = "tensorboard"
    merge: bool = False

    @model_validator(mode="after")
    def _parts_go_together(self) -> Settings:
        if self.merge and self.trainable.kind == "full":
            raise ValueError("merge: true is for adapters; trainable.kind: full already saves a plain checkpoint.")
        for name in ("mixed_window", "distillation"):
            if getattr(self.training, name) and self.data.documents != "separate":
                raise ValueError(
                    f"training.{name} goes by the length of each document, got data.documents: {self.data.documents}. "
                    "Set separate."
                )
        if self.training.distillation and (self.trainable.kind, self.training.loss) != ("lora", "chunked"):
            raise ValueError(
                "training.distillation compares the model with and without its adapter, chunk by chunk, got "
                f"trainable.kind: {self.trainable.kind} and training.loss: {self.training.loss}. Set lora and chunked."
            )
        if self.training.early_stopping and not (self.evaluation and self.evaluation.every):
            raise ValueError("training.early_stopping counts evaluations in training. Set evaluation.every.")
        self.check_engine(self.engine.kind)
        return self

    @property
    def saved(self) -> Path:
        """The folder of what was trained."""
        return Path(self.output) / ("adapter" if self.trainable.kind == "lora" else "model")

    def check_output(self) -> None:
        """Raise FileExistsError if the run would start in a folder of something else, or replace another's result."""
        output = Path(self.output)
        file = next((path for path in (output, *output.parents) if path.exists() and not path.is_dir()), None)
        if file:
            raise FileExistsError(f"{file} is a file. Set another output.")
        names = ["config.json", "adapter_config.json", self.saved.name, *(["merged"] if self.merge else [])]
        there = [output / name for name in names if (output / name).exists()]
        if there and not (output / "checkpoints").exists():
            raise FileExistsError(
                f"{there[0]} exists, and {output} has no checkpoints to resume from. Set another output, or remove it."
            )

    @contextmanager
    def base_folder(self, dry_run: bool) -> Iterator[Path]:
        """The folder of the extended base; a temporary one for a dry run, unless a run has written it already.

        If the block fails before the first checkpoint, the base that it wrote is removed.

        Raises:
            FileExistsError: see `check_output`.
        """
        if not dry_run:
            self.check_output()
        folder = Path(self.output) / "base"
        if folder.exists():
            yield folder
        elif dry_run:
            there = next(parent for parent in folder.absolute().parents if parent.exists())
            # On that disk, where weights can be linked.
            with TemporaryDirectory(prefix=".dry-run-", dir=there) as temporary:
                yield Path(temporary) / "base"
        else:
            is_new = not folder.parent.exists()
            try:
                yield folder
            except BaseException:
                if not folder.with_name("checkpoints").exists():
                    shutil.rmtree(folder, ignore_errors=True)
                    if is_new:
                        with suppress(OSError):  # it holds something else
                            folder.parent.rmdir()
                raise

    def row_length(self, target_length: int) -> int:
        """Tokens per row of data, for an extended model with `target_length`.

        Raises:
            ValueError: rows are longer than that, or as long with skipping positions.
        """
        length = self.data.length or target_length
        if length > target_length:
            raise ValueError(
                f"data.length is {length:,}, beyond the {target_length:,} tokens that the extended model covers. Lower "
                f"it, or raise extension.{'target_length' if self.extension.factor is None else 'factor'}."
            )
        if self.data.positions != "plain" and length == target_length:
            raise ValueError(
                f"data.positions={self.data.positions} skips positions up to the target, but rows of all its "
                f"{length:,} tokens leave none to skip. Set a shorter data.length, such as a quarter of it."
            )
        return length

    def check_engine(self, kind: str) -> None:
        """Raise ValueError for settings that a sequence-parallel engine would silently change, or ZeRO-3 cannot run.

        Context parallel and Ulysses support only SDPA without masks. Each process would draw dropout for its own part
        of a row, so results would depend on the number of processes.
        """
        if kind in ("zero3", "ulysses") and self.training.mlp_tokens:
            raise ValueError(
                f"training.mlp_tokens does not support {kind}, which would gather the MLP's weights for every tile. "
                "Set it to null, or use FSDP2 or context parallel."
            )
        if kind not in ("context_parallel", "ulysses"):
            return
        training = self.training
        wanted = {
            "training.attention": (training.attention, "sdpa"),
            "training.loss": (training.loss, "chunked"),
            "data.documents": (self.data.documents, "joined"),
            "trainable.dropout": (self.trainable.dropout, 0.0),
        }
        if kind == "ulysses":  # DeepSpeed treats any jump of positions as a new document
            wanted["data.positions"] = (self.data.positions, "plain")
        wrong = [f"{key}: {need} (got {got})" for key, (got, need) in wanted.items() if got != need]
        if wrong:
            raise ValueError(f"{kind} splits each sequence across processes, and needs {', '.join(wrong)}.")

    def binding(self, *also: str) -> dict[str, Any]:
        """The settings that a checkpoint is bound to, flattened: `{"training.seed": 0, …}`, and those named in `also`.

        The others do not change what a run computes, so it may resume with other values; a constant schedule's steps do
        not depend on their number.
        """
        length = ("steps", "tokens") if self.training.schedule == "constant" else ()
        unbound = {"measured_on", "output", "evaluation", "engine", "tracker", "merge"}.difference(also)
        free: Any = {
            **dict.fromkeys(unbound, True),
            "data": {"processes"},
            "training": {"checkpoint_every", "keep_checkpoints", *length}.difference(also),
        }
        if self.training.early_stopping and "evaluation" not in also:  # the part of it that training depends on
            free["evaluation"] = EvaluationSettings.model_fields.keys() - {"text", "every", "mid_training_windows"}
        return dict(_flat(self.model_dump(mode="json", exclude=free)))


def read_settings(path: str | Path, changes: Sequence[str] = ()) -> list[Settings]:
    """Read the settings in a YAML file, with changes such as `training.steps=100` or `data.sources.0.weight=2`.

    Returns:
        One run; or with `stages:`, a list of what each changes of the other settings, one run for each, whose output is
        the folder `stage-1` and so on in `output`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not valid YAML, a key is unknown, or a value is invalid; the error lists every mistake.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no config file at {path}. See recipes/configs for examples.")
    tree = _yaml(read_text(path), str(path))
    if not isinstance(tree, dict):
        raise ValueError(f"{path} must hold keys and values, such as 'model: bundled', got {type(tree).__name__}.")
    for change in changes:
        _change(tree, change)
    left, seen = [tree], 0  # nested aliases, with which a few lines expand to huge or infinite values
    while left:
        value, seen = left.pop(), seen + 1
        if seen > MAX_VALUES:
            raise ValueError(f"{path} holds more than {MAX_VALUES} values. Write them without aliases (*name).")
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    stages = tree.pop("stages", None)
    if stages is not None:
        _check_stages(stages, path, changes)
    found, mistakes = [], []
    for number, stage in enumerate([{}] if stages is None else stages):
        try:
            settings = Settings.model_validate(_changed(tree, stage))
        except ValidationError as error:
            for mistake in error.errors():
                of_stage = stages is not None and _has(stage, mistake["loc"])
                where = ["stages", str(number)] if of_stage else []
                said = f"{'.'.join(where)}: " * of_stage + _readable(mistake)
                mistakes.append(_source([*where, *map(str, mistake["loc"])], path, changes) + said)
        else:
            output = settings.output if stages is None else str(Path(settings.output) / f"stage-{number + 1}")
            found.append(settings.model_copy(update={"output": output}))
    if mistakes := [*dict.fromkeys(mistakes)]:
        raise ValueError(mistakes[0] if len(mistakes) == 1 else "\n  ".join(["several mistakes:", *mistakes]))
    return found


def _check_stages(stages: Any, path: Path, changes: Sequence[str]) -> None:
    if not (isinstance(stages, list) and stages and all(isinstance(stage, dict) for stage in stages)):
        raise ValueError(
            f"{path}: stages must be a list of what each stage changes, such as '- extension: {{factor: 4}}', got "
            f"{shown(stages)}."
        )
    if shared := [name for name in SHARED if any(_has(stage, name.split(".")) for stage in stages)]:
        raise ValueError(f"{path}: {', '.join(shared)} must be the same for all stages. Set it outside of stages.")
    for change in changes:
        if all(_has(stage, change.partition("=")[0].split(".")) for stage in stages):
            raise ValueError(f"every stage of {path} sets another value than {change}. Write stages.0.{change}.")


def _changed(tree: dict[str, Any], stage: dict[str, Any]) -> dict[str, Any]:
    """`tree` with the values of a stage, which replace lists and merge sections."""
    merged = dict(tree)
    for key, value in stage.items():
        is_section = isinstance(value, dict) and isinstance(tree.get(key), dict)
        merged[key] = _changed(tree[key], value) if is_section else value
    return merged


def _has(stage: Any, where: Sequence[str | int]) -> bool:
    """Whether a stage sets the value at `where`."""
    for part in where:
        if isinstance(stage, list):
            return True
        if not isinstance(stage, dict) or part not in stage:
            return False
        stage = stage[part]
    return True


class _Loader(yaml.SafeLoader):
    """YAML in which no key is written twice; PyYAML takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is written twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    # ValueError: a date that is none, an int of more digits than Python reads.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        said = one_line(error)
        if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark) is not None:
            said = f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
        raise ValueError(f"{source} is not valid YAML ({said}). Correct it.") from error


def _change(tree: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    if not equals or not key:
        raise ValueError(f"{change!r} is not a change; write KEY=VALUE, such as training.steps=100.")
    *path, last = key.split(".")
    node: Any = tree
    for part in path:
        node = node[_index(part, node, key)] if isinstance(node, list) else node.setdefault(part, {})
        if not isinstance(node, (dict, list)):
            raise ValueError(f"{change!r}: {part} is {node!r} and has no keys.")
    node[_index(last, node, key) if isinstance(node, list) else last] = _yaml(text, shown(change))


def _index(part: str, node: list[Any], key: str) -> int:
    if not part.isdecimal() or int(part) >= len(node):
        raise ValueError(f"{key}: {part!r} is not an index into a list of {len(node)}; write 0 to {len(node) - 1}.")
    return int(part)


def _source(where: list[str], path: Path, changes: Sequence[str]) -> str:
    """Where a mistake was made: `FILE: `, with the changes to its section, or nothing if a change made it."""
    inside = []
    for change in changes:
        key = change.partition("=")[0].split(".")
        if key == where[: len(key)]:
            return ""
        if where == key[: len(where)]:
            inside.append(change)
    return f"{path} with {' '.join(inside)}: " if inside else f"{path}: "


# What a value must be, by the beginning of pydantic's name of the mistake.
KINDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list, such as [a, b]",
    "tuple": "a list, such as [a, b]",
    "dict": "keys and values, such as {a: 1}",
}


def _readable(mistake: Any) -> str:
    """One line per mistake: the key, the fault, and the nearest existing key."""
    kind, loc = mistake["type"], mistake["loc"]
    where, got = ".".join(map(str, loc)), f", got {shown(mistake['input'])}"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"unknown key {where!r}{_nearest(*loc)}"
    if kind == "missing":
        return f"{where} is missing."
    if kind == "too_short" and not mistake["input"]:
        return f"{where} is empty."
    if kind in ("too_short", "too_long"):
        (wanted,) = (n for name, n in mistake["ctx"].items() if name in ("min_length", "max_length"))
        return f"{where} must have {wanted} values{got}"
    if kind == "invalid_key" or "[key]" in loc:
        *parents, _ = (part for part in loc if part != "[key]")
        return f"{'.'.join(map(str, parents))}: a key must be text{got}"
    if keys := _keys(Settings, loc):
        if kind.startswith("list"):
            return f"{where} must be a list, such as [{{{keys[0]}: ...}}]{got}"
        if kind.startswith(("model", "dataclass", "dict")):
            or_null = ", or be null" * (type(None) in typing.get_args(_hints(Settings).get(where)))
            return f"{where} must hold settings, such as {keys[0]}: ...{or_null}{got}"
    if wanted := KINDS.get(kind.partition("_")[0]):
        return f"{where} must be {wanted}{got}"
    message = mistake["msg"].removeprefix("Value error, ").replace("Input should be ", "must be ")
    message = message.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    said = f"{where}: {message}".removeprefix(": ").replace(": must ", " must ", 1)
    return said + ("" if kind == "value_error" or isinstance(mistake["input"], (dict, list)) else got)


def _nearest(*loc: str | int) -> str:
    """The end of an error about an unknown key: the nearest existing key, and all that there are."""
    *parents, name = loc
    known = _keys(Settings, parents)
    if not parents:
        elsewhere = [f"{part}.{name}" for part in known if name in _keys(Settings, [part])]
        if elsewhere:
            return f"; did you mean {' or '.join(map(repr, elsewhere))}?"
        known.append("stages")
    return suggest(str(name), known, within="".join(f"{part}." for part in parents))


def _keys(section: Any, path: Sequence[str | int]) -> list[str]:
    """The keys that exist in the section at `path`; none if a value is there."""
    for part in path:
        if isinstance(part, str):
            section = _hints(section).get(part)
        while typing.get_origin(section) in (list, typing.Union, types.UnionType, Annotated):
            section = next(kind for kind in typing.get_args(section) if kind is not type(None))
    return [*_hints(section)]


def _hints(section: Any) -> dict[str, Any]:
    """The types of a section's keys; none of a value."""
    is_section = isinstance(section, type) and (issubclass(section, BaseModel) or is_dataclass(section))
    return typing.get_type_hints(section) if is_section else {}


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and (value or not prefix):
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, value
