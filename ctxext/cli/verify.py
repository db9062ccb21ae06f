"""`ctxext verify`: does that engine apply the extension?"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ctxext.cli.common import Revision, console, in_flags, parse_tokens_or_none, say


def verify(
    where: Annotated[
        str,
        typer.Argument(
            help="A checkpoint (folder or hub name), a .gguf file, or a server's URL (http://…). The server receives "
            "the key in OPENAI_API_KEY, if set."
        ),
    ],
    probe: Annotated[
        Path | None, typer.Option(help="A file of expected log-probabilities. Not needed for a checkpoint folder.")
    ] = None,
    revision: Revision = None,
    model: Annotated[str | None, typer.Option(help="Model name on the server, if it serves several.")] = None,
    noise: Annotated[
        float | None,
        typer.Option(
            metavar="NATS", help="The engine's noise in nats per token, if its weights have fewer than 8 bits."
        ),
    ] = None,
    far: Annotated[
        int | None,
        typer.Option(
            parser=parse_tokens_or_none,
            metavar="TOKENS",
            help="Also check positions near the target length, with a prompt of this many tokens; 0 skips this. "
            "Default: the target length, at most 16k.",
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Timeout for each answer of a server, in seconds.")] = 600.0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the probe to this file, for other engines.")
    ] = None,
    expect: Annotated[
        str,
        typer.Option(
            metavar="VERDICT",
            help="The verdict for which the exit code is 0: applied, ignored, applied-without-the-attention-factor, "
            "applied-to-short-texts-only, applied-as-far-as-tested or no-match. Without log-probabilities: "
            "probably-applied, probably-ignored or no-verdict.",
        ),
    ] = "applied",
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Check whether an engine applies the extension, on a short text and the end of a long one.

    The exit code is 0 only if it does, or if --expect names another verdict and that is found.
    """
    from rich.console import Console
    from transformers.utils import logging

    from ctxext.export import verify as engines
    from ctxext.export.probe import FAR_TOKENS, MAYBE, MAYBE_NOT, MODELS, NONE, PARTLY, PASSKEYS, SHORT, UNKNOWN, WORDS
    from ctxext.extension.method_file import check_new, check_writable
    from ctxext.utils.values import finite, suggest

    verdicts = {
        name.replace(" ", "-"): name for name in (*WORDS.values(), NONE, SHORT, PARTLY, MAYBE, MAYBE_NOT, UNKNOWN)
    }
    if expect not in verdicts:
        raise ValueError(f"unknown verdict --expect {expect}{suggest(expect, verdicts)}")
    if output is not None:
        check_new(output)
        check_writable(output)
    logging.disable_progress_bar()  # it would break the status line
    with console.status("starting") as status:
        how: dict[str, Any] = {"revision": revision, "model": model, "noise": noise, "far": far, "timeout": timeout}
        tell: Callable[[str], None] = status.update if console.is_terminal else say
        answer = engines.verify(where, probe, **how, say=tell)
    if output is not None:
        answer.probe.save(output)
    read, notes = answer.probe, [in_flags(note) for note in answer.notes]
    verdict = replace(answer.verdict, reason=in_flags(answer.verdict.reason))
    is_expected = verdict.name == verdicts[expect]
    if as_json:
        told = {
            "engine": answer.engine,
            "where": answer.where,
            "live": verdict.is_live,
            "expected": verdicts[expect],
            **asdict(verdict),
            "noise_floor": read.noise_floor,
            "coarse_floor": read.coarse_floor,
            "extension": read.summary,
            "tokens": len(read.input_ids),
            "target_length": read.target_length,
            "notes": notes,
        }
        print(json.dumps(finite(told), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        screen = Console()
        color = "green" if is_expected else "red"
        screen.print(f"[bold {color}]{verdict.name.upper()}[/]  {read.summary}, in {answer.engine}", highlight=False)
        table = Table(box=None, padding=(0, 2, 0, 0))
        if verdict.passkeys is not None:
            table.add_column("prompt length")
            table.add_column("passkeys found", justify="right")
            for length, found in verdict.passkeys.items():
                table.add_row(f"{length:,} tokens", f"{found} of {PASSKEYS}")
        else:
            short = f"{len(read.input_ids)} tokens"
            compared = f"the last {FAR_TOKENS} of {verdict.asked_to:,} tokens" if read.far_unextended else short
            table.add_column(f"difference in log-probability over {compared}")
            table.add_column("nats per token", justify="right")
            for state, distance in verdict.distances.items():
                bold = "bold" if WORDS[state] == verdict.name else ""
                table.add_row(f"to the {MODELS[state]}", f"{distance:.4f}", style=bold)
            if verdict.far_distance is not None:
                table.add_row(f"to the extended model, at {verdict.asked_to:,} tokens", f"{verdict.far_distance:.4f}")
            table.add_row("expected 16-bit noise", f"{read.noise_floor:.4f}", style="dim")
            of_weights = "expected 8-bit noise" if noise is None else "noise from --noise"
            table.add_row(of_weights, f"{verdict.limit / 1.5:.4f}", style="dim")
        screen.print(table, highlight=False)
        screen.print(f"{verdict.reason[0].upper()}{verdict.reason[1:]}.", highlight=False, markup=False)
        for note in notes:
            screen.print(f"note: {note}.", highlight=False, markup=False)
        if output is not None:
            screen.print(f"wrote {output}.", highlight=False, markup=False)
        if not is_expected and expect != "applied":
            screen.print(f"The expected verdict was: {verdicts[expect]}.", highlight=False)
    if not is_expected:
        raise typer.Exit(1)
