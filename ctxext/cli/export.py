"""`ctxext export`: an extension in each engine's format, from its config alone."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ctxext.cli import common
from ctxext.cli.common import console
from ctxext.extension.method_file import PROBE, check_new, check_writable
from ctxext.utils.values import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ctxext.export.rules import EngineExport

# Longer values are abbreviated on screen; the file and --json have them in full.
LONG = 400
# Of an output that was meant as a file. A folder's name may have other dots.
FILES = (".bin", ".json", ".pt", ".safetensors", ".txt", ".yaml")


def export(
    model: Annotated[
        str, typer.Argument(help="A checkpoint (a folder, its config.json, or a name on the hub), or a GGUF file.")
    ],
    engine: Annotated[
        str,
        typer.Option(
            help="transformers, transformers-v4, vllm, sglang, mlx, exllamav3, lmdeploy, onnxruntime-genai, openvino, "
            "llama.cpp, ollama, or all of them."
        ),
    ] = "all",
    factor: common.Factor = None,
    target_length: common.TargetLength = None,
    method: Annotated[
        str | None, typer.Option(help=f"{common.METHOD}. Not needed if the checkpoint is already extended.")
    ] = None,
    option: common.Options = None,
    length: common.Length = None,
    original_max_position_embeddings: common.TrainedLength = None,
    existing: common.HowExisting = "refuse",
    revision: common.Revision = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="A new folder with a folder for each engine, ready to serve (weights are linked; for a config alone, "
            "config.json only), or a new .gguf file.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Weight type of a GGUF file made from a folder: F32, F16, BF16 or Q8_0. Default: F32."),
    ] = None,
    probe: Annotated[
        bool | None,
        typer.Option(
            help="Write the probe for `ctxext verify`, which loads the weights. Default: with -o, if the folder has "
            "weights.",
            show_default=False,
        ),
    ] = None,
    far: Annotated[
        int | None,
        typer.Option(
            parser=common.parse_tokens_or_none,
            metavar="TOKENS",
            help="Longest text of the probe; 0: short texts only, which takes seconds. Default: the target length, at "
            "most 16k.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Print what an engine needs to serve an extension: config, command line and limitations.

    Reads only the config. With -o the weights are loaded too, for the probe; --no-probe skips it.
    """
    with common.without_garbage_collection():
        from ctxext.export.rules import GGUF_ENGINES

    how = {
        "factor": factor, "target_length": target_length, "method": method, "length": length,
        "original_max_position_embeddings": original_max_position_embeddings, **common.parse_options(option),
    }  # fmt: skip
    how = {name: value for name, value in how.items() if value is not None}
    how |= {"existing": existing} if existing != "refuse" else {}
    is_gguf, to_gguf = names_gguf(Path(model)), output is not None and names_gguf(output)
    if is_gguf or to_gguf:
        if as_json:
            raise ValueError("--json prints configs, and a GGUF file has none. Drop --json.")
        if is_gguf and (dtype is not None or probe):
            name = "--probe" if probe else "--dtype"
            raise ValueError(
                f"{name} is for a GGUF file made from a folder: a GGUF file's weights are copied. Drop {name}."
            )
        if engine not in GGUF_ENGINES:
            raise ValueError(
                f"GGUF files are exported only for llama.cpp and Ollama, got --engine {engine}. Use --engine llama.cpp."
            )
        if output is None or not to_gguf:
            raise ValueError(f"GGUF output needs a .gguf file name, got --output {output}. Use -o OUT.gguf.")
        check_writable(output)
        check_new(output)
        modelfile = output.with_suffix(".Modelfile")
        if engine == "ollama":
            check_new(modelfile)
        if is_gguf:
            _extend_gguf(model, output, how)
        else:
            _gguf_of_folder(model, output, revision, dtype or "F32", how, probe is not False, far)
        _show_server(output, modelfile if engine == "ollama" else None)
        return
    if output is not None and output.suffix.lower() in FILES:
        raise ValueError(f"--output {output} looks like a file. Pass a new folder, or OUT.gguf for a GGUF file.")
    if engine in GGUF_ENGINES and output is not None:
        raise ValueError(f"{engine} reads a GGUF file, got the folder --output {output}. Use -o OUT.gguf.")
    if dtype is not None:
        raise ValueError(
            f"--dtype {dtype} applies only to GGUF output. Use --engine llama.cpp -o OUT.gguf, or drop it."
        )
    if output is not None:
        check_new(output)
    adapter = Path(model)
    if with_adapter := (adapter / "adapter_config.json").is_file():
        model, how = _base_of_adapter(adapter, engine, how)
    folder, source, exports, refused = _exports(model, engine, revision, how, output, adapter if with_adapter else None)
    if not exports and not as_json:
        raise ValueError(f"no engine supports this extension: {' '.join(dict.fromkeys(refused.values()))}")
    own = [each for each in (folder, adapter) if output is not None and output.resolve().is_relative_to(each.resolve())]
    if own:
        raise ValueError(f"--output {output} is inside the checkpoint's own folder. Choose one outside {own[0]}.")
    if output is not None and exports:
        _write_folders(output, exports, folder)
        if probe is not False:
            _write_probe(folder, how, output / PROBE, far, output)
    if as_json:
        told = {each.engine: asdict(each) for each in exports}
        print(json.dumps({**told, **{name: {"refused": why} for name, why in refused.items()}}, indent=2))
        raise typer.Exit(0 if exports else 1)
    for each in exports:
        _show(each, source, output)
    for why in dict.fromkeys(refused.values()):
        _title(", ".join(name for name, its in refused.items() if its == why), "cannot")
        _paragraph(why, "yellow")
        print()


