"""`ctxext eval`: does it really use the longer context, and what did it cost at short length?"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ctxext.cli import common, measuring
from ctxext.utils.extras import require
from ctxext.utils.screen import next_command
from ctxext.utils.values import check_minutes

if TYPE_CHECKING:
    from ctxext.evals.prompts import Prompter
    from ctxext.evals.runner import Runner
    from ctxext.evals.suites import Suite
    from ctxext.evals.targets import Target, Variant

BACKENDS = ("transformers", "vllm")


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
        typer.Option(
            help="The unextended checkpoint (with --server the URL of its server), for `short` and `key_tokens`. Not "
            "needed with --method."
        ),
    ] = None,
    judge: measuring.JudgeModel = None,
    haystack: measuring.Text = None,
    by_document: measuring.ByDocument = False,
    setting: measuring.Setting = None,
    style: measuring.PromptStyle = None,
    answer_tokens: measuring.AnswerTokens = None,
    generate: measuring.Generate = False,
    beyond: measuring.Beyond = False,
    backend: Annotated[
        str,
        typer.Option(help="transformers; or vllm, in this process, which runs the checkpoint as saved."),
    ] = "transformers",
    backend_option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An argument of vllm.LLM, such as max_model_len=32768."),
    ] = None,
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
    from ctxext.evals.loading import load_judge, load_text
    from ctxext.evals.runner import Runner
    from ctxext.evals.screen import asked_as_it_answers, finish, print_plan, run_timed, run_with_bar
    from ctxext.evals.suites import print_published
    from ctxext.evals.targets import LiveModel, LocalModel, Variant, known_lengths
    from ctxext.hub.checkpoint import check_not_extended, checkpoint_folder, read_config
    from ctxext.utils.processes import Processes

    measuring.check_results(output)
    if not _given(context, "tasks") and (server is not None or backend != "transformers"):
        tasks = "passkey,perplexity"  # cost is of transformers alone
    published, asked = _with_suite(context, suite, suite_data, Asked(tasks, haystack, setting, style, trials))
    folder = checkpoint_folder(model, revision, config_only=server is not None)
    if method is not None:
        check_not_extended(folder, existing)
    trained, reach = known_lengths(read_config(folder))
    trained = original_max_position_embeddings or trained
    if method is None and (factor or target_length or option):
        raise typer.BadParameter("--factor, --target-length and --option work only with --method.")
    variant = Variant(common.name_of(model))
    if method is not None:
        variant = _extended(
            method,
            trained,
            factor=factor,
            target_length=target_length,
            original_max_position_embeddings=original_max_position_embeddings,
            existing=existing,
            **common.parse_options(option),
        )
    names = [name.strip() for name in asked.tasks.split(",")]
    measuring.check_judge(judge, asked.tasks)
    compared = _compared(names, judge, base, method, server)
    processes = Processes.here()
    if quick:
        minutes, depths = 5.0 if minutes is None else minutes, "0.25,0.75" if depths == "5" else depths
    check_minutes(minutes)
    opener = Opener(
        server=server,
        backend=backend,
        options=common.parse_pairs(backend_option, "--backend-option must be NAME=VALUE"),
        style=asked.style,
        answer_tokens=answer_tokens,
        trained_length=original_max_position_embeddings,
        dtype=dtype,
        device=device,
        served_model=served_model,
        connection={"concurrency": concurrency, "timeout": timeout},
    )
    opener.check(method=method is not None, beyond=beyond, judged=judge is not None, processes=processes.world)
    if minutes is not None and not (opener.live and base is None and processes.world == 1):
        raise typer.BadParameter(
            "--minutes and --quick measure one model in transformers, in one process. Drop them, or --server, "
            "--backend, --base and accelerate."
        )
    target = opener.opened(folder, common.name_of(model), trained, bare=method is not None)
    if isinstance(target, LocalModel):
        if method is None and base is None and "method" not in target.about:  # neither extended here nor saved so
            variant = Variant()
        reach = target.reach(variant) or reach
    judging = None if judge is None else load_judge(checkpoint_folder(judge), common.name_of(judge), dtype, device)
    target.judge = judging
    grid = measuring.make_grid(
        asked.tasks,
        settings=asked.setting,
        trained_length=trained,
        judge=judging,
        lengths=_lengths(lengths, published, quick, trained, reach),
        depths=measuring.parse_depths(depths),
        trials=asked.trials,
        windows=windows,
        each_length=minutes is not None,  # the longest may not be reached
        generate=generate,
        batch_size=batch_size,
        seed=seed,
    )
    longest = max(grid.lengths) if grid.retrieval else 0
    text = load_text(asked.haystack, target.prompter.tokenizer, longest, by_document=by_document)
    before = [Variant(gate_only=True)] if compared else []
    variants = [*before, variant] if base is None else [variant]
    runner = Runner(target, text, grid, beyond, processes=processes)
    runner.check(variants)
    speed = None
    if isinstance(target, LocalModel):
        speed = print_plan(runner, variants, output, minutes) if processes.rank == 0 else None
        free = asked.style is None and answer_tokens is None and published is None
        runner.target = asked_as_it_answers(target, grid, text, output, free=free, quiet=processes.rank > 0)
    if base is not None:
        opener.run_baseline(base, runner, before, output)
    if minutes is None:
        results = run_with_bar(runner, output, variants, planned=server is None)
    else:
        assert isinstance(target, LiveModel)
        assert speed is not None
        results = run_timed(runner, output, variants, minutes, speed, began)
    _close(target)
    if results is not None:
        finish(results, output)
        if published is not None:
            print_published(published, results)
        if method is None and "method" in target.about:  # an extended checkpoint, of which a card can be made
            common.say(next_command("push", model, "OWNER/NAME", "--results", output, "--dry-run"))


class Asked(NamedTuple):
    """The options that a published suite sets."""

    tasks: str
    haystack: str | None
    setting: list[str] | None
    style: str | None
    trials: int


def _with_suite(
    context: typer.Context, suite: str | None, data: Path | None, asked: Asked
) -> tuple[Suite | None, Asked]:
    """The published suite, if one is named, and the options with what it sets."""
    from ctxext.evals.suites import make_suite

    if suite is None:
        if data is not None:
            raise typer.BadParameter("--suite-data is for --suite. Pass --suite ruler-nvidia, or drop it.")
        return None, asked
    published = make_suite(suite, data)
    own = [name for name in ("tasks", "haystack") if _given(context, name)]
    if own:
        raise typer.BadParameter(f"--suite {suite} sets --{own[0]}. Drop one or the other.")
    return published, Asked(
        ",".join(published.tasks),
        None if published.text is None else str(published.text),
        [*published.settings, *(asked.setting or [])],
        asked.style or published.style,
        asked.trials if _given(context, "trials") else published.trials,
    )


def _given(context: typer.Context, name: str) -> bool:
    """Whether the option is on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _extended(method: str, trained: int, **how: Any) -> Variant:
    """The variant that `method` makes of the model."""
    from ctxext.evals.targets import Variant
    from ctxext.extension.method_file import check_made_for, opened

    check_made_for(method, trained)
    extension = {"method": opened(method), **how}
    return Variant(method, {name: value for name, value in extension.items() if value is not None})


