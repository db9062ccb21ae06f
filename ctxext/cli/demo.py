"""`ctxext demo`: a model fails beyond its trained length, is extended, works, and reloads without ctxext."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ctxext.cli import measuring
from ctxext.cli.common import console, name_of, say
from ctxext.utils.extras import require

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

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
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the table, figure and model.")] = Path(
        "ctxext-demo"
    ),
    model: Annotated[
        str | None,
        typer.Option(
            help="Another checkpoint: a folder, or a name on the hub (owner/name). Default: the bundled model."
        ),
    ] = None,
    haystack: measuring.Text = None,
    lengths: measuring.Lengths = None,
    trials: Annotated[int, typer.Option(help="Passkey prompts per length and depth; 0 to skip them.")] = 10,
    windows: measuring.Windows = 32,
    seed: measuring.Seed = 0,
) -> None:
    """Compare PI, NTK-aware, NTK-by-parts and YaRN with the unextended model on real text; save the recommended one."""
    require("eval")
    from ctxext.assets import MODEL
    from ctxext.evals.choice import all_figures, recommended
    from ctxext.evals.loading import load, load_text
    from ctxext.evals.plots import plot_overview
    from ctxext.evals.prompts import Prompter
    from ctxext.evals.runner import Runner
    from ctxext.evals.screen import asked_as_it_answers, print_summary, run_with_bar
    from ctxext.evals.summary import Summary
    from ctxext.evals.targets import LiveModel, compared_variants
    from ctxext.extension.method_file import check_writable
    from ctxext.hub.checkpoint import check_not_extended, checkpoint_folder, read_config
    from ctxext.models.context import has_rope, read_context
    from ctxext.models.text_config import text_config_of

    check_writable(output / "results.jsonl")
    if trials < 0:
        raise typer.BadParameter(f"--trials must be >= 0, got {trials}.")
    model = model or str(MODEL)
    folder, name = checkpoint_folder(model), name_of(model)
    check_not_extended(folder)
    config = read_config(folder)
    if has_rope(text_config_of(config)) and read_context(config).is_scaled:
        raise ValueError(f"{name} is already scaled ({read_context(config).summary}). Pass the unextended model.")
    # Loaded as in the fresh process at the end, so that the logits are bitwise comparable.
    loaded, tokenizer = load(folder, "float32", "cpu")
    target = LiveModel(loaded, Prompter(tokenizer, "base"), name)
    trained = target.about["trained_length"]
    chosen = measuring.parse_lengths(lengths) if lengths is not None else (trained, 2 * trained, 4 * trained)
    if max(chosen) <= trained:
        raise typer.BadParameter(f"--lengths must exceed the trained length of {trained:,} tokens, got {lengths}.")
    factor = max(chosen) / trained
    console.print(
        f"[bold]{name}[/]: {loaded.num_parameters() / 1e6:.1f} million parameters, "
        f"trained at {trained:,} tokens. Measuring at {', '.join(f'{length:,}' for length in chosen)}.",
        highlight=False,
    )
    grid = measuring.make_grid(
        ",".join(["passkey"] * (trials > 0) + ["perplexity"] + ["short"] * (windows > 1)),
        trained_length=trained, lengths=chosen, trials=max(1, trials), windows=windows, seed=seed,
    )  # fmt: skip
    text = load_text(haystack, tokenizer, 0)
    target = asked_as_it_answers(target, grid, text, output / "results.jsonl", free=False)
    runner = Runner(target, text, grid, beyond=True)
    variants = compared_variants(loaded.config, METHODS, factor)
    results = run_with_bar(runner, output / "results.jsonl", variants)
    assert results is not None
    summary = Summary(runner.asked(results, variants))  # the file may have more samples, of an earlier run
    (output / "summary.json").write_text(json.dumps(all_figures(summary), indent=1) + "\n")
    plot_overview(summary, output / "comparison.png")
    print_summary(summary)
    method = recommended(summary).variant or "yarn"
    difference = save_and_reload(loaded, tokenizer, factor, method, max(chosen), output)
    say(
        f"{method} ×{factor:g} saved to {output / method} and loaded by plain transformers in a fresh process: "
        f"largest logit difference {difference:g}.\nFigure: {output / 'comparison.png'}; "
        f"Report with every sample: ctxext report {output / 'results.jsonl'}"
    )
    if difference != 0:
        raise RuntimeError("the reloaded model differs from the live one; please report this.")


def save_and_reload(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, factor: float, method: str, length: int, output: Path
) -> float:
    """Save the model extended; returns the largest logit difference to a plain reload in a fresh process."""
    import torch

    from ctxext.api import temporarily_extended

    ids = torch.randint(0, len(tokenizer), (1, min(length, 4096)), generator=torch.Generator().manual_seed(0))
    torch.save(ids, output / "ids.pt")
    with temporarily_extended(model, factor, method) as extended:
        extended.save_pretrained(output / method)
        tokenizer.save_pretrained(output / method)
        with torch.no_grad():
            live = extended(input_ids=ids).logits
    files = [str(output / name) for name in (method, "ids.pt", "logits.pt")]
    subprocess.run([sys.executable, "-c", PLAIN_RELOAD, *files], check=True)
    difference = (torch.load(files[2], weights_only=True) - live).abs().max().item()
    for name in files[1:]:
        Path(name).unlink()
    return difference
