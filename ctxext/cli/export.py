"""`ctxext export`: an extension in each engine's format, from its config alone."""

from __future__ import annotations

import json
import shlex
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ctxext.cli.common import (
    METHOD,
    Factor,
    HowExisting,
    Length,
    Options,
    Revision,
    TargetLength,
    TrainedLength,
    console,
    folder_of,
    in_flags,
    parse_options,
    without_garbage_collection,
)
from ctxext.extension.method_file import PROBE
from ctxext.utils.values import one_line

if TYPE_CHECKING:
    from ctxext.export.rules import EngineExport

# Longer values do not fit a screen; see the file or --json.
LONG = 400


def export(
    model: Annotated[
        str, typer.Argument(help="A checkpoint (a folder, its config.json, or a name on the hub), or a GGUF file.")
    ],
    engine: Annotated[
        str, typer.Option(help="transformers, transformers-v4, vllm, sglang, llama.cpp, or all of them.")
    ] = "all",
    factor: Factor = None,
    target_length: TargetLength = None,
    method: Annotated[str | None, typer.Option(help=f"{METHOD}; where the checkpoint is not extended already.")] = None,
    option: Options = None,
    length: Length = None,
    original_max_position_embeddings: TrainedLength = None,
    existing: HowExisting = "refuse",
    revision: Revision = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="A new folder for a config.json of each engine, or a new .gguf file."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Of the matrices of a GGUF file from a folder: F32, F16, BF16 or Q8_0. Default: F32."),
    ] = None,
    probe: Annotated[
        bool | None,
        typer.Option(
            help="What `ctxext verify` compares with: by default -o writes it too, for which it loads the weights of a "
            "folder that has them. --no-probe loads none.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Print what an engine needs to serve an extension: config, command line, and what it cannot do.

    From the config alone, without -o; with it the weights are loaded for the probe, unless --no-probe says not to.
    """
    how = {
        "factor": factor, "target_length": target_length, "method": method, "length": length,
        "original_max_position_embeddings": original_max_position_embeddings, **parse_options(option),
    }  # fmt: skip
    how = {name: value for name, value in how.items() if value is not None}
    how |= {"existing": existing} if existing != "refuse" else {}
    is_gguf = Path(model).suffix == ".gguf"
    if is_gguf or (output is not None and output.suffix == ".gguf"):
        if as_json:
            raise ValueError("--json prints configs, and a GGUF file has none. Drop it.")
        if is_gguf and (dtype is not None or probe):
            name = "--probe" if probe else "--dtype"
            raise ValueError(f"{name} is for a GGUF file from a folder: this one's weights are copied. Drop it.")
        _write_gguf(model, engine, output, is_gguf, revision, dtype or "F32", how, probe is not False)
        return
    if dtype is not None:
        raise ValueError(f"--dtype {dtype} is for a GGUF file. Say --engine llama.cpp -o OUT.gguf, or drop it.")
    source, exports, refused = _exports(model, engine, revision, how)
    if output is not None:
        if not exports:
            raise ValueError(
                f"no engine takes this, so there is nothing to write. {' '.join(dict.fromkeys(refused.values()))}"
            )
        _write_configs(output, exports)
        if probe is not False:
            _write_probe(Path(folder_of(model)), how, output / PROBE)
    if as_json:
        told = {each.engine: asdict(each) for each in exports}
        print(json.dumps({**told, **{name: {"refused": why} for name, why in refused.items()}}, indent=2))
        return
    for each in exports:
        _show(each, source, output)
    for why in dict.fromkeys(refused.values()):
        _title(", ".join(name for name, its in refused.items() if its == why), "cannot")
        _paragraph(why, "yellow")
        print()


def _write_gguf(
    model: str,
    engine: str,
    output: Path | None,
    is_gguf: bool,
    revision: str | None,
    dtype: str,
    how: dict[str, Any],
    probe: bool,
) -> None:
    from ctxext.export.gguf import extend_gguf, write_gguf
    from ctxext.export.probe import probe_beside
    from ctxext.hub.checkpoint import checkpoint_folder, extend_folder

    if engine != "llama.cpp":
        raise ValueError(f"GGUF files are for llama.cpp alone, got --engine {engine}. Say --engine llama.cpp.")
    if output is None or output.suffix != ".gguf":
        raise ValueError(f"from a GGUF file comes a GGUF file, got --output {output}. Say -o OUT.gguf.")
    if is_gguf:
        plan = extend_gguf(Path(model), output, **how)
        console.print(f"[bold]{plan.summary}[/]", highlight=False)
    else:
        path = probe_beside(output)
        if probe and path.exists():
            raise FileExistsError(f"{path} exists already. Remove it first, or choose another name.")
        folder = checkpoint_folder(folder_of(model), revision)
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".ctxext-", dir=output.parent) as temporary:
            if how:  # the same weights, linked
                extended = extend_folder(folder, Path(temporary) / folder.resolve().name, **how, say=console.print)
                assert extended.output is not None
                folder = extended.output
                console.print(f"[bold]{extended.plan.summary}[/]", highlight=False)
            write_gguf(folder, output, dtype)
            if probe:
                _write_probe(folder, {}, path)
    console.print(f"wrote {output}", highlight=False, soft_wrap=True)


def _write_probe(folder: Path, how: dict[str, Any], path: Path) -> None:
    """Write the probe for `ctxext verify`, or say why there cannot be one."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from ctxext.api import extend_context
    from ctxext.export.probe import make_probe
    from ctxext.hub.checkpoint import architecture_of

    if not any(folder.glob("*.safetensors")):
        console.print(
            f"no weights (safetensors) in {folder}, so there is no {PROBE} for ctxext verify", highlight=False
        )
        return
    console.print(f"loading the weights for {path.name} (--no-probe leaves it out)", highlight=False, soft_wrap=True)
    logging.disable_progress_bar()
    try:
        model = architecture_of(folder).from_pretrained(folder, dtype="auto", use_safetensors=True).eval()
        if how:
            extend_context(model, **how)
        make_probe(model, AutoTokenizer.from_pretrained(folder)).save(path)
    except Exception as error:  # any error, including out of memory: the export is valid without it
        words = f"no {path.name} for ctxext verify: {in_flags(one_line(error))}"
        console.print(words, highlight=False, markup=False, soft_wrap=True)
        return
    console.print(f"wrote {path}, for ctxext verify --probe", highlight=False, soft_wrap=True)


def _exports(
    model: str, engine: str, revision: str | None, how: dict[str, Any]
) -> tuple[dict[str, Any], list[EngineExport], dict[str, str]]:
    """The current config.json, what each engine needs, and the refusals; for a single engine, a refusal is raised."""
    with without_garbage_collection():
        from ctxext.export.rules import ENGINES, NotExportable, export_for
        from ctxext.extension.metadata_file import BESIDE, read_record
        from ctxext.hub.checkpoint import (
            checkpoint_folder,
            extended_json,
            planned_as_saved,
            read_config,
            refuse_adapter,
        )
        from ctxext.utils.json_files import read_json
        from ctxext.utils.values import suggest

        if engine not in ("all", *ENGINES):
            raise ValueError(f"unknown engine {engine!r}{suggest(engine, ('all', *ENGINES))}")
        path = folder_of(model)
        folder = checkpoint_folder(path, revision, config_only=True)
        refuse_adapter(folder, path)
        config = read_config(folder)
    record = read_record(folder)
    plan = None
    if how:
        plan, _ = extended_json(folder, **how)
    elif record is not None:
        plan = planned_as_saved(config, record)
    source = read_json(folder / "config.json").content
    source.pop(BESIDE, None)  # of this folder, not of its export
    if engine != "all":
        return source, [export_for(engine, config, plan, model=path, source=source)], {}
    exports, refused = [], {}
    for name in ENGINES:
        try:
            exports.append(export_for(name, config, plan, model=path, source=source))
        except NotExportable as error:
            refused[name] = in_flags(str(error))
    return source, exports, refused


def _write_configs(output: Path, exports: list[EngineExport]) -> None:
    from ctxext.hub.checkpoint import written_whole

    if output.exists():
        raise FileExistsError(f"{output} exists already. Choose another folder, or remove it first.")
    with written_whole(output) as building:
        for each in exports:
            (building / each.engine).mkdir()
            text = json.dumps(each.config, indent=2, ensure_ascii=False)
            (building / each.engine / "config.json").write_text(text + "\n", encoding="utf-8")
    names = ", ".join(each.engine for each in exports)
    console.print(f"wrote to {output} a config.json for {names}", highlight=False, soft_wrap=True)


# ------------------------------------------------------------------------------------------ the screen


def _title(engine: str, what: str) -> None:
    Console().print(Text.assemble((engine, "bold"), (f"  {what}", "dim")))


def _paragraph(text: str, style: str = "") -> None:
    Console().print(Padding(Text(text, style=style), (0, 0, 0, 2)))


def _copied(text: str) -> None:
    """Print lines for copying, without wrapping."""
    Console().print(text, soft_wrap=True, highlight=False, markup=False)


def _show(export: EngineExport, source: dict[str, Any], output: Path | None) -> None:
    _title(export.engine, f"since {export.least_version}")
    where = "config.json (-o FOLDER writes it)" if output is None else str(output / export.engine / "config.json")
    flags = list(export.flags)
    if any(len(flag) > LONG for flag in flags):
        at = next(i for i, flag in enumerate(flags) if len(flag) > LONG)
        flags = flags[: at - 1] + flags[at + 1 :]
        _paragraph(f"with {where} instead of the checkpoint's:", "dim")
    if flags:
        _copied(_command(flags))
    elif export.config == source:
        _paragraph("the checkpoint as it is.")
    else:
        _paragraph(f"{where} instead of the checkpoint's, with", "dim")
        _copied("\n".join(_lines(export)))
    for warning in export.warnings:
        _paragraph(f"note: {warning}")
    print()


def _command(words: list[str]) -> str:
    """A shell command with one option per line."""
    lines: list[str] = []
    for word in words:
        if lines and not word.startswith("--"):
            lines[-1] += f" {shlex.quote(word)}"
        else:
            lines.append(shlex.quote(word))
    return "  " + " \\\n    ".join(lines)


def _lines(export: EngineExport) -> list[str]:
    """The context keys of a config.json, with long lists abbreviated."""
    names = ["rope_theta", "rope_scaling"] if export.engine == "transformers-v4" else ["rope_parameters"]
    nested = [value for value in export.config.values() if isinstance(value, dict) and "rope_parameters" in value]
    section = nested[0] if nested else export.config
    found = {name: section[name] for name in ("max_position_embeddings", *names) if section.get(name) is not None}
    return [f'  "{name}": {json.dumps(_ends(value), ensure_ascii=False)}' for name, value in found.items()]


def _ends(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _ends(each) for name, each in value.items()}
    if isinstance(value, list) and len(value) > 4:
        return [value[0], f"{len(value) - 2} more", value[-1]]
    return value
