"""Part 4: passkeys and perplexity of a public model at twice its length, by method, on four kinds of text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from at_scale.cells import Cell, Part
from at_scale.models import SMOLLM2_CONFIG, config_of, forward_cost, held, model_of, operations_a_second
from texts import NAMES, TEXTS, fetch, halves, text_of

from ctxext.evals.choice import all_figures
from ctxext.evals.control import control, other_forms
from ctxext.evals.haystack import Haystack
from ctxext.evals.needle import Passkey
from ctxext.evals.perplexity import Perplexity
from ctxext.evals.prompts import Prompter
from ctxext.evals.results import Results, read_results
from ctxext.evals.runner import Grid, Runner
from ctxext.evals.summary import Summary
from ctxext.evals.targets import UNEXTENDED, LiveModel, Variant, compared_variants
from ctxext.methods import method_from_dict
from ctxext.models.context import read_context

STATIC = ("yarn", "llama3", "ntk_by_parts", "resonance", "ntk", "pi", "abf", "cope")
IN_ATTENTION = ("dynamic_yarn", "self_extend", "dynamic_ntk", "rerope", "dca")
ON_A_CPU = ("yarn", "llama3", "ntk_by_parts", "dynamic_yarn", "self_extend")
GROWN = (3, 4)  # larger factors of yarn at the same lengths
FITTED = Path(__file__).parents[2] / "docs/fit/smollm2.json"  # λ fitted at ×2 on the first half of Persuasion
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
FAR = 10**6  # between the trial numbers of two texts, which no file reaches


@dataclass
class Quality(Part):
    """A cell is one variant on one text at one length: five methods on four texts on a CPU, all on twelve on a GPU. A
    text is done for all named methods before the next one, so that a stopped run has measured every method on the same
    texts. Then come the lengths up to which the baseline
    itself finds passkeys, the fitted one, and larger factors.

    `folder` gets a results file for each text. A round is one trial for each text and length, and two windows.
    """

    name = "quality"
    title = "passkeys and perplexity by method at ×2, by kind of text"

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens; the last is the target."""
        return (640, 768) if self.tiny else (14336, 16384)

    @property
    def near(self) -> int:
        """A length within the trained one."""
        return 192 if self.tiny else 4096

    @property
    def own(self) -> tuple[int, ...]:
        """Lengths up to the trained one, for the baseline alone."""
        return (384, 512) if self.tiny else (6144, 8192)

    @property
    def label(self) -> str:
        """The model's name in the results."""
        return "austen-4m" if self.tiny else "SmolLM2-135M-Instruct"

    @cached_property
    def model(self) -> tuple[Any, Any]:
        return model_of(self.tiny, self.device)

    @cached_property
    def config(self) -> Any:
        return SMOLLM2_CONFIG if self.planned and not self.tiny else config_of(self.tiny)

    @property
    def held_bytes(self) -> float:
        return held(self.config, self.lengths[-1], self.device)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the texts."""
        return NAMES[:1] if self.tiny else NAMES if self.device == "cuda" else NAMES[:4]

    @property
    def methods(self) -> tuple[str, ...]:
        if self.tiny:
            return ("yarn", "self_extend")
        return STATIC + IN_ATTENTION if self.device == "cuda" else ON_A_CPU

    def text(self, name: str) -> str:
        """One of `names`, whole."""
        if self.tiny:
            return text_of(name)
        fetch()
        return (TEXTS / f"{name}.txt").read_text(encoding="utf-8")

    def measured_text(self, name: str) -> str:
        """The part of it that nothing was fitted on."""
        return halves(self.text(name))[1] if name == "novel" else self.text(name)

    @cached_property
    def variants(self) -> list[Variant]:
        variants = compared_variants(self.config, self.methods, 2)
        if not self.tiny:
            saved = json.loads(FITTED.read_text(encoding="utf-8"))["method"]
            variants.append(Variant("fitted", {"method": method_from_dict({"name": "longrope", **saved})}))
            variants += [Variant(f"yarn_x{factor}", {"factor": factor, "method": "yarn"}) for factor in GROWN]
        return variants

    @cached_property
    def _asked(self) -> dict[str, tuple[LiveModel, Haystack]]:
        return {}

    def asked(self, name: str) -> tuple[LiveModel, Haystack]:
        """The model asked in the form in which the baseline answers on a text, and the text; made once."""
        if name not in self._asked:
            model, tokenizer = self.model
            haystack = Haystack.from_text(self.measured_text(name), tokenizer, name=name)
            target = LiveModel(model, Prompter(tokenizer), self.label)
            found = control(target, [Passkey()], haystack, longest=self.near, others=other_forms(target.prompter))
            target = target.asking(found.form.prompter(tokenizer))
            target.about = target.about | {"control": found.describe()}
            self._asked[name] = target, haystack
        return self._asked[name]

    def cells(self) -> Sequence[Cell]:
        cells, depths = [], DEPTHS[::2] if self.tiny else DEPTHS
        for trial in range(1, self.rounds + 1):
            for text in self.names:
                near = Grid(retrieval=(Passkey(),), lengths=(self.near,), depths=depths, trials=trial)
                read = Grid(texts=(Perplexity(),), lengths=(self.near, *self.lengths), windows=2 * trial)
                gate = Grid(lengths=(self.near,), gate=(self.near,), windows=2 * trial)
                far = [replace(near, lengths=(length,)) for length in self.lengths]
                passes = {
                    "near": (near, self.near, 3),
                    "short": (gate, self.near, 2),
                    "text": (read, self.lengths[-1], 2),
                    **{f"{grid.lengths[0]}": (grid, grid.lengths[0], 3) for grid in far},
                }
                for kind, (grid, length, n_passes) in passes.items():
                    for variant in self.variants:
                        cost = n_passes * forward_cost(self.config, length)
                        cells.append(self._cell(f"{trial} {text} {kind} {variant.name}", cost, text, grid, variant))
                for length in self.own:
                    name, cost = f"{trial} {text} {length} own", 3 * forward_cost(self.config, length)
                    grid = replace(near, lengths=(length,))
                    cells.append(self._cell(name, cost, text, grid, self.variants[0], "own"))
        later = ("own", *(variant.name for variant in self.variants[1 + len(self.methods) :]))
        rank = {word: k for k, word in enumerate(later, 1)}
        return sorted(cells, key=lambda cell: rank.get(cell.name.split()[-1], 0))

    def file(self, text: str, kind: str = "") -> Path:
        """The results on a text."""
        return self.folder / f"{text}{'-' * bool(kind)}{kind}.jsonl"

    def _cell(self, name: str, cost: float, text: str, grid: Grid, variant: Variant, kind: str = "") -> Cell:
        """Its samples are in a results file of the text."""

        def there() -> bool:
            held = counts(self.file(text, kind))
            return all(held[(variant.name, *place)] >= n for place, n in expected(grid).items())

        return Cell(name, cost, self._run(text, grid, variant, kind), there=there, file=text)

    def _run(self, text: str, grid: Grid, variant: Variant, kind: str = "") -> Callable[[], None]:
        def run() -> None:
            target, haystack = self.asked(text)
            Runner(target, haystack, grid, beyond=True).run(self.file(text, kind), [variant])

        return run

    def speed(self) -> float:
        return operations_a_second(self.model[0], self.near)

    def against(self, summary: Summary, other: str) -> dict[str, Any]:
        """The paired differences of each variant from another: loss beyond the trained length, and passkeys there."""
        trained, target = read_context(self.config).trained_length, self.lengths[-1]
        found = {
            variant: {
                "loss": summary.loss_difference(variant, other, target, trained),
                "passkey": summary.difference(variant, other, ["passkey"], self.lengths),
            }
            for variant in summary.variants
            if variant != other
        }
        return {name: {key: each and each._asdict() for key, each in value.items()} for name, value in found.items()}

    def record(self, kept: dict[str, Any]) -> dict[str, Any]:
        files = {name: read_results(path) for name in self.names if (path := self.file(name)).is_file()}
        if not files:
            return {}
        lengths = [self.near, read_context(self.config).trained_length, *self.lengths]
        by_text = {name: Summary(joined({name: one}, lengths)).to_dict()["figures"] for name, one in files.items()}
        summary = Summary(joined(files, lengths))
        return {
            **all_figures(summary),
            "against yarn": self.against(summary, "yarn"),
            "own": {name: by_depth(path) for name in files if (path := self.file(name, "own")).is_file()},
            "texts": {
                name: {
                    "tokens": results.header.about["text_tokens"],
                    "prompts": results.header.identity["prompts"],
                    "control": results.header.about["control"],
                    "figures": {
                        variant: {key: figures[key] for key in ("retrieval", "perplexity")}
                        for variant, figures in by_text[name].items()
                    },
                }
                for name, results in files.items()
            },
        }


def expected(grid: Grid) -> Counter[tuple[str, int]]:
    """The samples of one variant, by task and length; windows of text are read at the longest."""
    asked = {(task.name, length): grid.trials * len(grid.depths) for task in grid.retrieval for length in grid.lengths}
    read = {(task.name, max(grid.lengths)): grid.windows for task in grid.texts}
    return Counter({**asked, **read, **{("short", length): grid.windows for length in grid.gate}})


def counts(path: Path) -> Counter[tuple[str, str, int]]:
    """The samples of a results file, by variant, task and length; none without one."""
    return _counts(path, path.stat().st_mtime_ns) if path.is_file() else Counter()


@lru_cache(maxsize=8)
def _counts(path: Path, changed: int) -> Counter[tuple[str, str, int]]:
    return Counter((record["variant"], record["task"], record["length"]) for record in read_results(path).records)


def by_depth(path: Path) -> dict[str, dict[str, float]]:
    """The share of passkeys found by the baseline, by length and depth."""
    found: dict[str, dict[str, float]] = {}
    for (length, depth), share in Summary(read_results(path)).cells(UNEXTENDED, "passkey").items():
        found.setdefault(str(length), {})[f"{depth:g}"] = share.value
    return found


def joined(files: dict[str, Results], lengths: Sequence[int]) -> Results:
    """The results on several texts as one; each text is one independent sample.

    Args:
        lengths: where perplexity by position is cut, in tokens.
    """
    first = next(iter(files.values()))
    if len(files) == 1:
        return replace(first, header=replace(first.header, about={**first.header.about, "lengths": sorted(lengths)}))
    about = {key: value for key, value in first.header.about.items() if key not in ("text_tokens", "control")}
    header = replace(
        first.header,
        identity={**first.header.identity, "text": ", ".join(files), "prompts": "as the baseline answers, by text"},
        about={**about, "lengths": sorted(lengths), "texts": [*files]},
    )
    records = [
        {**record, "trial": record["trial"] + k * FAR, "key": f"{name} {record['key']}", "text": name}
        for k, (name, results) in enumerate(files.items())
        for record in results.records
    ]
    return Results(first.path, header, records)