def _compared(
    names: Collection[str], judge: str | None, base: str | None, method: str | None, server: str | None
) -> bool:
    """Whether the tasks compare with the baseline, once it is known where that comes from."""
    needs_base = "short" in names or ("key_tokens" in names and judge is None)
    compared = needs_base or ("key_tokens" in names and method is not None)
    if needs_base and method is None and base is None:
        raise typer.BadParameter(
            "short and key_tokens compare with the baseline. Pass --method, or the baseline as --base CHECKPOINT. For "
            "key_tokens, --judge will do."
        )
    if base is not None and (server is not None) != ("://" in base):
        raise typer.BadParameter(
            f"--base is the URL of a server with --server, so that both run in one engine, and otherwise a checkpoint; "
            f"got {base!r}."
        )
    if base is not None and not compared:
        raise typer.BadParameter("--base is for short and key_tokens. Add one of them to --tasks, or drop --base.")
    return compared


def _lengths(given: str | None, published: Suite | None, quick: bool, trained: int, reach: int) -> tuple[int, ...]:
    """The lengths to measure, in tokens."""
    from ctxext.evals.loading import default_lengths

    if given is not None:
        return measuring.parse_lengths(given)
    if published is not None:
        return published.lengths_within(reach)
    if quick:
        return tuple(sorted({max(256, trained // 16), max(256, trained // 4), trained, reach}))
    return default_lengths(trained, reach)


@dataclass(frozen=True, kw_only=True)
class Opener:
    """Opens models where they are measured: in transformers, in vLLM, or behind a server.

    Attributes:
        options: of vLLM.
        trained_length: if the config does not give it.
        connection: further arguments of `ServedModel`.
    """

    server: str | None
    backend: str
    options: dict[str, Any]
    style: str | None
    answer_tokens: int | None
    trained_length: int | None
    dtype: str
    device: str | None
    served_model: str | None
    connection: dict[str, Any]

    @property
    def live(self) -> bool:
        return self.server is None and self.backend == "transformers"

    def check(self, *, method: bool, beyond: bool, judged: bool, processes: int) -> None:
        """Refuse what the chosen backend does not do."""
        from ctxext.utils.values import suggest

        if self.backend not in BACKENDS:
            raise typer.BadParameter(f"unknown --backend {self.backend!r}{suggest(self.backend, BACKENDS)}")
        if self.backend == "transformers":
            if self.options:
                raise typer.BadParameter("--backend-option is for vLLM. Pass --backend vllm, or drop it.")
            if self.server is not None and not judged and (self.dtype != "auto" or self.device is not None):
                raise typer.BadParameter(
                    "--dtype and --device are for a model that is loaded here, and the server has loaded its own. Drop "
                    "them, or set them where the server starts."
                )
            return
        said = {
            "--server measures the model elsewhere. Drop it, or --backend.": self.server is not None,
            "--backend vllm runs a checkpoint as saved. Extend it first: ctxext extend MODEL --method NAME --factor N "
            "-o FOLDER, then evaluate FOLDER.": method,
            "--backend vllm runs no lengths beyond the config's. Drop --beyond, or use --backend transformers.": beyond,
            "--device is for transformers. Drop it: vLLM uses the accelerator that it was built for.": bool(
                self.device
            ),
            "--backend vllm runs its own processes: pass --backend-option tensor_parallel_size=N without accelerate.": (
                processes > 1
            ),
        }
        for message, refused in said.items():
            if refused:
                raise typer.BadParameter(message)

    def opened(self, folder: Path, name: str, trained: int, *, bare: bool) -> Target:
        """The model to measure.

        Args:
            trained: its trained length in tokens.
            bare: ignore the folder's `context_extension.json`.
        """
        from ctxext.evals.loading import known_by, load
        from ctxext.evals.prompts import Prompter
        from ctxext.evals.targets import LiveModel
        from ctxext.hub.checkpoint import load_tokenizer

        if self.live:
            loaded, tokenizer = load(folder, self.dtype, self.device, bare=bare)
            prompter = Prompter(tokenizer, self.style, self.answer_tokens)  # type: ignore[arg-type]
            target: Target = LiveModel(loaded, prompter, name, self.trained_length)
        else:
            tokenizer, answer_tokens = load_tokenizer(folder), self.answer_tokens
            is_chat = (self.style or ("chat" if tokenizer.chat_template else "base")) == "chat"
            if self.server is not None and answer_tokens is None and is_chat:
                answer_tokens = 64
            prompter = Prompter(tokenizer, self.style, answer_tokens)  # type: ignore[arg-type]
            if self.server is not None:
                return self._served(self.server, prompter, trained, self.served_model)
            target = self._in_vllm(folder, prompter, name)
        target.about |= known_by(folder)
        return target

    def run_baseline(self, base: str, runner: Runner, variants: Sequence[Variant], output: Path) -> None:
        """Measure the baseline as `runner` will measure the model, with its prompts; it is gone afterwards."""
        from ctxext.evals.loading import load
        from ctxext.evals.screen import run_with_bar
        from ctxext.evals.targets import LiveModel
        from ctxext.hub.checkpoint import checkpoint_folder

        target, prompter, name = runner.target, runner.target.prompter, Path(base).name
        if self.server is not None:
            of_base: Target = self._served(base, prompter, target.about["trained_length"], None)
        elif self.live:
            of_base = LiveModel(
                load(checkpoint_folder(base), self.dtype, self.device)[0], prompter, name, self.trained_length
            )
        else:
            _close(target)  # loads again after the baseline
            of_base = self._in_vllm(checkpoint_folder(base), prompter, name)
        of_base.judge = target.judge
        run_with_bar(replace(runner, target=of_base), output, variants, merge=False)
        _close(of_base)

    def _served(self, url: str, prompter: Prompter, trained: int, model: str | None) -> Target:
        from ctxext.evals.server import ServedModel
        from ctxext.evals.targets import Served

        return Served(ServedModel(url, style=prompter.style, model=model, **self.connection), prompter, trained)

    def _in_vllm(self, folder: Path, prompter: Prompter, name: str) -> Target:
        from ctxext.evals.in_vllm import InVLLM

        return InVLLM(folder, prompter, name, self.trained_length, dtype=self.dtype, options=self.options)


def _close(target: Target) -> None:
    """End vLLM, which leaves room for another model."""
    from ctxext.evals.in_vllm import InVLLM

    if isinstance(target, InVLLM):
        target.engine.close()
