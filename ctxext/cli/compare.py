"""`ctxext compare`: every method on the same samples, and which one to use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ctxext.cli import measuring
from ctxext.cli.common import (
    Factor,
    HowExisting,
    Model,
    Revision,
    TargetLength,
    TrainedLength,
    console,
    in_flags,
    name_of,
)


def compare(
    model: Model,
    factor: Factor = None,
    target_length: TargetLength = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated names of `ctxext methods`, or files. Default: all that the model takes, `longrope` "
            "with an example's λ."
        ),
    ] = None,
    tasks: measuring.Tasks = "passkey,perplexity,key_tokens,short",
    lengths: measuring.Lengths = None,
    depths: measuring.Depths = "5",
    trials: measuring.Trials = 10,
    windows: measuring.Windows = 8,
    original_max_position_embeddings: TrainedLength = None,
    existing: HowExisting = "refuse",
    haystack: measuring.Text = None,
    setting: measuring.Setting = None,
    style: measuring.PromptStyle = None,
    answer_tokens: measuring.AnswerTokens = None,
    generate: measuring.Generate = False,
    batch_size: measuring.BatchSize = None,
    dtype: measuring.Dtype = "auto",
    device: measuring.Device = None,
    seed: measuring.Seed = 0,
    revision: Revision = None,
    output: Annotated[Path, typer.Option("--output", "-o", help=measuring.RESULTS)] = Path("comparison.jsonl"),
) -> None:
    """Measure the baseline (the model not extended) and each method, and say which one to use and how sure that is."""
    from ctxext.evals.loading import default_lengths, known_by, load, load_text
    from ctxext.evals.prompts import Prompter
    from ctxext.evals.runner import Runner
    from ctxext.evals.screen import asked_as_it_answers, finish, run_with_bar
    from ctxext.evals.targets import LiveModel, compared_variants
    from ctxext.extension.method_file import check_writable
    from ctxext.hub.checkpoint import check_not_extended, checkpoint_folder
    from ctxext.utils.processes import Processes

    check_writable(output)
    processes = Processes.here()
    folder = checkpoint_folder(model, revision)
    check_not_extended(folder, existing)
    loaded, tokenizer = load(folder, dtype, device, bare=True)
    variants = compared_variants(
        loaded.config,
        [name.strip() for name in methods.split(",")] if methods else None,
        factor,
        target_length=target_length,
        original_max_position_embeddings=original_max_position_embeddings,
        existing=existing,
    )
    prompter = Prompter(tokenizer, style, answer_tokens)  # type: ignore[arg-type]
    target = LiveModel(loaded, prompter, name_of(model), original_max_position_embeddings)
    target.about |= known_by(folder)
    for variant in variants[1:]:
        refusal = target.refusal(variant)
        if refusal is None:
            continue
        variants.remove(variant)
        if methods is not None or len(variants) == 1:
            raise ValueError(f"{variant.name} cannot be compared: {refusal}")
        if processes.rank == 0:
            said = f"{variant.name} is left out: {in_flags(refusal)}"
            console.print(said, highlight=False, markup=False, soft_wrap=True)
    trained = target.about["trained_length"]
    reach = max(target.reach(variant) or 0 for variant in variants)
    grid = measuring.make_grid(
        tasks,
        settings=setting,
        trained_length=trained,
        lengths=measuring.parse_lengths(lengths) if lengths else default_lengths(trained, reach),
        depths=measuring.parse_depths(depths),
        trials=trials,
        windows=windows,
        generate=generate,
        batch_size=batch_size,
        seed=seed,
    )
    text = load_text(haystack, tokenizer, max(grid.lengths) if grid.retrieval else 0)
    runner = Runner(target, text, grid, beyond=True, processes=processes)
    runner.check(variants)
    chosen = style is not None or answer_tokens is not None
    runner.target = asked_as_it_answers(target, grid, text, output, free=not chosen, quiet=processes.rank > 0)
    results = run_with_bar(runner, output, variants)
    if results is not None:
        finish(results, output)
