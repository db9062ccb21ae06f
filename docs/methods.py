"""Write docs/methods/: a card for each registered method, with its figure, and the page that lists them.

python docs/methods.py
"""

from __future__ import annotations

import inspect
import json
import math
import re
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ctxext.core.plan import ENCODINGS
from ctxext.encodings.rope import RopeGeometry, wavelengths
from ctxext.evals.plots import COLORS, DASHES, draw_distances
from ctxext.evals.statistics import Interval
from ctxext.extension.distances import distances
from ctxext.extension.method_table import method_table, saved_as
from ctxext.methods import ContextMethod, PositionRemapping, RopeMethod, RopeScaling, list_methods
from ctxext.methods.contract import Paper, required_options

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "methods"
FACTOR = 4.0
ROPE = RopeGeometry.plain(dim=128, rope_theta=10_000.0, length=4096)
MEASURED = {  # docs/compare and docs/at_scale hold one summary for each comparison
    "docs/at_scale/quality-cpu.json": "SmolLM2-135M-Instruct ×2, to 16,384 tokens",
    "docs/compare/austen-4m.json": "the bundled model ×4, to 2,048 tokens",
    "docs/compare/austen-4m-8x.json": "the bundled model ×8, to 4,096 tokens",
    "docs/compare/austen-4m-960-seed0.json": "the bundled model ×1.9, to 960 tokens",
}
WHEN = {
    "pi": "Only with fine-tuning: without it, neighbouring tokens become hard to tell apart.",
    "ntk": "The simplest form that every engine reads: a base. Some slow pairs turn beyond the trained range.",
    "ntk_by_parts": "YaRN without its attention factor: for an engine or a family that ignores the factor.",
    "yarn": "The default: no angle beyond the trained range, and read natively by most engines.",
    "llama3": "For short prompts: a smaller regression than YaRN's on the bundled model, and the same on SmolLM2.",
    "abf": "Before continued pre-training, as Llama 2 Long did.",
    "drope": "Before a short training at the trained length. Without it the model does not work.",
    "resonance": "On top of YaRN or another static method, mostly with training.",
    "cope": "Before training at the target length. Untrained, it reaches less far than `yarn`.",
    "p_rope": "For models trained with it, such as Gemma 4, or before training.",
    "dynamic_ntk": "Prompts of every length, in transformers: within the trained length the model is unchanged.",
    "dynamic_yarn": "As `dynamic_ntk`, with YaRN's frequencies: within the trained length the model is unchanged.",
    "transformers_dynamic": "Only to compare with what transformers' `dynamic` does: cached decoding differs.",
    "longrope": "With your own λ: from `ctxext fit`, a search, or a vendor.",
    "self_extend": "Without training, for retrieval: neighbours keep their exact distances. Runs in transformers only.",
    "rerope": "As `self_extend`; every far token is at one distance.",
    "string": "Models that rarely saw the largest distances of their window in training; the paper finds many.",
    "dca": "Very long documents without training, as in Qwen2.5-1M.",
    "query_temperature": "On top of another method, for models trained with it or about to be.",
    "row_interpolation": "Learned position tables such as GPT-2's, before fine-tuning.",
    "hierarchical": "Learned tables where the trained rows must not change.",
    "tiling": "Learned tables with local attention, before fine-tuning, as Longformer did.",
    "sinusoidal_interpolation": "Sinusoidal tables, before fine-tuning.",
    "sinusoidal_extrapolation": "Sinusoidal tables, to raise a limit that the formula does not have.",
    "alibi_scaling": "ALiBi models such as BLOOM and MPT, without training or before it.",
    "bucket_scaling": "T5's relative buckets: the last bucket begins later.",
    "distance_interpolation": "Relative representations (Shaw, Transformer-XL), before fine-tuning.",
}


# --------------------------------------------------------------------------------------------- the figures


def draw(method: RopeMethod, path: Path) -> None:
    """λ and wavelengths of each pair; for a method that remaps positions, the distances that it makes."""
    style = {"svg.hashsalt": "ctxext", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False,
             "axes.spines.right": False, "axes.grid": True, "grid.color": "#e3e6ea"}  # fmt: skip
    with rc_context(style):
        figure = Figure(figsize=(7.6, 2.7), layout="constrained")
        inner = method.untempered
        if isinstance(inner, RopeScaling):
            left, right = figure.subplots(1, 2)
            draw_frequencies(inner, left, right)
        else:
            assert isinstance(inner, PositionRemapping)
            length, axes = int(inner.factor * ROPE.original_max_position_embeddings), figure.subplots()
            draw_distances(distances(inner, ROPE, length, step=8), axes, inner.name)
            axes.set_title(f"effective distance from token {length - 1:,}")
        figure.savefig(path, metadata={"Date": None})