def _show_server(file: Path, modelfile: Path | None) -> None:
    """Print the command line that serves a GGUF file; Ollama's `modelfile` is written."""
    from ctxext.export.gguf import context_of_gguf

    length = context_of_gguf(file).max_position_embeddings
    if modelfile is None:
        copied(command_lines(("llama-server", "-m", str(file), "--ctx-size", str(length))))
        return
    modelfile.write_text(f"FROM ./{file.name}\nPARAMETER num_ctx {length}\n", encoding="utf-8")
    common.say(f"wrote {modelfile}")
    copied(command_lines(("ollama", "create", file.stem, "-f", str(modelfile))))


def _extend_gguf(model: str, output: Path, how: dict[str, Any]) -> None:
    from ctxext.export.gguf import extend_gguf

    console.print(f"[bold]{extend_gguf(Path(model), output, **how).summary}[/]", highlight=False)
    common.say(f"wrote {output}")


def _gguf_of_folder(
    model: str, output: Path, revision: str | None, dtype: str, how: dict[str, Any], probe: bool, far: int | None
) -> None:
    from ctxext.export.gguf import write_gguf
    from ctxext.export.probe import probe_beside
    from ctxext.export.rules import check_extended
    from ctxext.hub.checkpoint import checkpoint_folder, extend_folder, read_config

    path = probe_beside(output)
    if probe:
        check_new(path)
    folder = checkpoint_folder(common.folder_of(model), revision)
    if not how:
        check_extended(read_config(folder))
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".ctxext-", dir=output.parent) as temporary:
        if how:  # the same weights, linked
            extended = extend_folder(folder, Path(temporary) / folder.resolve().name, **how, say=console.print)
            assert extended.output is not None
            folder = extended.output
            common.say_plan(extended.plan)
        write_gguf(folder, output, dtype)
        common.say(f"wrote {output}")
        if probe:
            _write_probe(folder, {}, path, far, output)


