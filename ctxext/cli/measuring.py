"""The shared options of `eval`, `compare`, `demo` and `fit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxext.cli.common import parse_pairs
from ctxext.utils import values
from ctxext.utils.values import DTYPES

if TYPE_CHECKING:
    from ctxext.evals.perplexity import Judge
    from ctxext.evals.runner import Grid

RESULTS = (
    "Results file. An interrupted run resumes (not with `compare --minutes`); only one run can write to it at a time."
)

# ------------------------------------------------------------------------------------ the options

Tasks = Annotated[
    str,
    typer.Option(
        help="Comma-separated. Retrieval: passkey, needle, needles, needle_distractors, nolima, mrcr, counting, code, "
        "ruler or one of its 13 tasks. Loss: perplexity, sliding_perplexity, key_tokens (perplexity of tokens that "
        "need long context), short (the short-context regression). Speed and memory: cost."
    ),
]
Lengths = Annotated[str | None, typer.Option(help="Comma-separated lengths in tokens, such as 8k,32k.")]
Depths = Annotated[
    str, typer.Option(help="How many depths from 0 to 1, or the depths themselves, such as 0.1,0.5,0.9.")
]
Trials = Annotated[int, typer.Option(help="Samples per length and depth: 10 for an overview, 50 or more for a claim.")]
Windows = Annotated[int, typer.Option(help="Windows of text for perplexity and `short`.")]
Text = Annotated[
    str | None,
    typer.Option(
        "--haystack",
        help="A text file; `filler`; `code` for Python's standard library; or made-up prose in de, fr, es, ru, zh, ja "
        "or ar. Default: *Persuasion*.",
    ),
]
ByDocument = Annotated[
    bool,
    typer.Option(
        "--by-document",
        help="--haystack is a .jsonl file: perplexity reads the longest documents, one a window, each independent.",
    ),
]
JudgeModel = Annotated[
    str | None, typer.Option("--judge", help="Another model, which finds the key tokens. Default: the baseline.")
]
Setting = Annotated[
    list[str] | None,
    typer.Option("--setting", metavar="TASK.NAME=VALUE", help="A setting of a task, such as needle.distractors=3."),
]
SuiteName = Annotated[
    str | None,
    typer.Option(
        "--suite",
        help="A published benchmark: ruler-nvidia (13 tasks, 500 samples, 4k to 128k), babilong (qa1 to qa5, 100 "
        "samples, 1k to 128k), helmet-recall (4 tasks, 100 samples, 8k to 128k) or "
        "longbench-v2 (503 questions). Sets --tasks, --haystack, and "
        "--lengths and --trials unless given.",
    ),
]
SuiteData = Annotated[
    Path | None,
    typer.Option(help="The file or folder with the data of --suite. Without it an error names what is needed."),
]
PromptStyle = Annotated[
    str | None, typer.Option("--style", help="base, chat or thinking. Default: chat if there is a chat template.")
]
AnswerTokens = Annotated[
    int | None,
    typer.Option(help="Generate free-form answers, with at least this many tokens reserved for each."),
]
Generate = Annotated[
    bool, typer.Option("--generate", help="Generate every answer, even where teacher forcing would suffice.")
]
Beyond = Annotated[bool, typer.Option("--beyond", help="Allow lengths beyond the model's maximum length.")]
BatchSize = Annotated[int | None, typer.Option(help="Trials per batch. Default: as many as fit in 8,192 tokens.")]
Seed = Annotated[int, typer.Option(help="Random seed for texts, positions and numbers.")]
Dtype = Annotated[
    str, typer.Option(help=f"One of {', '.join(DTYPES)}; auto is float32 on CPU, otherwise the checkpoint's dtype.")
]
Device = Annotated[str | None, typer.Option(help="Such as cuda:1 or cpu; `auto` splits the model across all GPUs.")]


def check_results(path: Path) -> None:
    """Raise OSError or ValueError, before a model is loaded, if samples cannot be added to `path`."""
    from ctxext.evals.results import read_results
    from ctxext.extension.method_file import check_writable

    check_writable(path)
    if path.exists() and path.stat().st_size:
        read_results(path)


def parse_lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({values.parse_tokens(part) for part in text.split(",")}))
    except ValueError as error:
        raise typer.BadParameter(f"--lengths: {error}") from None


def parse_depths(text: str) -> tuple[float, ...]:
    """`11` as eleven depths from 0 to 1, or `0.1,0.5` as they are."""
    try:
        if "," not in text and "." not in text:
            n = int(text)
            if n < 1:
                raise ValueError
            return tuple(k / (n - 1) for k in range(n)) if n > 1 else (0.5,)
        return tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise typer.BadParameter(
            f"--depths must be a list, such as 0.1,0.5,0.9, or a number, such as 11; got {text!r}."
        ) from None


def parse_settings(pairs: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """`["needle.distractors=3"]` as settings by task."""
    settings: dict[str, dict[str, Any]] = {}
    form = "--setting must be TASK.NAME=VALUE, such as passkey.digits=7"
    for name, value in parse_pairs(pairs, form).items():
        task, dot, setting = name.partition(".")
        if not dot:
            raise typer.BadParameter(f"{form}; got {name!r}.")
        settings.setdefault(task, {})[setting] = value
    return settings


def check_judge(judge: str | None, tasks: str) -> None:
    """Refuse a judge without a task for it, before anything is loaded."""
    if judge is not None and "key_tokens" not in [name.strip() for name in tasks.split(",")]:
        raise typer.BadParameter("--judge is for key_tokens. Add it and perplexity to --tasks, or drop --judge.")


# --------------------------------------------------------------------------------- the measurement


def make_grid(
    tasks: str,
    *,
    settings: Sequence[str] | None = None,
    trained_length: int,
    judge: Judge | None = None,
    **grid: Any,
) -> Grid:
    """The grid of comma-separated tasks; with `short`, all are also measured within the trained length.

    Args:
        judge: the model that finds the key tokens; None for the baseline.
    """
    from ctxext.evals.cost import Cost
    from ctxext.evals.perplexity import KeyTokens, Perplexity, SlidingPerplexity, TextTask
    from ctxext.evals.ruler import RULER
    from ctxext.evals.runner import Grid
    from ctxext.evals.samples import list_tasks, make_task
    from ctxext.utils.values import suggest

    read = trained_length if judge is None else judge.trained_length
    texts: dict[str, Callable[..., TextTask]] = {
        "perplexity": Perplexity,
        "sliding_perplexity": SlidingPerplexity,
        "cost": Cost,
        "key_tokens": partial(KeyTokens, judge=None if judge is None else judge.name, long=read, short=read // 8),
    }
    retrieval = {name: partial(make_task, name) for name in list_tasks(data=True)}
    names = [n for name in tasks.split(",") for n in (RULER if name.strip() == "ruler" else [name.strip()])]
    of_task = parse_settings(settings)
    known = [*retrieval, *texts, "short", "ruler"]
    for name in (*names, *of_task):
        if name not in known:
            raise ValueError(f"unknown task {name!r}{suggest(name, known)}")
    for name in of_task:
        if name not in names and not (name == "ruler" and {*names} & {*RULER}):
            raise ValueError(f"{name} has a --setting but is not measured. Add it to --tasks, or drop the setting.")

    def made(make: Callable[..., Any], name: str) -> Any:
        chosen = {**(of_task.get("ruler", {}) if name in RULER else {}), **of_task.get(name, {})}
        plain = make()
        usual = {field.name: getattr(plain, field.name) for field in fields(plain) if field.name != "name"}
        for setting, value in chosen.items():
            if setting not in usual:
                raise ValueError(f"unknown setting {setting!r} of {name}{suggest(setting, usual)}")
            kind = type(usual[setting])
            if usual[setting] is not None and not isinstance(value, (int, float) if kind is float else kind):
                raise ValueError(
                    f"--setting {name}.{setting} must be a value such as {usual[setting]!r}, got {value!r}."
                )
        return make(**chosen)

    if "key_tokens" in names and "perplexity" not in names:
        raise ValueError("key_tokens selects from the tokens of perplexity. Add perplexity to --tasks.")
    begun = {name: of_task.get(name, {}).get("bos", True) for name in ("key_tokens", "perplexity") if name in names}
    if len(set(begun.values())) > 1:
        raise ValueError("key_tokens selects from the tokens of perplexity. Set bos for both, or for neither.")
    return Grid(
        retrieval=tuple(made(retrieval[name], name) for name in names if name in retrieval),
        texts=tuple(made(texts[name], name) for name in names if name in texts),
        gate=(min(trained_length, 4096),) if "short" in names else (),
        **grid,
    )
