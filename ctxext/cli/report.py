"""`ctxext report`: one page, or figures, of results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ctxext.cli.common import say
from ctxext.utils.extras import require


def report(
    results: Annotated[list[Path], typer.Argument(help="Results files of ctxext eval or ctxext compare.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")] = Path("report.html"),
    figures: Annotated[
        Path | None, typer.Option(help="A folder for the figures as PNG and SVG, and their numbers as JSON.")
    ] = None,
) -> None:
    """Write a self-contained HTML report: figures, tables, settings, and every failed sample."""
    require("eval")
    from ctxext.evals.choice import all_figures
    from ctxext.evals.plots import save_figures
    from ctxext.evals.report import write_report
    from ctxext.evals.results import read_results
    from ctxext.evals.summary import Summary
    from ctxext.extension.method_file import check_apart, check_writable
    from ctxext.utils.json_files import write_json

    check_writable(output)
    stems = [path.stem for path in results]
    stems = [stem if stems.count(stem) == 1 else f"{stem}-{number}" for number, stem in enumerate(stems, 1)]
    for path in results:
        check_apart(output, "--output", path, "the results")
        for figure in [figures / f"{stem}.json" for stem in stems] if figures is not None else ():
            check_apart(figure, "--figures: its", path, "the results")
            check_writable(figure)
    read = [read_results(path) for path in results]
    write_report(read, output)
    say(f"wrote {output}: open it in a browser.")
    if figures is not None:
        figures.mkdir(parents=True, exist_ok=True)
        for stem, result in zip(stems, read):
            figures_file, summary = figures / f"{stem}.json", Summary(result)
            write_json(figures_file, all_figures(summary))
            for path in [figures_file, *save_figures(summary, figures, stem)]:
                say(f"wrote {path}")
