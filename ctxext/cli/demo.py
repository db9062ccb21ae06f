"""`ctxext demo`: a trained model breaks past its length, is extended, works, and reloads without ctxext."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ctxext.cli.common import console, parse_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ctxext.evals.comparison import Comparison

METHODS = ("pi", "ntk", "ntk_by_parts", "yarn")

# Run in a fresh process in which importing ctxext fails, so that plain transformers is all there is.
PLAIN_RELOAD = """
import sys
sys.modules["ctxext"] = None
import torch
from transformers import AutoModelForCausalLM
folder, ids, logits = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
with torch.no_grad():
    torch.save(model(input_ids=torch.load(ids, weights_only=True)).logits, logits)
"""


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the table, figure and model go.")] = Path(
        "ctxext-demo"
    ),
    model: Annotated[
        Path | None, typer.Option(help="Another checkpoint, a folder; by default the model that ctxext ships.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Another text to read, by default *Persuasion*.")] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Comma-separated lengths, such as 8k,16k.  [default: 1x, 2x and 4x the trained]")
    ] = None,
    trials: Annotated[int, typer.Option(help="Passkey prompts for each length and depth.")] = 10,
    windows: Annotated[int, typer.Option(help="Windows of text, each of the largest length.")] = 48,
    seed: int = 0,
) -> None:
    """Compare PI, NTK-aware, NTK-by-parts and YaRN with no extension at all, on real text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from ctxext.assets import MODEL, PERSUASION
    from ctxext.configs import read_context
    from ctxext.evals.comparison import compare, n_steps
    from ctxext.evals.plots import plot_comparison

    logging.disable_progress_bar()
    folder = MODEL if model is None else model
    tokenizer = AutoTokenizer.from_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    trained = read_context(loaded.config).reach
    chosen = [parse_tokens(part) for part in lengths.split(",")] if lengths else [trained, 2 * trained, 4 * trained]
    factor = max(chosen) / trained
    depths = (0.0, 0.25, 0.5, 0.75, 1.0)
    console.print(
        f"[bold]{folder.name}[/]: {loaded.num_parameters() / 1e6:.1f} million parameters, "
        f"trained at {trained:,} tokens. Measuring at {', '.join(f'{length:,}' for length in chosen)}.",
        highlight=False,
    )
    columns = (
        TextColumn("{task.description:<14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=n_steps(METHODS, chosen, depths, trials, windows))
        comparison = compare(
            loaded,
            tokenizer,
            (PERSUASION if text is None else text).read_text(encoding="utf-8"),
            METHODS,
            name=folder.name,
            trained_length=trained,
            factor=factor,
            lengths=chosen,
            depths=depths,
            trials=trials,
            windows=windows,
            batch_size=max(1, 8192 // chosen[-1]),
            seed=seed,
            advance=lambda method: progress.update(bar, advance=1, description=method),
        )
    output.mkdir(parents=True, exist_ok=True)
    comparison.save(output / "comparison.json")
    plot_comparison(comparison, output / "comparison.png")
    Console().print(comparison_table(comparison))
    difference = save_and_reload(loaded, tokenizer, factor, chosen[-1], output)
    console.print(
        f"YaRN ×{factor:g} saved to {output / 'yarn'} and loaded by plain transformers in a fresh process: "
        f"largest logit difference {difference:g}.\nFigure: {output / 'comparison.png'}",
        highlight=False,
    )
    if difference != 0:
        raise RuntimeError("the reloaded model differs from the live one; please report this.")


def comparison_table(comparison: Comparison) -> Table:
    """Passkey and perplexity, a row a method."""
    from ctxext.evals.comparison import UNEXTENDED

    lengths = comparison.lengths
    n = comparison.trials * len(comparison.depths)
    title = f"{comparison.model}, extended ×{comparison.factor:g} without training"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", no_wrap=True)
    retrieval = lengths if comparison.trials else []
    for length in retrieval:
        table.add_column(f"passkey\nat {length:,}", justify="right", no_wrap=True)
    for length in lengths:
        table.add_column(f"ppl\nto {length:,}", justify="right", no_wrap=True)
    for result in comparison.results:
        passkeys = [comparison.passkey(result, length) for length in retrieval]
        table.add_row(
            "not extended" if result.method == UNEXTENDED else result.method,
            *(
                f"[{'green' if share >= 0.7 else 'yellow' if share >= 0.3 else 'red'}]{share:.0%}[/]"
                for share in passkeys
            ),
            *(f"{value:.1f}" for value in result.perplexity),
        )
    passkey = f"passkey: {n} prompts a cell; " if comparison.trials else ""
    table.caption = f"{passkey}ppl: perplexity from one length to the next"
    table.caption_justify = "left"
    return table


def save_and_reload(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, factor: float, length: int, output: Path
) -> float:
    """Save the model extended by YaRN; the largest logit difference to a plain reload in a fresh process."""
    import torch

    from ctxext.api import temporarily_extended

    ids = torch.randint(0, len(tokenizer), (1, min(length, 4096)), generator=torch.Generator().manual_seed(0))
    torch.save(ids, output / "ids.pt")
    with temporarily_extended(model, factor, "yarn") as extended:
        extended.save_pretrained(output / "yarn")
        tokenizer.save_pretrained(output / "yarn")
        with torch.no_grad():
            live = extended(input_ids=ids).logits
    files = [str(output / name) for name in ("yarn", "ids.pt", "logits.pt")]
    subprocess.run([sys.executable, "-c", PLAIN_RELOAD, *files], check=True)
    difference = (torch.load(files[2], weights_only=True) - live).abs().max().item()
    for name in files[1:]:
        Path(name).unlink()
    return difference