def _write_probe(folder: Path, how: dict[str, Any], path: Path, far: int | None, exported: Path) -> None:
    """Write the probe for `ctxext verify`, or say why there cannot be one."""
    from transformers.utils import logging

    from ctxext.api import extend_context
    from ctxext.export.probe import make_probe
    from ctxext.hub.checkpoint import load_model, load_tokenizer

    if not has_weights(folder):
        common.say(f"no safetensors weights in {folder}: {PROBE}, for ctxext verify, is not written")
        return
    logging.disable_progress_bar()
    try:
        model, tokenizer = load_model(folder, dtype="auto"), load_tokenizer(folder)
        if how:
            extend_context(model, **how)
        _say_time(model, tokenizer, path, far)
        make_probe(model, tokenizer, far=far).save(path)
    except KeyboardInterrupt:
        common.say(
            f"{exported} is written, but not {path.name}, which ctxext verify compares it with. To write it from the "
            f"extended checkpoint: ctxext verify DIR --far 0 -o {path}"
        )
        raise
    except Exception as error:  # any error, including out of memory: the export is valid without it
        common.say(f"could not write {path.name} for ctxext verify: {common.in_flags(one_line(error))}")
        return
    common.say(f"wrote {path}, for ctxext verify --probe")


def _say_time(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path, far: int | None) -> None:
    """Print how long the probe will take, by one timed pass."""
    from ctxext.evals.prompts import Prompter
    from ctxext.evals.targets import LiveModel
    from ctxext.evals.workload import Speed
    from ctxext.export.probe import FAR_LIMIT, TEXT
    from ctxext.training.estimate import duration

    target = LiveModel(model, Prompter(tokenizer), str(path))
    length = min(target.about["reach"], FAR_LIMIT if far is None else far)
    if length <= target.about["trained_length"]:
        common.say(f"writing {path.name}, of short texts")
        return
    # It reads texts of a half, a quarter, ... of the length, too: together at most as much again.
    seconds = 2 * Speed.measured(target, tokenizer(TEXT)["input_ids"]).reading(length)
    common.say(
        f"writing {path.name}: reads texts of up to {length:,} tokens, up to {duration(seconds)} (--far 0: short texts "
        "only; --no-probe: none)"
    )


def _exports(
    model: str, engine: str, revision: str | None, how: dict[str, Any], output: Path | None, adapter: Path | None
) -> tuple[Path, dict[str, Any], list[EngineExport], dict[str, str]]:
    """The checkpoint's folder, its config.json, each engine's export, and the refusals; that of a single engine is
    raised."""
    with common.without_garbage_collection():
        from ctxext.export.lora import with_adapter
        from ctxext.export.rules import ENGINES, GGUF_ENGINES, NotExportable, export_for
        from ctxext.extension.metadata_file import BESIDE, read_record
        from ctxext.hub import checkpoint
        from ctxext.utils.json_files import read_json
        from ctxext.utils.values import suggest

        if engine not in ("all", *ENGINES):
            raise ValueError(f"unknown engine {engine!r}{suggest(engine, ('all', *ENGINES))}")
        path = common.folder_of(model)
        folder = checkpoint.checkpoint_folder(path, revision, config_only=True)
        config = checkpoint.read_config(folder)
    record, plan = read_record(folder), None
    if how:
        plan, _ = checkpoint.extended_json(folder, **how)
    elif record is not None:
        plan = checkpoint.planned_as_saved(config, record)
    source = read_json(folder / "config.json").content
    source.pop(BESIDE, None)  # describes this folder, not its export
    ready = output is not None and has_weights(folder)

    def exported(name: str) -> EngineExport:
        served = path
        if output is not None and ready and name not in GGUF_ENGINES:
            served = str(output / name)
        export = export_for(name, config, plan, model=served, source=source, ready=ready)
        return export if adapter is None else with_adapter(export, adapter)

    if engine != "all":
        return folder, source, [exported(engine)], {}
    exports, refused = [], {}
    for name in ENGINES:
        try:
            exports.append(exported(name))
        except NotExportable as error:
            refused[name] = common.in_flags(str(error))
    return folder, source, exports, refused


