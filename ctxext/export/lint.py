"""Check a server's command line: what its author meant, what the engine does, and the line that is right."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from ctxext.encodings.rope import RopeGeometry
from ctxext.export.commands import LENGTH_OPTIONS, SERVERS, Command, parse_command, parse_overrides
from ctxext.export.effective import (
    BARE_KEYS,
    ROPE_KEYS,
    VERSIONS,
    Effective,
    each_table,
    effective,
    file_parameters,
    kind_of,
    meant_scale,
    metadata,
    version_for,
    version_of,
)  # fmt: skip
from ctxext.export.readings import ENGINE_NAMES, READINGS, Reading
from ctxext.export.rules import EngineExport, changes, export_for, ignored_window
from ctxext.extension.request import plan_extension
from ctxext.methods import ABF, TransformersDynamic, YaRN, method_from_rope_parameters
from ctxext.models.config_fields import ROPE_FIELDS, check_config
from ctxext.models.context import ContextFacts, read_context
from ctxext.models.families import family_of
from ctxext.models.metadata import BESIDE, RECORD
from ctxext.models.rope_tables import RopeTable, length_limit, rope_tables
from ctxext.models.text_config import text_config_of

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig

Severity = Literal["wrong", "unread", "warning"]
_SEVERITIES: tuple[Severity, ...] = ("wrong", "unread", "warning")
# Keys of rope_parameters that belong to the model, not to a scaling.
_OF_THE_MODEL = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
_GUARDS = {"vllm": "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "sglang": "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"}
# Lower-cased, in the wheels of vLLM 0.19.1 and 0.32.0 (envs.py), and of SGLang 0.5.10 and 0.5.23 (EnvBool).
_ON = {"vllm": ("1", "true"), "sglang": ("1", "true", "yes", "y")}
_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
# The model's own way of serving two lists, if not transformers'.
_AT_A_PRICE = tuple(READINGS[name] for name in ("vllm-longrope-lists", "sglang-longrope-switch", "llama.cpp-truncate"))
# Defaults that are only reported where the frequencies differ from those meant.
_HARMLESS = (READINGS["sglang-missing-original"],)
# Frequencies within this ratio are the same: resonance rounds wavelengths.
_CLOSE = 1.05
# A factor this many times the one that the served length needs is reported.
_TOO_LARGE = 2.0


@dataclass(frozen=True)
class Finding:
    """Something that a line does not do as written.

    Attributes:
        severity: "wrong": the model is not served as meant, or not at all. "unread": a part of the line could not be
            read. "warning": the model is served as meant, at a price or by luck.
        words: a sentence or two for the user.
        reading: how the engine reads the field, with evidence; None if the mistake is in the numbers.
    """

    severity: Severity
    words: str
    reading: Reading | None = None


@dataclass(frozen=True)
class Lint:
    """The result of checking a line.

    Attributes:
        does: what the engine does, in a line.
        read: the options that were read.
        findings: the wrong ones first.
        right: what to run instead; None if nothing is wrong.
        why_not: why there is no `right` although something is wrong; "" otherwise.
    """

    engine: str
    version: str
    does: str
    read: tuple[str, ...]
    findings: tuple[Finding, ...]
    right: EngineExport | None
    why_not: str

    @property
    def is_wrong(self) -> bool:
        return any(finding.severity == "wrong" for finding in self.findings)


@dataclass(frozen=True)
class _Meant:
    """What the author of a line meant: the scaling's own parameters and the whole tables, on this model's base."""

    block: dict[str, Any]
    tables: tuple[RopeTable, ...]

    @property
    def first(self) -> RopeTable:
        return self.tables[0]

    @property
    def kind(self) -> str:
        return kind_of(self.first.parameters)

    def beside(self, facts: ContextFacts) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Of each table that rotates as many dimensions: frequencies meant, the model's own, and those before its own
        scaling (radians per token)."""
        own = {table.label: table for table in facts.tables}
        for table in self.tables:
            if (before := own.get(table.label)) is not None and before.rotary_dim == table.rotary_dim:
                ropes = table.in_use, before.in_use, facts.original_rope_of(before)
                yield ropes[0].inv_freq, ropes[1].inv_freq, ropes[2].inv_freq

    def extends(self, facts: ContextFacts) -> bool:
        """Whether some pairs are slower than in the model itself."""
        return any(bool((meant < own / _CLOSE).any()) for meant, own, _ in self.beside(facts))

    def adds_to(self, facts: ContextFacts) -> bool:
        """Whether the model's own scaling is kept and extended."""
        return self.extends(facts) and not _replaces_own(self, facts)

    def undoes(self, facts: ContextFacts) -> bool:
        """Whether some pairs that the model's own scaling slows are faster than it makes them."""
        return any(
            bool(((own < plain / _CLOSE) & (meant > own * _CLOSE)).any()) for meant, own, plain in self.beside(facts)
        )