def draw_frequencies(method: RopeScaling, left: Axes, right: Axes) -> None:
    trained, factor = ROPE.original_max_position_embeddings, method.factor
    lengths = [int(share * trained) for share in (1, 2, factor)] if method.is_dynamic else [int(factor * trained)]
    for length, color, dash in zip(lengths, COLORS, DASHES):
        factors = method.rescale_factors(ROPE, torch.tensor(length))
        name = f"at {length:,} tokens" if method.is_dynamic else method.name
        left.plot(factors.clamp(max=1e3), color=color, linestyle=dash, label=name)
        waves = wavelengths(ROPE.inv_freq / factors)
        right.plot(waves.clamp(max=1e7), color=color, linestyle=dash)
    right.plot(wavelengths(ROPE.inv_freq), color="#8a929e", linestyle=":", label="plain RoPE")
    cut = ", cut off at 1,000" if float(method.rescale_factors(ROPE).max()) > 1e3 else ""
    titles = f"rescale factor λ (log scale{cut})", "wavelength in tokens (log scale)"
    for place, title, low in zip((left, right), titles, (0.9, 5.0)):
        place.set(yscale="log", title=title, xlabel="pair, fastest first", ylim=(low, None))
        place.minorticks_off()
        place.legend(frameon=False, loc="upper left")
    left.yaxis.set_major_formatter("{x:g}")
    left.set_yticks([1, 2, 4] if left.get_ylim()[1] < 30 else [1, 10, 100, 1000])
    for length, name in ((trained, "trained"), (factor * trained, "target")):
        right.axhline(length, color="#5a626e", linewidth=0.8, linestyle="--")
        right.text(0, length, f"{name}: {length:,.0f}", va="bottom", color="#5a626e", fontsize=8)


def example(cls: type[ContextMethod]) -> RopeMethod | None:
    """The instance that its figure shows; None for the encodings that have no pairs."""
    return cls.example(ROPE, FACTOR) if issubclass(cls, RopeMethod) else None


def shown_factor(cls: type[ContextMethod]) -> float:
    """FACTOR, or, to a tenth, the largest that the method reaches."""
    instance = example(cls)
    return FACTOR if instance is None else math.floor(10 * instance.factor) / 10


# ----------------------------------------------------------------------------------------------- the cards


def described(cls: type[ContextMethod]) -> tuple[str, dict[str, str]]:
    """A method's docstring: its text, and its options with their words."""
    text, _, listed = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")
    found = dict(re.findall(r"^    (\w+): (.+(?:\n {5,}.+)*)", listed, re.M))
    return text.strip(), {name: re.sub(r"\s+", " ", words) for name, words in found.items()}


def options(cls: type[ContextMethod]) -> list[str]:
    own = [field for field in fields(cls) if field.name != "factor"]
    if not own:
        return []
    words: dict[str, str] = {}
    for parent in reversed(cls.__mro__):
        if issubclass(parent, ContextMethod) and parent is not ContextMethod:
            words |= described(parent)[1]
    rows = [f"| `{field.name}` | {default_of(field)} | {words.get(field.name, '')} |" for field in own]
    return ["## Options", "", "| option | default | |", "|---|---|---|", *rows, ""]


def default_of(field: Field[Any]) -> str:
    return "required" if field.default is MISSING else f"`{field.default}`"


def call(cls: type[ContextMethod]) -> list[str]:
    """How to use it, from Python and on the command line."""
    needed, factor = required_options(cls), shown_factor(cls)
    arguments = "".join(f", {name}=[...]" for name in needed)
    flags = "".join(f" --option {name}=[...]" for name in needed)
    return [
        "## Use it", "",
        "```python", f'extend_context(model, factor={factor:g}, method="{cls.name}"{arguments})', "```", "",
        "```console", f"$ ctxext extend MODEL --method {cls.name} --factor {factor:g}{flags} -o extended", "```", "",
    ]  # fmt: skip


