"""`ctxext compare`: every method on the same samples, and which one to use."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from ctxext.cli import common, measuring
from ctxext.utils.extras import require


def compare(
    model: common.Model,
    factor: common.Factor = None,
    target_length: common.TargetLength = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated methods from `ctxext methods`, or files. Default: all that apply to the model, with "
            "example factors for `longrope`; with --minutes, those that need neither training nor options."
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Time limit of the whole command. Methods that are clearly worse are dropped early, the rest get "
            "more samples (replaces --trials and --windows), and rescale factors are fitted too. Such a run does not "
            "resume: it needs a new --output file."
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="A first look: --minutes 5 --no-fit --methods yarn,self_extend --factor 2 --depths 0.25,0.75, at the "
            "longest length alone.",
        ),
    ] = False,
    no_fit: Annotated[bool, typer.Option("--no-fit", help="With --minutes: do not fit rescale factors.")] = False,
    portable: Annotated[
        bool,
        typer.Option("--portable", help="Only config-expressible methods: plain transformers and servers run them."),
    ] = False,
    tasks: measuring.Tasks = "passkey,perplexity,key_tokens,short,cost",
    lengths: measuring.Lengths = None,
    depths: measuring.Depths = "5",
    trials: measuring.Trials = 10,
    windows: measuring.Windows = 8,
    original_max_position_embeddings: common.TrainedLength = None,
    existing: common.HowExisting = "refuse",
    judge: measuring.JudgeModel = None,
    haystack: measuring.Text = None,
    by_document: measuring.ByDocument = False,
    setting: measuring.Setting = None,
    style: measuring.PromptStyle = None,
    answer_tokens: measuring.AnswerTokens = None,
    generate: measuring.Generate = False,
    beyond: measuring.Beyond = False,
    batch_size: measuring.BatchSize = None,
    dtype: measuring.Dtype = "auto",
    device: measuring.Device = None,
    seed: measuring.Seed = 0,
    revision: common.Revision = None,
    output: Annotated[Path, typer.Option("--output", "-o", help=measuring.RESULTS)] = Path("comparison.jsonl"),
    best: Annotated[Path | None, typer.Option(help="Write the recommended method to this file, for --method.")] = None,
) -> None:
    """Measure the baseline (the unextended model) and each method, and say which one to use and how certain that is."""
    began = time.perf_counter()
    require("eval")
    from rich.console import Console

    from ctxext.evals.choice import recommended
    from ctxext.evals.loading import default_lengths, known_by, load, load_judge, load_text
    from ctxext.evals.prompts import Prompter
    from ctxext.evals.runner import Runner
    from ctxext.evals.screen import asked_as_it_answers, finish, print_plan, run_with_bar, share_bar
    from ctxext.evals.summary import Summary, label
    from ctxext.evals.targets import UNEXTENDED, LiveModel, compared_variants
    from ctxext.extension.method_file import check_apart, check_method_file
    from ctxext.fitting.race import Race, check_start, left_beside, saved_choice, where_it_runs
    from ctxext.hub.checkpoint import check_not_extended, checkpoint_folder
    from ctxext.utils.processes import Processes

    measuring.check_results(output)
    if best is not None:
        check_method_file(best, "--best")
        check_apart(best, "--best", output, "the results, which go to --output")
    if quick:
        minutes, no_fit, methods = 5.0 if minutes is None else minutes, True, methods or "yarn,self_extend"
        factor = 2.0 if factor is None and target_length is None else factor
        depths = "0.25,0.75" if depths == "5" else depths
    measuring.check_judge(judge, tasks)
    processes, timed = Processes.here(), minutes is not None
    if no_fit and not timed:
        raise typer.BadParameter("--no-fit works only with --minutes.")
    if minutes is not None:
        check_start(output, minutes)
        if processes.world > 1:
            raise ValueError(
                "--minutes needs a single process. Run it without accelerate; --device auto splits a model across GPUs."
            )
    folder = checkpoint_folder(model, revision)
    check_not_extended(folder, existing)
    loaded, tokenizer = load(folder, dtype, device, bare=True)
    variants = compared_variants(
        loaded.config,
        [name.strip() for name in methods.split(",")] if methods is not None else None,
        factor,
        zero_shot=timed,
        target_length=target_length,
        original_max_position_embeddings=original_max_position_embeddings,
        existing=existing,
    )
    prompter = Prompter(tokenizer, style, answer_tokens)  # type: ignore[arg-type]
    target = LiveModel(loaded, prompter, common.name_of(model), original_max_position_embeddings)
    target.about |= known_by(folder)
    judging = None if judge is None else load_judge(checkpoint_folder(judge), common.name_of(judge), dtype, device)
    target.judge = judging
    with nullcontext() if processes.rank else common.console.status("trying each method on the model"):
        for variant in variants[1:]:
            refusal = target.refusal(variant, portable)
            if refusal is None:
                continue
            variants.remove(variant)
            if methods is not None or len(variants) == 1:
                remedy = f" Or drop {variant.name} from --methods." if methods is not None and "," in methods else ""
                if target.refusal(variant) is None:
                    remedy = f" Drop --portable, or {variant.name}."
                raise ValueError(f"{variant.name} cannot be compared: {refusal}{remedy}")
            if processes.rank == 0:
                common.say(f"skipping {variant.name}: {common.in_flags(refusal)}")
    trained = target.about["trained_length"]
    reach = max(target.reach(variant) or 0 for variant in variants)
    usual = tuple(sorted({round(math.sqrt(trained * reach)), reach})) if timed else default_lengths(trained, reach)
    usual = (reach,) if quick else usual
    grid = measuring.make_grid(
        tasks,
        settings=setting,
        trained_length=trained,
        judge=judging,
        lengths=measuring.parse_lengths(lengths) if lengths is not None else usual,
        depths=measuring.parse_depths(depths),
        trials=trials,
        windows=windows,
        generate=generate,
        batch_size=batch_size,
        seed=seed,
    )
    if (longest := max(grid.lengths)) > reach and not beyond:
        instead = "Pass" if factor is None else "Replace --factor by"
        raise typer.BadParameter(
            f"the target is {reach:,} tokens, got --lengths up to {longest:,}. {instead} --target-length {longest}, "
            "lower --lengths, or pass --beyond."
        )
    at_least = longest if grid.retrieval and not timed else 0
    text = load_text(haystack, tokenizer, at_least, by_document=by_document)
    runner = Runner(target, text, grid, beyond=True, processes=processes)
    runner.check(variants)
    if processes.rank == 0:
        print_plan(runner, variants, output, minutes)
    free, quiet = style is None and answer_tokens is None, processes.rank > 0
    runner.target = asked_as_it_answers(target, grid, text, output, free=free, begun=timed and not no_fit, quiet=quiet)
    fitted = None
    if minutes is None:
        results = run_with_bar(runner, output, variants, planned=True)
    else:
        race = Race(runner, variants[1:], output, minutes, fits=not no_fit, began=began)
        try:
            with share_bar() as race.advance:
                results, fitted, variants = race.run(), race.fitted, race.candidates
        except BaseException:
            if kept := left_beside(output):
                common.say(f"Finished samples are kept in {kept}: ctxext report {output} reads them.")
                common.say(f"A timed run does not resume: remove {kept} before you repeat the command.")
            raise
        if race.text_used_up:
            common.say("The text ran out before the time did. Pass a longer --haystack for more samples.")
        if race.no_fit:
            common.say(f"No rescale factors were fitted: {common.in_flags(race.no_fit)}")
    if results is None:
        return
    finish(results, output)
    summary = Summary(results)
    names = {variant.name for variant in variants} | {UNEXTENDED}
    if others := [label(name) for name in summary.variants if name not in names]:
        common.say(f"{output} already had the samples of {', '.join(others)}.")
    use = recommended(summary)
    plan = next((target.plan(variant) for variant in variants if variant.name == use.variant), None)
    where = "" if plan is None else where_it_runs(summary, use, plan, loaded.config)
    if where:
        Console().print(where, highlight=False, markup=False)
    if best is not None and plan is None:
        short = f" No length beyond {trained:,} was measured." if longest <= trained else ""
        raise ValueError(f"none of these methods is recommended, so {best} is not written.{short}")
    if best is not None and plan is not None:
        saved_choice(summary, f"{use.text} {where}", plan, fitted).save(best)
        common.say_written(best, model, revision, original_max_position_embeddings, existing)