def lint(
    command: Command,
    config: PreTrainedConfig,
    source: dict[str, Any],
    version: str | None = None,
    edited: tuple[PreTrainedConfig, dict[str, Any]] | None = None,
    suggest: bool = True,
) -> Lint:
    """Compare what `command` asks for with what its engine does.

    Args:
        config: of the model as published, with its config.json in `source`.
        version: of the engine; by default the line's own, or the newest known one.
        edited: the config that is served, and its config.json, if it is another one.
        suggest: whether to look for the right line.

    Raises:
        ValueError: as `effective` and `read_context`, or the line's rope parameters are not valid ones.
    """
    if command.engine == "llama.cpp" and command.overrides:
        raise ValueError("llama.cpp has no overrides in JSON. Pass its command line, or an edited config.json.")
    facts = read_context(config)
    served, served_source = edited or (config, source)
    pinned = version or command.version
    version = version_for(command, version)
    try:
        does = effective(command, served, served_source, version)
        meant = _meant(command, facts, read_context(served))
    except ValueError as error:
        raise ValueError(_by_its_name(str(error), command.engine)) from error
    found = [*_parsed(command), *_newer(command.engine, version)]
    another = _another_model(config, served)
    repeated = _repeats_the_file(command, facts, meant)
    unread = served_source.get(BESIDE) or source.get(BESIDE)
    is_lost = bool(unread) and not meant.extends(facts)
    engine = ENGINE_NAMES.get(command.engine, command.engine)
    if is_lost:
        found.append(Finding("wrong", f"{engine} does not read the model's extension, {unread} in {RECORD}."))
    elif unread:
        words = f"this runs {meant.kind} scaling instead of the model's own extension, {unread} in {RECORD}, which "
        found.append(Finding("warning", f"{words}{engine} cannot run."))
    if another or repeated:
        found.append(Finding("wrong", another or repeated))
    else:
        numbers = list[Finding]()
        if not any(remark.fatal for remark in does.remarks):
            numbers = [*_numbers(does, meant, facts)]
        found += [*_remarks(does, facts, harmless=() if numbers else _HARMLESS), *_origin(meant, facts, does), *numbers]
        if not any(remark.fatal for remark in does.remarks):
            found += _lengths(command, version, does, meant, facts)
    findings = tuple(sorted(dict.fromkeys(found), key=lambda finding: _SEVERITIES.index(finding.severity)))
    checked = Lint(command.engine, version, _summary(does), command.read, findings, None, "")
    if another:
        return replace(checked, why_not="the config to check and the one to compare with are of different models.")
    if is_lost:
        return replace(checked, why_not="config.json cannot express it. Serve it with ctxext serve.")
    if not checked.is_wrong or not suggest:
        return checked
    limit, is_dynamic = length_limit(facts.text_config), meant.kind == "dynamic"
    is_longer = command.length is None and not meant.block and not is_dynamic and does.length > limit
    asked = replace(command, length=does.length) if is_longer else command
    try:
        for right in _right(asked, meant, facts, config, source):
            try:
                return replace(checked, right=_printed(right, command, config, source, pinned, version))
            except ValueError as error:
                why_not = str(error)
    except ValueError as error:
        why_not = str(error)
    return replace(checked, why_not=why_not.partition(". ")[0].rstrip(".") + ".")


def misread_by(config: PreTrainedConfig, source: dict[str, Any]) -> list[str]:
    """The servers whose newest known version would not serve a folder with this config.json as extended.

    Those whose reading of its encoding or family is not known are left out.
    """
    found = []
    for engine in ("vllm", "sglang"):
        with suppress(ValueError):
            command = Command(engine, length=read_context(config).reach)
            if lint(command, config, source, suggest=False).is_wrong:
                found.append(ENGINE_NAMES[engine])
    return found