def measured(name: str) -> list[str]:
    """Its rows of the comparisons beside the baseline's, where it was measured."""
    lines, files = [], []
    for file, what in MEASURED.items():
        summary = json.loads((ROOT / file).read_text(encoding="utf-8"))
        figures = summary.get("figures", {})
        if name not in figures:
            continue
        files.append(file)
        length, band = list(figures[name]["retrieval"]["passkey"])[-1], list(figures[name]["perplexity"])[-1]
        for row in ("none", name):
            figure = figures[row]
            found = Interval(**figure["retrieval"]["passkey"][length]).percent().partition(" n=")[0]
            loss = (figure["gate"] or {}).get("loss")
            cost = "" if row == "none" or not loss else f"{loss['value']:+.3f}"
            label = "baseline" if row == "none" else f"`{name}`"
            lines.append(f"| {what} | {label} | {found} | {figure['perplexity'][band]:.1f} | {cost} |")
    if not lines:
        return ["## Measured", "", "Not among the committed comparisons.", ""]
    sources = ", ".join(f"[{Path(file).name}](../{file.removeprefix('docs/')})" for file in files)
    return [
        "## Measured", "",
        "| model | method | passkeys at the target | perplexity at the target | regression (nats) |",
        "|---|---|---|---|---|", *lines, "",
        "95% intervals in brackets; the regression is the loss increase within the trained length, up to 4,096 "
        f"tokens. From {sources}.",
        "",
    ]  # fmt: skip


def bibtex(paper: Paper) -> str:
    """The entry of papers.bib with its URL."""
    entries = (FOLDER / "papers.bib").read_text(encoding="utf-8").strip().split("\n\n")
    (entry,) = [entry for entry in entries if f"{{{paper.url}}}" in entry]
    return entry


def card(cls: type[ContextMethod]) -> str:
    text, _ = described(cls)
    aliases = ", ".join(f"`{alias}`" for alias in cls.aliases)
    paper = cls.paper
    facts = [
        f"- **When**: {WHEN[cls.name]}",
        f"- **Training**: {cls.training}.",
        f"- **For**: {ENCODINGS[cls.encoding]}.",
        f"- **Saved as**: {saved_as(cls)}.",
        *([f"- **Also called**: {aliases}."] if aliases else []),
    ]
    picture = []
    if example(cls) is not None:
        words = f"`{cls.name}` ×{shown_factor(cls):g} on 128 dimensions, θ 10,000, trained at 4,096 tokens"
        picture = [f"![{words}]({cls.name}.svg)", "", f"*{words}.*", ""]
    citation = [
        "## Citation", "", f"[{paper.title}]({paper.url}), {paper.year}.", "", "```bibtex", bibtex(paper), "```", "",
    ]  # fmt: skip
    parts = [f"# {cls.name}", "", text, "", *facts, "", *picture, *options(cls), *call(cls), *measured(cls.name)]
    return "\n".join([*parts, *citation, "Written by `python docs/methods.py` from the registry.", ""])


def index() -> str:
    """The page that lists every method."""
    rows = re.sub(r"^\| `(\w+)`", r"| [`\1`](\1.md)", method_table(), flags=re.M)
    return "\n".join([
        "# Methods", "",
        "| you want | take |", "|---|---|",
        "| to serve a longer context today | the vendor's recipe ([what is known](../checkpoints.md)), or "
        "[`yarn`](yarn.md) |",
        "| no regression on short prompts | [`dynamic_yarn`](dynamic_yarn.md) or [`self_extend`](self_extend.md), in "
        "transformers; `dynamic_yarn` can be frozen at one length for other engines |",
        "| less of it, in every engine | λ fitted to the model: [`ctxext fit`](../fit/README.md) |",
        "| a fine-tune, with a GPU | [`yarn`](yarn.md) and a [fine-tune](../trainers.md) |",
        "| a model that is scaled already | [`existing=`](../checkpoints.md) |",
        "| no training, and serve with transformers | [`dynamic_yarn`](dynamic_yarn.md) or "
        "[`self_extend`](self_extend.md) ([in-attention RoPE](../in_attention.md)) |", "",
        "What each does to a model's frequencies, at your own lengths: the [calculator](../calculator/index.html).", "",
        rows, "", "To cite them: [papers.bib](papers.bib).", "",
        "Written by `python docs/methods.py` from the registry.", "",
    ])  # fmt: skip


def pages() -> dict[str, str]:
    """Every page by its name."""
    return {"README.md": index(), **{f"{cls.name}.md": card(cls) for cls in list_methods()}}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    for cls in list_methods():
        shown = example(cls)
        if shown is not None:
            draw(shown, FOLDER / f"{cls.name}.svg")
    print(f"{len(list_methods())} methods in {FOLDER}")
