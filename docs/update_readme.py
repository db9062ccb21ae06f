"""Write the tables of the documents again: methods from the registry, numbers from the JSON of `make figures`.

python docs/update_readme.py
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ctxext.evals.statistics import Interval, in_percent
from ctxext.export.readings import engine_table
from ctxext.extension.method_table import method_table

ROOT = Path(__file__).resolve().parent.parent


def comparison_table(file: str, page: str = ".") -> str:
    """Passkey, perplexity and the short-context regression of a summary, in Markdown.

    Args:
        file: the summary, from the root; `page` is the folder of the page that links it.
    """
    summary = json.loads((ROOT / file).read_text())
    figures = summary["figures"]
    asked, bands = figures["none"]["retrieval"].get("passkey", {}), list(figures["none"]["perplexity"])
    trained = summary["about"]["trained_length"]
    gated = any((figure["gate"] or {}).get("loss") for figure in figures.values())
    head = [
        "method",
        *(f"passkey at {int(length):,}" for length in asked),
        *(f"perplexity at {'–'.join(f'{int(end):,}' for end in band.split('-'))}" for band in bands),
        *([f"regression within {trained:,} (nats)"] if gated else []),
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for method, figure in figures.items():
        shares = figure["retrieval"]["passkey"].values() if asked else ()
        found = [Interval(**share).percent().partition(" n=")[0] for share in shares]
        loss = (figure["gate"] or {}).get("loss")
        regression = (
            f"{loss['value']:+.3f} [{loss['low']:+.3f}, {loss['high']:+.3f}]" if loss and method != "none" else ""
        )
        name = "baseline" if method == "none" else f"`{method}`"
        cells = [name, *found, *(f"{value:.1f}" for value in figure["perplexity"].values())]
        cells += [regression] if gated else []
        lines.append("| " + " | ".join(cells) + " |")
    prompts = (
        f"{next(iter(asked.values()))['n']} prompts a cell, with 95% intervals over the texts that they share; "
        if asked
        else ""
    )
    longest = int(bands[-1].split("-")[-1])
    lines += [
        "",
        f"{prompts}{_count(summary['windows'], 'window')} of {longest:,} tokens, seed {summary['identity']['seed']}; "
        f"from [{file}]({os.path.relpath(file, page)}).",
    ]
    return "\n".join(lines)


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def dynamic_table(file: str, page: str) -> str:
    """Dynamic scaling side by side, of a file that benchmarks/dynamic.py wrote, in Markdown."""
    record = json.loads((ROOT / file).read_text())
    ways = record["ways"]
    first = next(iter(ways.values()))
    bands, lengths = list(first["loss"]), list(first["passkey"])
    head = [
        "",
        *(f"loss at {'–'.join(f'{int(end):,}' for end in band.split('-'))}" for band in bands),
        "beyond, against static YaRN",
        *(f"passkey at {int(length):,}" for length in lengths),
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, way in ways.items():
        gap = way.get("against static YaRN")
        cells = [
            "baseline" if name == "not extended" else name,
            *(f"{loss:.3f}" for loss in way["loss"].values()),
            "" if gap is None else f"{gap['value']:+.3f} [{gap['low']:+.3f}, {gap['high']:+.3f}]",
            *(f"{in_percent(share['value'])}%" for share in way["passkey"].values()),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    pretended = f", taken as trained at {record['trained_length']:,} tokens," if "SmolLM2" in record["model"] else ""
    lines += [
        "",
        f"{record['model']}{pretended} at ×{record['factor']}; losses in nats over {record['windows']} windows of "
        f"{int(lengths[-1]):,} tokens, {first['passkey'][lengths[0]]['n']} prompts a cell; from "
        f"[{file}]({os.path.relpath(file, page)}).",
    ]
    return "\n".join(lines)


def evaluators_table() -> str:
    """What the evaluators save, of docs/benchmarks/evaluators*.json."""
    rows = {
        "a passkey grid of 11 depths: tokens": "passkey grid: tokens over plain",
        "its time, against `generate` for each prompt": "passkey grid: time over plain",
        "its time, if `generate` is told the answer's length": "passkey grid: time over plain told the answer's length",
        "a perplexity curve of 32 points: time": "perplexity curve: time over plain",
        "scoring 16,384 tokens: growth of memory": "scoring: growth over stock",
    }
    models = {"bundled model": "evaluators", "SmolLM2-135M-Instruct": "evaluators_SmolLM2-135M-Instruct"}
    lines = [f"| over the plain way, same answers | {' | '.join(models)} |", "|---" * (1 + len(models)) + "|"]
    files = {name: json.loads((ROOT / f"docs/benchmarks/{file}.json").read_text()) for name, file in models.items()}
    for label, figure in rows.items():
        cells = [f"{file['figures'][figure]['value']:.2f}" for file in files.values()]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    trials = " and ".join(str(file["trials"]) for file in files.values())
    lines += ["", f"Two CPU cores, prompts of 1,024 tokens, {trials} trials; from `evaluators*.json`."]
    return "\n".join(lines)


def finetune_table() -> str:
    """What a fine-tune of the bundled model bought, of docs/finetune/summary.json."""
    summary = json.loads((ROOT / "docs/finetune/summary.json").read_text())
    head = [
        "fine-tuned by", "passkey at 2,048", "passkey at 512", "last 512 of 2,048 tokens (nats)",
        "regression within 512 (nats)", "tokens", "the whole command",
    ]  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, run in summary["runs"].items():
        before, after = (run["measured"]["variants"][variant] for variant in ("untrained", "trained"))
        (short, short_share), *_, (long, long_share) = after["passkey"].items()
        tail, regression = run["measured"]["tail"]["difference"], after["short_loss"]
        cells = [
            f"`{name}`" if ", " not in name else "`{}`, {}".format(*name.split(", ")),
            f"{in_percent(before['passkey'][long]['value'], 1)}% → {in_percent(long_share['value'], 1)}%",
            f"{in_percent(before['passkey'][short]['value'], 1)}% → {in_percent(short_share['value'], 1)}%",
            *(f"{d['value']:+.3f} [{d['low']:+.3f}, {d['high']:+.3f}]" for d in (tail, regression)),
            f"{run['mid_training'][-1]['tokens'] / 1e6:.2f} million",
            f"{run['seconds'] / 60:.1f} min",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    first = next(iter(summary["runs"].values()))
    n = next(iter(first["measured"]["variants"]["trained"]["passkey"].values()))["n"]
    lines += [
        "",
        f"Passkey: {n} prompts a cell, extended and not trained → trained. Nats: against the baseline within its own "
        f"512 tokens, on the same text; {first['measured']['tail']['windows']} windows, 95% intervals; two CPU "
        "cores; from [docs/finetune/summary.json](../docs/finetune/summary.json).",
    ]
    return "\n".join(lines)


def finetune_memory_table() -> str:
    """A step of the recipe against stock Trainer + PEFT, of docs/benchmarks/finetune.json."""
    record = json.loads((ROOT / "docs/benchmarks/finetune.json").read_text())
    figures = {name: figure["value"] for name, figure in record["figures"].items()}
    longest = {name.partition(":")[0]: value for name, value in figures.items() if "longest step" in name}
    line = {name.partition(":")[0] for name in figures if "by the line" in name}
    lines = ["| | growth of memory (GB) | seconds a step | longest step in 8 GB (tokens) |", "|---|---|---|---|"]
    for variant, most in longest.items():
        growth, seconds = figures[f"{variant}: growth of memory (GB)"], figures[f"{variant}: seconds a step"]
        lines.append(f"| {variant} | {growth:.2f} | {seconds:.1f} | {'≈ ' * (variant in line)}{int(most):,} |")
    lines += [
        "",
        f"{record['length']:,} tokens, SmolLM2's shape with 4 layers, LoRA, float32, two CPU cores; medians of "
        f"{record['rounds']} rounds. Loss and gradients are equal to 1e-5. ≈: by the line through two shorter steps.",
    ]
    return "\n".join(lines)


def choice_table() -> str:
    """What the decision of `compare` says of simulated methods, of docs/benchmarks/choice.json."""
    record = json.loads((ROOT / "docs/benchmarks/choice.json").read_text())
    figures = {name: figure["value"] for name, figure in record["figures"].items()}
    kinds = ("runs with a claim", "the worst setting", "the interval of the best holds the truth")
    lines = ["| all equal | runs with a claim | in the worst setting | the best's interval holds |", "|---" * 4 + "|"]
    for name in dict.fromkeys(name.partition(",")[0] for name in figures if "the worst setting" in name):
        cells = [f"{in_percent(figures[f'{name}, all equal: {kind}'], 1)}%" for kind in kinds]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    lines += ["", "| one differs | named | told apart by the adjusted test |", "|---|---|---|"]
    named = {name: value for name, value in figures.items() if name.endswith(": named")}
    for name, value in named.items():
        what = name.removesuffix(": named")
        apart = figures.get(f"{what}: all others behind", figures.get(f"{what}: behind"))
        lines.append(f"| {what} | {in_percent(value)}% | {in_percent(apart)}% |")
    lines += ["", f"{record['runs']} runs of each setting, seed {record['seed']}; from [choice.json](choice.json)."]
    return "\n".join(lines)


def attention_table() -> str:
    """What in-attention RoPE costs, of docs/benchmarks/attention.json."""
    record = json.loads((ROOT / "docs/benchmarks/attention.json").read_text())
    lines = ["| over stock | | bar |", "|---|---|---|"]
    for name, figure in record["figures"].items():
        if figure["bar"] != "no bar":
            short = "" if figure["ok"] else ", short"
            lines.append(f"| {name} | {figure['value']:.4g} | {figure['bar'].replace('<=', '≤')}{short} |")
    return "\n".join(lines)


def positions_table(each_seed: bool) -> str:
    """Train short, test long, of docs/positions/summary.json: means over seeds, or the value of each seed."""
    summary = json.loads((ROOT / "docs/positions/summary.json").read_text())
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
            return found["error"].split(":")[0]
        if each_seed:
            return " ".join(f"{seed[way]['against']['value']:+.3f}" for seed in at["seeds"])
        return "{value:+.3f} [{low:+.3f}, {high:+.3f}]".format(**found["against"])

    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for position, found in summary["positions"].items():
        first = found["lengths"][str(trained)]
        losses = [seed["stock"]["loss"] for seed in first["seeds"]] if each_seed else [first["stock"]["loss"]]
        cells = [position, f"`{found['method']}`" if found["method"] else "", " ".join(f"{x:.3f}" for x in losses)]
        cells += [cell(first, "extended")]
        cells += [cell(found["lengths"][end], way) for end in longer for way in ("stock", "extended")]
        lines.append("| " + " | ".join(cells) + " |")
    what = "each seed" if each_seed else f"means over {_count(summary['arguments']['seeds'], 'seed')}, 95% intervals"
    lines += [
        "",
        f"Nats a token over the last {tail:,} tokens, against the same tokens where the baseline reads "
        f"only the {trained:,} that end with them; {_count(summary['arguments']['windows'], 'window')}, {what}.",
    ]
    return "\n".join(lines)


def fit_table(each_seed: bool, page: str) -> str:
    """Fitted λ beside static methods, of docs/fit/summary.json: every row, or the best static ones and the mean."""
    file = "docs/fit/summary.json"
    summary = json.loads((ROOT / file).read_text())
    head = [
        "",
        "method",
        "passkeys found",
        "at the target",
        "loss of a passkey (nats)",
        "perplexity",
        "regression within 512 (nats)",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for factor, part in summary["table"].items():
        rows, best = part["rows"], part["best_static"]
        fitted = [row for name, row in rows.items() if name.startswith("fitted")]
        shown = rows
        if not each_seed:
            shown = {name: rows[name] for name in dict.fromkeys([best["keys"], best["text"]])}
            numbers = ("found", "found_at_target", "key_loss", "perplexity")
            mean = {key: sum(row[key] for row in fitted) / len(fitted) for key in numbers}
            regression = sum(row["short"]["value"] for row in fitted) / len(fitted)
            name = f"fitted, mean of {len(fitted)} seeds" if len(fitted) > 1 else "fitted, one seed"
            shown[name] = {**mean, "short": {"value": regression}}
        for name, row in shown.items():
            short = row["short"]
            regression = "" if short is None else f"{short['value']:+.4f}"
            if short and each_seed:
                regression += f" [{short['low']:+.4f}, {short['high']:+.4f}]"
            cells = [
                f"×{factor}",
                name if name.startswith("fitted") else f"`{name}`" if name != "none" else "baseline",
            ]
            cells += [
                f"{in_percent(row['found'], 1)}%",
                f"{in_percent(row['found_at_target'])}%",
                f"{row['key_loss']:.4f}",
            ]
            lines.append("| " + " | ".join([*cells, f"{row['perplexity']:.2f}", regression]) + " |")
    how = summary["settings"]
    slowest = {
        factor: max(row["seconds"] or 0 for row in part["rows"].values()) / 60
        for factor, part in summary["table"].items()
    }
    most, few, fewest = (how[key] * len(how["depths"]) for key in ("trials", "few_trials", "long_trials"))
    lines += [
        "",
        f"Keys at every length from 128 tokens to the target, {most} prompts a length ({few} where the target is "
        f"{how['long']:,} tokens or more, {fewest} of such a length itself); {how['windows']} windows of the target "
        f"length; the half of *Persuasion* not fitted on; "
        "the best static method is the best as measured on these prompts and windows, which favours it; "
        f"the longest fit: {', '.join(f'{minutes:.1f} min at ×{factor}' for factor, minutes in slowest.items())} "
        f"({summary['machine']}); "
        f"from [{file}]({os.path.relpath(file, page)}).",
    ]
    return "\n".join(lines)


def parts_table(file: str) -> str:
    """What parts of the fit do, from a record of benchmarks/fit.py --ablation or fit_by_layer.py: means over seeds."""
    figures = {name: f["value"] for name, f in json.loads((ROOT / file).read_text())["figures"].items()}
    kinds = ["share of keys found", "loss of a key in nats", "perplexity", "loss within 512, over"]
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for name, value in figures.items():
        what, _, kind = name.partition(": ")
        factor, _, changed = what.partition(" ")
        changed = re.sub(r", seed \d+", "", changed)
        found.setdefault((factor, changed), {}).setdefault(kind, []).append(value)
    lines = [
        "| | | passkeys found | loss of a passkey (nats) | perplexity | loss within 512, over |",
        "|---|---|---|---|---|---|",
    ]
    for (factor, changed), by_kind in found.items():
        share, key, perplexity, short = (sum(by_kind[kind]) / len(by_kind[kind]) for kind in kinds)
        lines.append(
            f"| {factor} | {changed} | {in_percent(share, 1)}% | {key:.4f} | {perplexity:.2f} | {short:+.2%} |"
        )
    return "\n".join(lines)


def smollm2_table() -> str:
    """A fit of SmolLM2 beside static methods, of docs/fit/smollm2.json."""
    file = json.loads((ROOT / "docs/fit/smollm2.json").read_text())
    figures = {name: figure["value"] for name, figure in file["figures"].items()}
    settings = file["settings"]
    lines = [
        "| method | passkeys found | at the target | loss of a passkey (nats) | perplexity | loss within 8,192, over |",
        "|---|---|---|---|---|---|",
    ]
    for method in ("none", "yarn", "llama3", "fitted"):
        share, at_target, key, perplexity, short = (
            figures[f"{method}: {kind}"]
            for kind in (
                "share of keys found", "at the target", "loss of a key in nats", "perplexity", "loss within 8192, over",
            )
        )  # fmt: skip
        name = {"none": "baseline", "fitted": "fitted"}.get(method, f"`{method}`")
        shares = f"{in_percent(share)}% | {in_percent(at_target)}%"
        lines.append(f"| {name} | {shares} | {key:.2f} | {perplexity:.2f} | {short:+.2%} |")
    texts = ", ".join(f"{count} of {int(length):,}" for length, count in settings["trials"].items())
    lines += [
        "",
        f"Texts, each with {len(settings['depths'])} keys: {texts} tokens; {settings['windows']} windows of 16,384 and "
        f"{settings['short_windows']} of 8,192; the fit: {figures['the fit in seconds'] / 60:.0f} min "
        f"({file['machine']}); from [docs/fit/smollm2.json](smollm2.json).",
    ]
    return "\n".join(lines)


TABLES = {
    "README.md": {
        "fit": partial(fit_table, False, "."),
        "methods": method_table,
        "demo": partial(comparison_table, "docs/demo/summary.json"),
    },
    "recipes/README.md": {"finetune": finetune_table},
    "docs/fit/README.md": {
        "fit": partial(fit_table, True, "docs/fit"),
        "ablation": partial(parts_table, "docs/fit/ablation.json"),
        "layers": partial(parts_table, "docs/fit/by_layer.json"),
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
    "docs/benchmarks/README.md": {
        "choice": choice_table,
        "evaluators": evaluators_table,
        "finetune": finetune_memory_table,
    },
    "docs/engines.md": {"engines": engine_table},
    "docs/positions/README.md": {
        "positions": partial(positions_table, each_seed=False),
        "seeds": partial(positions_table, each_seed=True),
    },
}


def updated(text: str, tables: dict[str, Callable[[], str]]) -> str:
    """`text` with what comes between its markers written again."""
    for name, table in tables.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        block = f"{begin}\n{table()}\n{end}"
        text, count = re.subn(f"{begin}.*?{end}", lambda _, block=block: block, text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"there are {count} blocks {begin} … {end}; it needs exactly one.")
    return text


if __name__ == "__main__":
    for file, tables in TABLES.items():
        path = ROOT / file
        path.write_text(updated(path.read_text(), tables))
