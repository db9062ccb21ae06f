"""`ctxext eval`: does it really use the longer context, and what did it cost at short length?"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ctxext.cli import common, measuring
from ctxext.utils.extras import require
from ctxext.utils.screen import next_command


def evaluate(
    context: typer.Context,
    model: common.Model,
    tasks: measuring.Tasks = "passkey,perplexity,cost",
    suite: measuring.SuiteName = None,
    suite_data: measuring.SuiteData = None,
    lengths: measuring.Lengths = None,
    depths: measuring.Depths = "5",
    trials: measuring.Trials = 10,
    windows: measuring.Windows = 8,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Time limit of the whole command: short lengths first, then more samples where intervals are widest "
            "(replaces --trials and --windows). The same command adds to its file."
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="A first look: --minutes 5 --depths 0.25,0.75, at 1/16, 1/4 and all of the trained length and at the "
            "longest, as far as there is time.",
        ),
    ] = False,
    method: Annotated[str | None, typer.Option(help=f"Extend the model first. {common.METHOD}.")] = None,
    factor: common.Factor = None,
    target_length: common.TargetLength = None,
    option: common.Options = None,
    original_max_position_embeddings: common.TrainedLength = None,
    existing: common.HowExisting = "refuse",
    base: Annotated[
        str | None,
        typer.Option(help="The unextended checkpoint, for `short` and `key_tokens`. Not needed with --method."),
    ] = None,
    judge: measuring.JudgeModel = None,
    haystack: measuring.Text = None,
    by_document: measuring.ByDocument = False,
    setting: measuring.Setting = None,
    style: measuring.PromptStyle = None,
    answer_tokens: measuring.AnswerTokens = None,
    generate: measuring.Generate = False,
    beyond: measuring.Beyond = False,
    server: Annotated[
        str | None,
        typer.Option(help="Evaluate the model served at this OpenAI-compatible URL; MODEL then names its tokenizer."),
    ] = None,
    served_model: Annotated[str | None, typer.Option(help="Model name on the server, if it serves several.")] = None,
    concurrency: Annotated[int, typer.Option(help="Concurrent requests to the server.")] = 4,
    timeout: Annotated[float, typer.Option(help="Timeout for each answer of the server, in seconds.")] = 600.0,
    batch_size: measuring.BatchSize = None,
    dtype: measuring.Dtype = "auto",
    device: measuring.Device = None,
    seed: measuring.Seed = 0,
    revision: common.Revision = None,
    output: Annotated[Path, typer.Option("--output", "-o", help=measuring.RESULTS)] = Path("results.jsonl"),
) -> None:
    """Measure one model: retrieval, perplexity, and what an extension costs at short length."""
    began = time.perf_counter()
    require("eval")
    from ctxext.evals.loading import default_lengths, known_by, load, load_judge, load_text
    from ctxext.evals.prompts import Prompter
    from ctxext.evals.runner import Runner
    from ctxext.evals.screen import asked_as_it_answers, finish, print_plan, run_timed, run_with_bar
    from ctxext.evals.server import ServedModel
    from ctxext.evals.suites import make_suite, print_published
    from ctxext.evals.targets import LiveModel, Served, Target, Variant, known_lengths
    from ctxext.extension.method_file import check_made_for, check_writable, opened
    from ctxext.hub.checkpoint import check_not_extended, checkpoint_folder, load_tokenizer, read_config
    from ctxext.utils.processes import Processes

    check_writable(output)
    published = None if suite is None else make_suite(suite, suite_data)
    if published is None and suite_data is not None:
        raise typer.BadParameter("--suite-data is for --suite. Pass --suite ruler-nvidia, or drop it.")
    if published is not None:
        own = [name for name in ("tasks", "haystack") if _given(context, name)]
        if own:
            raise typer.BadParameter(f"--suite {suite} sets --{own[0]}. Drop one or the other.")
        tasks, haystack = ",".join(published.tasks), None if published.text is None else str(published.text)
        setting = [*published.settings, *(setting or [])]
        style = style or published.style
        trials = trials if _given(context, "trials") else published.trials
    folder = checkpoint_folder(model, revision, config_only=server is not None)
    if method is not None:
        check_not_extended(folder, existing)
    config = read_config(folder)
    trained, reach = known_lengths(config)
    trained = original_max_position_embeddings or trained
    if method is None and (factor or target_length or option):
        raise typer.BadParameter("--factor, --target-length and --option work only with --method.")
    variant = Variant(common.name_of(model))
    if method is not None:
        check_made_for(method, trained)
        extension = {
            "method": opened(method),
            "factor": factor,
            "target_length": target_length,
            "original_max_position_embeddings": original_max_position_embeddings,
            "existing": existing,
            **common.parse_options(option),
        }
        variant = Variant(method, {name: value for name, value in extension.items() if value is not None})
    names = [name.strip() for name in tasks.split(",")]
    if judge is not None and "key_tokens" not in names:
        raise typer.BadParameter("--judge is for key_tokens. Add it and perplexity to --tasks, or drop --judge.")
    needs_base = "short" in names or ("key_tokens" in names and judge is None)
    compared = needs_base or ("key_tokens" in names and method is not None)
    if needs_base and method is None and base is None:
        raise typer.BadParameter(
            "short and key_tokens compare with the baseline. Pass --method, or the baseline as --base CHECKPOINT. For "
            "key_tokens, --judge will do."
        )
    if base is not None and not compared:
        raise typer.BadParameter("--base is for short and key_tokens. Add one of them to --tasks, or drop --base.")
    if server is not None and (reading := [name for name in names if name in measuring.READING]):
        raise typer.BadParameter(
            f"{', '.join(reading)} needs the model's losses or its clock, which servers do not return. Use only "
            "retrieval tasks, such as --tasks passkey."
        )
    processes = Processes.here()
    if quick:
        minutes, depths = minutes or 5.0, "0.25,0.75" if depths == "5" else depths
    if minutes is not None and (server is not None or base is not None or processes.world > 1):
        raise typer.BadParameter(
            "--minutes and --quick measure one model in one process. Drop them, or --server, --base and accelerate."
        )
    if server is not None:
        tokenizer = load_tokenizer(folder)
        if answer_tokens is None and (style or ("chat" if tokenizer.chat_template else "base")) == "chat":
            answer_tokens = 64
        prompter = Prompter(tokenizer, style, answer_tokens)  # type: ignore[arg-type]
        asked: dict[str, Any] = {"model": served_model, "concurrency": concurrency, "timeout": timeout}
        target: Target = Served(ServedModel(server, style=prompter.style, **asked), prompter, trained)
    else:
        loaded, tokenizer = load(folder, dtype, device, bare=method is not None)
        prompter = Prompter(tokenizer, style, answer_tokens)  # type: ignore[arg-type]
        target = LiveModel(loaded, prompter, common.name_of(model), original_max_position_embeddings)
        target.about |= known_by(folder)
        if method is None and base is None and "method" not in target.about:  # neither extended here nor saved so
            variant = Variant()
        reach = target.reach(variant) or reach
    judging = None if judge is None else load_judge(checkpoint_folder(judge), common.name_of(judge), dtype, device)
    if isinstance(target, LiveModel):
        target.judge = judging
    if lengths is not None:
        measured = measuring.parse_lengths(lengths)
    elif published is not None:
        measured = published.lengths_within(reach)
    elif quick:
        measured = tuple(sorted({max(256, trained // 16), max(256, trained // 4), trained, reach}))
    else:
        measured = default_lengths(trained, reach)
    grid = measuring.make_grid(
        tasks,
        settings=setting,
        trained_length=trained,
        judge=judging,
        lengths=measured,
        depths=measuring.parse_depths(depths),
        trials=trials,
        windows=windows,
        each_length=minutes is not None,  # the longest may not be reached
        generate=generate,
        batch_size=batch_size,
        seed=seed,
    )
    text = load_text(haystack, tokenizer, max(grid.lengths) if grid.retrieval else 0, by_document=by_document)
    before = [Variant(gate_only=True)] if compared else []
    variants = [*before, variant] if base is None else [variant]
    runner = Runner(target, text, grid, beyond, processes=processes)
    if isinstance(target, LiveModel):
        runner.check(variants)
        speed = print_plan(runner, variants, output, minutes) if processes.rank == 0 else None
        free, quiet = style is None and answer_tokens is None and published is None, processes.rank > 0
        runner.target = asked_as_it_answers(target, grid, text, output, free=free, quiet=quiet)
    if base is not None:
        loaded, _ = load(checkpoint_folder(base), dtype, device)
        of_base = LiveModel(loaded, runner.target.prompter, Path(base).name, original_max_position_embeddings)
        of_base.judge = judging
        run_with_bar(Runner(of_base, text, grid, beyond, processes=processes), output, before, merge=False)
        del loaded, of_base
    if minutes is None:
        results = run_with_bar(runner, output, variants, planned=server is None)
    else:
        assert speed is not None
        results = run_timed(runner, output, variants, minutes, speed, began)
    if results is not None:
        finish(results, output)
        if published is not None:
            print_published(published, results)
        if method is None and "method" in target.about:  # an extended checkpoint, of which a card can be made
            common.say(next_command("push", model, "OWNER/NAME", "--results", output, "--dry-run"))


def _given(context: typer.Context, name: str) -> bool:
    """Whether the option is on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