def _by_its_name(error: str, engine: str) -> str:
    """An error that begins with a method's option, with the name that the line has for it."""
    name = re.match(r"([a-z_0-9]+) (must|has) ", error)
    if name is None or name[1] in (*ROPE_KEYS, "rope_theta"):
        return error
    if engine == "llama.cpp":
        return re.sub(r"beta_(fast|slow)", r"--yarn-beta-\1", error)
    return f"rope_parameters.{error}"


# --------------------------------------------------------------------------------- what the author meant


def _blocks(overrides: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rope parameters in overrides, wherever they stand."""
    if any(key in overrides for key in BARE_KEYS):
        yield {key: value for key, value in overrides.items() if key in ROPE_FIELDS}
    for key, value in overrides.items():
        if isinstance(value, dict):
            yield from (value,) if key in ROPE_KEYS else _blocks(value)


def _meant(command: Command, facts: ContextFacts, served: ContextFacts) -> _Meant:
    if command.engine == "llama.cpp":
        return _meant_by_flags(command, facts)
    block = next(_blocks(command.overrides), None)
    if command.engine == "vllm" and "--rope-scaling" in command.options:
        with suppress(ValueError):  # the flag was removed, whatever its value
            block = parse_overrides(command.options["--rope-scaling"], "--rope-scaling")
    theta = command.overrides.get("rope_theta", command.number("--rope-theta"))
    if block is None and theta is None:
        own = served.whole_parameters
        return _Meant(own if own != facts.whole_parameters else {}, served.tables)
    block = {**({} if theta is None else {"rope_theta": theta}), **(block or {})}
    parameters = copy.deepcopy(facts.whole_parameters)
    for label, given in each_table(block):
        if label and not isinstance(parameters.get(label), dict):
            known = ", ".join(each for each, _ in each_table(parameters)) or "without a name"
            raise ValueError(f"rope_parameters hold {label!r}, but this model's tables are {known}. Correct it.")
        place = label or facts.tables[0].label
        before = parameters[place] if place else parameters
        filled = {**{key: before[key] for key in _OF_THE_MODEL if key in before}, **given, "rope_type": kind_of(given)}
        if filled["rope_type"] in ("yarn", "llama3"):
            filled.setdefault("original_max_position_embeddings", _original(facts))
        parameters = {**parameters, place: filled} if place else filled
    text_config = copy.deepcopy(facts.text_config)
    text_config.rope_parameters = parameters
    check_config(text_config)
    tables = rope_tables(text_config, parameters)
    if unknown := [kind for table in tables if (kind := kind_of(table.parameters)) not in _KINDS]:
        raise ValueError(f"unsupported rope_type {unknown[0]!r}. Known: {', '.join(_KINDS)}.")
    return _Meant(block, tables)


def _meant_by_flags(command: Command, facts: ContextFacts) -> _Meant:
    """llama.cpp's flags, where a factor that is left out is the one that the length needs."""
    table, (keys, _) = file_parameters(facts.text_config), metadata(command, facts.text_config)
    flag = command.number("--rope-scale") or 1 / (command.number("--rope-freq-scale") or 1.0)
    scale = flag if flag != 1.0 else keys.get("rope.scaling.factor") or 1.0
    usual = keys.get("rope.scaling.type") or ("linear" if scale != 1.0 else "default")
    kind = command.options.get("--rope-scaling", usual)
    block: dict[str, Any] = {}
    if theta := command.number("--rope-freq-base") or keys.get("rope.freq_base"):
        block["rope_theta"] = theta
    if kind in ("linear", "yarn"):
        if scale == 1.0:
            scale = max(1.0, (command.length or 0) / facts.trained_length)
        block |= {"rope_type": kind, "factor": scale}
    if kind == "yarn":
        original = command.number("--yarn-orig-ctx") or keys.get("rope.scaling.original_context_length")
        block["original_max_position_embeddings"] = int(original or table.limit)
        block |= {
            name: value
            for name in ("beta_fast", "beta_slow")
            if (value := command.number(f"--yarn-{name.replace('_', '-')}")) is not None
        }
        attn_factor = (command.number("--yarn-attn-factor") or 1.0) * (keys.get("rope.scaling.attn_factor") or 1.0)
        if attn_factor != 1:
            block["attn_factor"] = attn_factor
    kept = table.parameters if "rope_type" not in block else {"rope_theta": table.parameters["rope_theta"]}
    return _Meant(block, (replace(table, parameters={"rope_type": "default", **kept, **block}),))


# ------------------------------------------------------------------------------------------- the findings


def _newer(engine: str, version: str) -> Iterator[Finding]:
    newest = VERSIONS[engine][1]
    known = version_of(engine, newest)
    if version_of(engine, version)[: len(known)] > known:
        yield Finding(
            "warning", f"ctxext knows {engine} up to {newest}, and judges {version} by the rules of {newest}."
        )


def _parsed(command: Command) -> Iterator[Finding]:
    yield from (Finding("wrong", words) for words in command.mistakes)
    yield from (Finding("unread", words) for words in command.unread)


def _another_model(config: PreTrainedConfig, served: PreTrainedConfig) -> str:
    """How an edited config differs in what an extension never changes; "" if it does not."""
    ours, theirs = text_config_of(config), text_config_of(served)
    for name in ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        one, other = getattr(ours, name, None), getattr(theirs, name, None)
        if one != other:
            return f"this is another model's config: its {name} is {other}, and that of the model is {one}."
    return ""


def _repeats_the_file(command: Command, facts: ContextFacts, meant: _Meant) -> str:
    """What flags do to a GGUF file that ctxext has extended; "" if there are none."""
    if command.engine != "llama.cpp" or facts.mark is None or not meant.block:
        return ""
    method, _, lengths = facts.summary.partition(": ")
    name = command.model or "the file"
    return f"{name} already holds {method} ({lengths.removesuffix(' tokens')}); these flags repeat it."


def _remarks(does: Effective, facts: ContextFacts, harmless: Sequence[Reading]) -> Iterator[Finding]:
    for remark in does.remarks:
        if remark.reading in harmless:
            continue
        words = remark.words
        if remark.reading is READINGS["sglang-missing-original"]:
            words = f"{words.rstrip('.')}; the model was trained at {_original(facts)}."
        yield Finding("warning" if remark.reading in _AT_A_PRICE else "wrong", words, remark.reading)


def _numbers(does: Effective, meant: _Meant, facts: ContextFacts) -> Iterator[Finding]:
    """Differences between the frequencies and multipliers that were meant and those that are used."""
    latent = family_of(facts.text_config).softmax_mscale
    for table in meant.tables:
        used, wanted = does.tables.get(table.label), table.at(does.length)
        if used is None:
            continue
        where = f" in {table.label}" if table.label else ""
        scale = meant_scale(table, latent)
        if not _equal(used, wanted) and any(_equal(used, own.at(does.length)) for own in facts.tables):
            yield Finding("wrong", f"the scaling is not applied{where}: the frequencies are the model's own.")
            continue
        if not _equal(used, wanted):
            # llama.cpp has no truncate, so that its own line of gpt-oss cannot be better.
            rounded = replace(table, parameters={**table.parameters, "truncate": True}).at(does.length)
            is_rounded = READINGS["llama.cpp-truncate"] in [remark.reading for remark in does.remarks]
            severity: Severity = "warning" if is_rounded and _equal(used, rounded) else "wrong"
            yield Finding(severity, f"{_difference(used, wanted)}{where}.")
        if not math.isclose(used.attention_factor, scale, rel_tol=1e-6):
            ratio = (used.attention_factor / scale) ** 2
            words = f"cos and sin{where} are multiplied by {used.attention_factor:.4g}, not by {scale:.4g}: attention "
            yield Finding("wrong", words + f"logits are {ratio:.3g} times those meant.")


def _equal(one: RopeGeometry, other: RopeGeometry) -> bool:
    return one.inv_freq.shape == other.inv_freq.shape and torch.allclose(
        one.inv_freq, other.inv_freq, rtol=1e-5, atol=0
    )


def _difference(used: RopeGeometry, wanted: RopeGeometry) -> str:
    if used.inv_freq.shape != wanted.inv_freq.shape:
        return f"{used.dim} dimensions of each head are rotated instead of {wanted.dim}"
    if used.rope_theta != wanted.rope_theta:
        return f"the frequencies are those of theta {used.rope_theta:.9g} instead of {wanted.rope_theta:.9g}"
    worst = float((used.inv_freq / wanted.inv_freq).log().abs().max().exp())
    return f"frequencies are off by a factor of up to {worst:.3g}"


def _origin(meant: _Meant, facts: ContextFacts, does: Effective) -> Iterator[Finding]:
    """A scaling and numbers that do not belong to this checkpoint."""
    stays = READINGS["llama.cpp-scaled-file"] in [remark.reading for remark in does.remarks]
    if _replaces_own(meant, facts) and not stays:
        scaling, known = kind_of(facts.rope_parameters), facts.checkpoint
        words = f"{meant.kind} replaces the model's own {scaling} scaling, which it was trained with. Leave it out; "
        yield Finding("warning" if known is None else "wrong", words + "the model's own stays in effect.")
    for label, block in each_table(meant.block):
        own = facts.original_thetas.get(label, facts.original_theta)
        theta = block.get("rope_theta")
        if theta is not None and theta < own * (1 - 1e-6):
            yield Finding("wrong", f"rope_theta is {theta:.9g}, but this model was trained with {own:.9g}.")
        elif theta is not None and theta > own * (1 + 1e-6) and kind_of(block) != "default":
            words = f"rope_theta is {theta:.9g}, but this model was trained with {own:.9g}: both the base and "
            yield Finding("warning", words + f"{kind_of(block)} scale.")
        given, right = block.get("original_max_position_embeddings"), _original(facts)
        if given is not None and given != right and _reads_original(block):
            known = facts.checkpoint
            where = "its config" if known is None else f"{known.name}: {known.source}"
            words = f"the original length is {given:g}, but this model was trained at {right} tokens ({where})."
            yield Finding("warning" if known is None else "wrong", words)
    recipe = {} if facts.checkpoint is None else facts.checkpoint.recipe
    if meant.block and meant.kind == "linear" and recipe.get("rope_type") == "yarn":
        words = f"linear scaling needs fine-tuning; the vendor's recipe is yarn ×{recipe['factor']:g}."
        yield Finding("warning", words)


def _reads_original(block: dict[str, Any]) -> bool:
    """Whether the frequencies depend on the original length: one list of factors holds it already."""
    if kind_of(block) == "longrope":
        return block.get("short_factor") != block.get("long_factor")
    return kind_of(block) in ("yarn", "llama3")


def _replaces_own(meant: _Meant, facts: ContextFacts) -> bool:
    """Whether a scaling that the checkpoint was trained with is lost."""
    bolted_on = facts.checkpoint is not None and facts.checkpoint.scaling == "bolted-on"
    turns_dynamic = meant.kind == "dynamic" != kind_of(facts.rope_parameters)  # plain up to its original length
    return facts.is_scaled and not bolted_on and (turns_dynamic or meant.undoes(facts))


def _original(facts: ContextFacts) -> int:
    """The trained length before any scaling, in tokens."""
    recipe = {} if facts.checkpoint is None else facts.checkpoint.recipe
    return int(recipe.get("original_max_position_embeddings") or facts.original_length or facts.trained_length)


def _lengths(command: Command, version: str, does: Effective, meant: _Meant, facts: ContextFacts) -> Iterator[Finding]:
    engine, kind, parameters = command.engine, meant.kind, meant.first.parameters
    guard = _GUARDS.get(engine, "")
    is_open = command.environment.get(guard, "").strip().lower() in _ON.get(engine, ())
    if does.length > does.limit and not is_open:
        name = "length"
        if engine == "vllm" and kind == "yarn":
            name = "yarn-length" if version_of(engine, version) < (0, 30) else "yarn-length-new"
        words = f"a length of {does.length} is rejected, as this config allows {does.limit}: the server does not start."
        yield Finding("wrong", words, READINGS[f"{engine}-{name}"])
    if does.rows is not None and does.rows < does.length and (is_open or does.length <= does.limit):
        beyond = "logits are NaN" if engine == "vllm" else "the frequencies are others"
        words = f"the cos/sin table has {does.rows} rows, fewer than {does.length}: {beyond} beyond."
        name = "sglang-yarn-rows" if engine == "sglang" else "vllm-long-override" if is_open else ""
        yield Finding("wrong", words, READINGS.get(name))
    elif is_open:
        words = f"{guard} switches the length check off. The right overrides do not need it."
        yield Finding("warning", words, READINGS[f"{engine}-long-override"])
    served = does.length if is_open or does.length <= does.limit else 0  # otherwise the server does not start
    if (window := ignored_window(engine, facts.text_config, served)) is not None:
        words = f"the sliding window of {window} tokens is ignored, and every layer attends to all {served}: serve at "
        yield Finding("wrong", f"{words}most {window}, or use vLLM.", READINGS[f"{engine}-window"])
    if not meant.extends(facts) and not _replaces_own(meant, facts) and kind != "dynamic":
        published = length_limit(facts.text_config)
        asked = command.length or (served if served > published else 0)
        if min(asked, served) > (max(facts.reach, published) if facts.is_scaled else facts.reach):
            words = f"{served} tokens are served without scaling; this model was trained at {facts.reach}."
            if facts.is_scaled:
                words = f"{served} tokens are served, but this model's own {kind} scaling reaches {facts.reach}."
            yield Finding("wrong" if not facts.is_scaled and served > published else "warning", words)
    elif meant.block and kind in ("linear", "yarn"):
        factor = float(parameters.get("factor") or 1.0)
        original = parameters.get("original_max_position_embeddings") or _original(facts)
        reach, needed = math.ceil(original * factor), max(1.0, does.length / original, (command.length or 0) / original)
        if does.length > reach:
            yield Finding("wrong", f"{does.length} tokens are served, but factor {factor:g} reaches only {reach}.")
        elif needed * _TOO_LARGE <= factor:
            words = f"factor {factor:g} is more than {does.length} tokens need ({needed:.3g}). It costs accuracy on "
            longer = f"or serve its {reach} tokens, with {LENGTH_OPTIONS[engine]} {reach}."
            yield Finding("warning", f"{words}short prompts: lower it, {longer}")


# ------------------------------------------------------------------------------------------ the right line


def _right(
    command: Command, meant: _Meant, facts: ContextFacts, config: PreTrainedConfig, source: dict[str, Any]
) -> Iterator[EngineExport]:
    """What was meant, from the length that this checkpoint was trained at: the simplest line first.

    A model that was trained with a scaling keeps it, unless the line has other numbers for the same type.
    """
    table, target, original = meant.first, command.model or "MODEL", _original(facts)
    given = float(table.parameters.get("factor") or 1.0) if meant.block else 1.0
    if meant.kind == "dynamic" and not meant.block:  # of the model itself: plain RoPE within the config's length
        if (command.length or 0) > table.limit:
            raise ValueError(f"no engine follows the model's dynamic scaling beyond {table.limit} tokens.")
        yield _as_it_is(replace(command, length=command.length or table.limit), source)
        return
    if facts.is_scaled and (_repeats_the_file(command, facts, meant) or not meant.adds_to(facts)):
        plan = None
        if facts.mark is not None and command.engine == "llama.cpp" and (command.length or 0) > facts.reach:
            raise ValueError(f"the file reaches {facts.reach} tokens, so extend the file that it was made from.")
        if (command.length or 0) <= facts.reach:
            yield _as_it_is(command, source)
            if command.engine == "llama.cpp":  # the file holds the scaling
                return
        else:
            if facts.mark is not None:
                raise ValueError(f"the model is extended to {facts.reach} tokens, so extend the original one further.")
            plan = plan_extension(config, target_length=command.length, existing="keep")
        yield export_for(command.engine, config, plan, model=target, source=source)
        return
    if facts.checkpoint is None:  # what its author says of a model that is not in the table
        original = int(table.parameters.get("original_max_position_embeddings") or original)
    needed = (command.length or 0) / original
    factor = max(needed, 1.0) if 1 < needed * _TOO_LARGE <= given else max(given, needed, 1.0)
    if factor == 1.0 and not facts.is_scaled:
        yield _as_it_is(command, source)
        return
    method = method_from_rope_parameters(table.of_turning_pairs, table.limit)
    theta = float(table.parameters["rope_theta"])
    if method is not None and meant.block and not isinstance(method, TransformersDynamic):
        method = replace(method, factor=factor)
    elif method is None and theta > facts.original_theta:
        method = ABF(factor=factor, rope_theta=theta)
    else:
        method = YaRN(factor=factor)
    existing = "replace" if facts.is_scaled else "refuse"
    plan = plan_extension(config, method=method, existing=existing, original_max_position_embeddings=original)
    yield export_for(command.engine, config, plan, model=target, source=source)


def _printed(
    right: EngineExport,
    command: Command,
    config: PreTrainedConfig,
    source: dict[str, Any],
    pinned: str | None,
    version: str,
) -> EngineExport:
    """The right line as it is printed, for the length that was asked for. Raises ValueError if it is wrong itself."""
    flags, own = [*right.flags], LENGTH_OPTIONS[command.engine]
    needs_file = any("replace the checkpoint" in warning for warning in right.warnings)
    if command.engine == "sglang" and needs_file:
        # From 0.5.17 a nested config keeps its other keys.
        flags += ["--json-model-override-args", json.dumps(changes(source, right.config))]
        right = replace(right, warnings=())
    if own in flags and command.length is not None and command.length < right.length:
        flags[flags.index(own) + 1] = str(command.length)
        right = replace(right, length=command.length)
    if command.program is not None:
        flags[0] = command.program
    right = replace(right, flags=_for_version(tuple(flags), command.engine, pinned))
    if "OUT.gguf" in right.flags:  # of another file, which is the extended one
        return right
    again = lint(parse_command(right.flags), config, source, version, suggest=False)
    if again.is_wrong and needs_file:
        raise ValueError(
            f"options alone cannot express it: write the config.json with ctxext export --engine {command.engine} -o "
            "DIR, and serve that."
        )
    if again.is_wrong:
        raise ValueError(f"no line alone does it, as the nearest one shows: {again.findings[0].words}")
    return right


def _as_it_is(command: Command, source: dict[str, Any]) -> EngineExport:
    """The model as published."""
    named_by = {"sglang": ["--model-path"], "llama.cpp": ["-hf" if "--hf-repo" in command.options else "-m"]}
    start = [*SERVERS[command.engine].split(), *named_by.get(command.engine, []), command.model or "MODEL"]
    length = () if command.length is None else (LENGTH_OPTIONS[command.engine], str(command.length))
    least = VERSIONS[command.engine][0]
    return EngineExport(command.engine, least, copy.deepcopy(source), (*start, *length), (), command.length or 0)


def _for_version(flags: tuple[str, ...], engine: str, version: str | None) -> tuple[str, ...]:
    """A line for one version: without the keys that vLLM up to 0.19.0 needs, if it is a later one."""
    if engine != "vllm" or version is None or version_of(engine, version) < (0, 19, 1):
        return flags

    def newer(overrides: dict[str, Any]) -> dict[str, Any]:
        older = ("rope_scaling", "rope_theta") if "rope_parameters" in overrides else ()
        kept = {key: value for key, value in overrides.items() if key not in older}
        return {key: newer(value) if key.endswith("_config") else value for key, value in kept.items()}

    pairs = zip(("", *flags), flags, strict=False)
    return tuple(json.dumps(newer(json.loads(flag))) if name == "--hf-overrides" else flag for name, flag in pairs)


def _summary(does: Effective) -> str:
    """Frequencies, multiplier and length of the first table, in a line."""
    (_, first), *others = does.tables.items()
    largest = _largest(first)
    kind = f"frequencies divided by up to {largest:.3g}" if largest > _CLOSE else "unscaled frequencies"
    kind = "plain RoPE" if first.is_plain else kind
    more = f" (and {len(others)} more tables)" if others else ""
    multiplier = "" if first.attention_factor == 1 else f", cos and sin × {first.attention_factor:.4g}"
    verb = "asks for" if does.length > does.limit else "serves"
    lengths = f"{verb} {does.length:,} tokens; the config allows {does.limit:,}"
    return f"theta {first.rope_theta:.9g}, {kind}{multiplier}{more}; {lengths}"


def _largest(rope: RopeGeometry) -> float:
    plain = RopeGeometry.plain(rope.dim, rope.rope_theta, rope.original_max_position_embeddings)
    return float((plain.inv_freq / rope.inv_freq).max())