def _base_of_adapter(adapter: Path, engine: str, how: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The base that serves an adapter, and the arguments that extend it."""
    from ctxext.export.lora import merge_first, why_merge
    from ctxext.hub.adapters import served_base

    if engine not in ("all", "vllm"):
        raise ValueError(merge_first(str(adapter), "is an adapter"))
    if why := why_merge(adapter):
        raise ValueError(merge_first(str(adapter), why))
    if how:
        raise ValueError(
            f"{adapter} is an adapter, and is served with the extension that it was trained with. Drop the options of "
            "the method."
        )
    base, how = served_base(adapter)
    return str(base), how


def names_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf"


def has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def _write_folders(output: Path, exports: list[EngineExport], folder: Path) -> None:
    """One folder for each engine: its config.json, and the rest of the checkpoint."""
    from ctxext.export.rules import GGUF_ENGINES
    from ctxext.hub.checkpoint import link_with_config, written_whole

    exports = [each for each in exports if each.engine not in GGUF_ENGINES]
    with written_whole(output) as building:
        for each in exports:
            (building / each.engine).mkdir()
            link_with_config(folder, building / each.engine, each.config, each.length, common.say)
    what = "the checkpoint with its config.json" if has_weights(folder) else "a config.json"
    common.say(f"wrote {what} for {', '.join(each.engine for each in exports)} to {output}")


# ------------------------------------------------------------------------------------------ the screen


def _title(engine: str, what: str) -> None:
    Console().print(Text.assemble((engine, "bold"), (f"  {what}", "dim")))


def _paragraph(text: str, style: str = "") -> None:
    Console().print(Padding(Text(text, style=style), (0, 0, 0, 2)))


def copied(text: str) -> None:
    """Print lines for copying, without wrapping."""
    Console().print(text, soft_wrap=True, highlight=False, markup=False)


def _show(export: EngineExport, source: dict[str, Any], output: Path | None) -> None:
    from ctxext.export.rules import changes

    _title(export.engine, f"{export.least_version} or newer")
    where = None if output is None else str(output / export.engine / "config.json")
    flags = list(export.flags)
    if any(len(flag) > LONG for flag in flags):
        at = next(i for i, flag in enumerate(flags) if len(flag) > LONG)
        flags = flags[: at - 1] + flags[at + 1 :]
        where = where or "the one that -o FOLDER writes"
        _paragraph(
            f"The overrides are too long to print. Replace the checkpoint's config.json by {where}, then:", "dim"
        )
    if flags:
        copied(command_lines(flags))
    elif output is not None and (output / export.engine).is_dir() and has_weights(output / export.engine):
        _paragraph(f"{output / export.engine} is the checkpoint to load.")
    elif export.config == source:
        _paragraph("the unchanged checkpoint.")
    else:
        _paragraph(
            f"Replace the checkpoint's config.json by {where}:"
            if where
            else "Change these keys of the checkpoint's config.json (-o FOLDER writes it):",
            "dim",
        )
        copied("\n".join(_lines(changes(source, export.config))))
    for warning in export.warnings:
        _paragraph(f"note: {warning}")
    print()


def command_lines(words: Sequence[str]) -> str:
    """A shell command with one option per line."""
    lines: list[str] = []
    for word in words:
        if lines and not word.startswith("--"):
            lines[-1] += f" {shlex.quote(word)}"
        else:
            lines.append(shlex.quote(word))
    return "  " + " \\\n    ".join(lines)


def _lines(changed: dict[str, Any]) -> list[str]:
    """The keys of a config.json, with long lists abbreviated."""
    return [f'  "{name}": {json.dumps(_ends(value), ensure_ascii=False)}' for name, value in changed.items()]


def _ends(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _ends(each) for name, each in value.items()}
    if isinstance(value, list) and len(value) > 4:
        return [value[0], f"{len(value) - 2} more", value[-1]]
    return value
