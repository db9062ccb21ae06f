"""How often `compare` tells methods apart: seldom where they are equal, and rightly where they differ.

    python benchmarks/choice.py

Simulated samples of k methods go through the decision of `ctxext compare` (`evals/choice.py`). A
claim is any method called behind another, or better or worse than the baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from report import Report, options

from ctxext.evals.choice import LEVEL, Choice, by_measurement, choose, found_share
from ctxext.evals.perplexity import packed
from ctxext.evals.results import Header, Record, Results
from ctxext.evals.statistics import wilson
from ctxext.evals.summary import Summary
from ctxext.evals.targets import UNEXTENDED
from ctxext.fitting.race import staying

TRAINED, BEYOND = 8, (16, 32)


@dataclass(frozen=True)
class Setting:
    """Methods of which one may differ from the rest, and how much is measured.

    Attributes:
        rate: the chance that a sample is right; `rate_of_first` is the first method's.
        shared: the share of a method's luck that all methods have in common.
        alike: the correlation of the samples of one text.
        tails: of the losses of windows: "normal", or "t2", which has no variance.
        gain: nats a token that the first method loses less than the rest.
    """

    methods: int
    rate: float = 0.7
    rate_of_first: float | None = None
    trials: int = 20
    depths: int = 1
    lengths: int = 1
    tasks: int = 1
    shared: float = 0.0
    alike: float = 0.0
    windows: int = 0
    tails: str = "normal"
    gain: float = 0.0

    def summary(self, rng: np.random.Generator) -> Summary:
        """One run: the baseline has the rate of the rest."""
        names = [UNEXTENDED, *(f"m{k}" for k in range(self.methods))]
        rates = [self.rate, self.rate if self.rate_of_first is None else self.rate_of_first]
        rates += [self.rate] * (self.methods - 1)
        records: list[Record] = []
        tasks = [f"task{k}" for k in range(self.tasks)] if self.trials else []
        for task in tasks:
            for length in BEYOND[: self.lengths]:
                hits = self.hits(rng, rates)
                for (v, trial, depth), hit in np.ndenumerate(hits):
                    place = {"task": task, "length": length, "depth": depth / 10, "trial": trial, "seed": 0}
                    key = f"{task} {length} {trial} {depth}"
                    records.append({"variant": names[v], "key": key, **place, "score": float(hit)})
        for task, length in (("perplexity", BEYOND[-1]), ("short", TRAINED)):
            for (v, window), loss in np.ndenumerate(self._losses(rng, len(names))):
                values = torch.full((length - 1,), 3.0 + loss)
                place = {"task": task, "length": length, "depth": None, "trial": window, "seed": 0}
                tensors = {"losses": values, **({"top1": values.int()} if task == "short" else {})}
                counts = {"tokens": length - 1, "bytes": 4 * length, "loss": 3.0 + loss}
                records.append({"variant": names[v], "key": f"{task} {window}", **place, **counts, **packed(**tensors)})
        header = Header(
            identity={"seed": 0},
            tasks={task: {} for task in (*tasks, "perplexity", "short")},
            variants={name: {"model": "m", "portable": k % 2 == 0} for k, name in enumerate(names)},
            about={"trained_length": TRAINED, "lengths": list(BEYOND)},
        )
        return Summary(Results(Path("simulated"), header, records))

    def hits(self, rng: np.random.Generator, rates: Sequence[float]) -> NDArray[np.bool_]:
        """Of shape (methods, trials, depths): luck is the sum of what all share, the text's and each one's own."""
        shape = (len(rates), self.trials, self.depths)
        common = np.sqrt(self.alike) * rng.normal(size=(1, self.trials, 1))
        common = common + np.sqrt(1 - self.alike) * rng.normal(size=(1, *shape[1:]))
        own = np.sqrt(self.alike) * rng.normal(size=(*shape[:2], 1)) + np.sqrt(1 - self.alike) * rng.normal(size=shape)
        luck = np.sqrt(self.shared) * common + np.sqrt(1 - self.shared) * own
        cut = torch.special.ndtri(torch.tensor(list(rates), dtype=torch.float64)).numpy()
        return luck < cut[:, None, None]  # type: ignore[no-any-return]

    def _losses(self, rng: np.random.Generator, methods: int) -> NDArray[np.float64]:
        """Of shape (methods, windows), in nats a token."""
        draw = rng.normal if self.tails == "normal" else lambda size: rng.standard_t(2, size)
        losses = 0.2 * rng.normal(size=(1, self.windows)) + 0.03 * draw(size=(methods, self.windows))
        losses[1] -= self.gain
        return losses  # type: ignore[no-any-return]


def equal_settings() -> dict[str, list[Setting]]:
    """By the number of methods: rates, correlations, clusters, tasks and sizes, in part with losses."""
    kinds = [
        Setting(0, 0.7, trials=50),
        Setting(0, 0.05, trials=20, lengths=2),
        Setting(0, 0.5, trials=20, depths=5, shared=0.5, alike=0.5),
        Setting(0, 0.95, trials=20, depths=3, tasks=2, shared=0.9, alike=0.8),
        Setting(0, 0.3, trials=4, depths=5, lengths=2, shared=0.5, alike=0.3, windows=4),
        Setting(0, 0.9, trials=10, tasks=13),
        Setting(0, 0.7, trials=0, windows=16),
        Setting(0, 0.7, trials=10, depths=2, windows=24, tails="t2"),
    ]
    return {f"{k} methods": [replace(kind, methods=k) for kind in kinds] for k in (2, 3, 5, 8, 12)}


def chosen(summary: Summary, setting: Setting) -> Choice:
    return choose(summary, [f"m{k}" for k in range(setting.methods)])


def claims(choice: Choice) -> bool:
    against = [found for found in (choice.gain, choice.worse) if found is not None]
    return bool(choice.behind) or any(found.p < LEVEL for found in against)


def covered(summary: Summary, setting: Setting, choice: Choice) -> bool:
    """Whether the interval of the best method as measured holds the truth."""
    best = by_measurement(summary, choice.ranking)[0]
    share = found_share(summary, best, choice.started)
    return share is None or share.low <= setting.rate <= share.high


def raced(setting: Setting, rng: np.random.Generator) -> Choice:
    """The end of a race of `compare --minutes`: rounds of twice as many texts each."""
    whole, texts = setting.summary(rng), 2
    candidates = [f"m{k}" for k in range(setting.methods)]
    has = dict.fromkeys([UNEXTENDED, *candidates], 0)
    while True:
        has |= dict.fromkeys([UNEXTENDED, *candidates], texts)
        records = [r for r in whole.records if r["trial"] < has[r["variant"]]]
        summary = Summary(Results(Path("simulated"), whole.header, records))
        if texts >= setting.trials:
            return choose(summary, candidates, left=setting.methods - len(candidates))
        candidates = staying(summary, candidates)
        texts *= 2


def main() -> None:
    parser = options(__doc__, "docs/benchmarks/choice.json")
    parser.add_argument("--runs", type=int, default=100, help="of each setting")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    report, rng = Report("choice", seed=args.seed), np.random.default_rng(args.seed)

    for name, settings in equal_settings().items():
        claimed, held = [], []
        for setting in settings:
            runs = [(summary, chosen(summary, setting)) for summary in (setting.summary(rng) for _ in range(args.runs))]
            claimed.append(sum(claims(choice) for _, choice in runs))
            if setting.trials:
                held += [covered(summary, setting, choice) for summary, choice in runs]
        shares = [wilson(count, args.runs) for count in claimed]
        report.add(f"{name}, all equal: runs with a claim", sum(claimed) / (args.runs * len(claimed)), at_most=LEVEL)
        report.add(f"{name}, all equal: the worst setting", max(share.value for share in shares))
        low = max(share.low for share in shares)
        report.add(f"{name}, all equal: the worst setting, lower end of 95%", low, at_most=LEVEL)
        report.add(f"{name}, all equal: the interval of the best holds the truth", float(np.mean(held)), at_least=0.95)

    race = Setting(8, 0.7, trials=32, lengths=2, shared=0.5, windows=32)
    ended = [claims(raced(race, rng)) for _ in range(args.runs)]
    report.add("8 methods, all equal, in a race: runs with a claim", float(np.mean(ended)), at_most=LEVEL)

    better = {
        "finds 90%, the rest 40%": Setting(8, 0.4, 0.9, trials=50),
        "finds 90%, the rest 60%, 5 depths": Setting(
            12, 0.6, 0.9, trials=20, depths=5, lengths=2, shared=0.5, alike=0.3
        ),
        "loses 0.1 nats less": Setting(12, 0.9, trials=20, windows=24, gain=0.1),
    }
    for name, setting in better.items():
        runs = [chosen(setting.summary(rng), setting) for _ in range(args.runs)]
        here, named = f"one of {setting.methods} {name}", [r.variant == "m0" for r in runs]
        report.add(f"{here}: named", float(np.mean(named)), at_least=0.95)
        alone = [r.variant == "m0" and not r.tied for r in runs]
        report.add(f"{here}: all others behind", float(np.mean(alone)), at_least=0.8)
    worse = {
        "finds 50%, the rest 90%": Setting(8, 0.9, 0.5, trials=50),
        "loses 0.1 nats more": Setting(12, 0.9, trials=20, windows=24, gain=-0.1),
    }
    for name, setting in worse.items():
        runs = [chosen(setting.summary(rng), setting) for _ in range(args.runs)]
        here, named = f"one of {setting.methods} {name}", [r.variant == "m0" for r in runs]
        report.add(f"{here}: named", float(np.mean(named)), at_most=0.01)
        report.add(f"{here}: behind", float(np.mean(["m0" in r.behind for r in runs])), at_least=0.9)
    report.finish(args.output, runs=args.runs, level=LEVEL)


if __name__ == "__main__":
    main()
