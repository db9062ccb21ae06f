"""Write the tables of docs/planning.md, and docs/planning.json: measured where it was measured, modelled where not.

python docs/planning.py

Measured: docs/at_scale/planning-*.json (`python benchmarks/at_scale/run.py --only planning`) and the stock model of
docs/benchmarks/attention-amx-float32.json. Nothing is measured here.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import astuple, dataclass
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

from transformers import LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from at_scale.estimate import PEAK, SHARES
from at_scale.planning import LENGTHS, SHAPES

from ctxext.evals.statistics import in_percent
from ctxext.extension.describe import kv_cache_bytes
from ctxext.training.memory import CARDS, ROOM, Memory, memory_of
from ctxext.training.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
PAGE, RECORD = ROOT / "docs/planning.md", ROOT / "docs/planning.json"
MODELS = {"0.1B": "SmolLM2-135M", "1B": "Llama-3.2-1B", "8B": "Llama-3.1-8B", "70B": "Llama-3.1-70B"}


@dataclass(frozen=True)
class Device:
    """What a pass is limited by, as reached: operations a second in prefill, bytes a second in decoding.

    Attributes:
        room: bytes for weights and cache; None if it is not asked.
    """

    name: str
    operations: float
    bandwidth: float
    room: float | None = None


# NVIDIA's bandwidth, and the share of it and of the dense bf16 peak that is assumed to be reached; narrow models reach
# down to the second share of the peak.
BANDWIDTH, (REACHED, NARROW_REACHED), READ = 3.35e12, SHARES, 0.6
NARROW = ("0.1B",)
H100 = Device("H100 SXM, 80 GB", REACHED * PEAK, READ * BANDWIDTH, room=0.9 * 80e9)


# Of the worked example; their fields are those of its config.json.
EXAMPLE = "Qwen/Qwen2.5-7B-Instruct"
QWEN = {
    "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 152_064, "tie_word_embeddings": False,
}  # fmt: skip
QWEN_14B = {
    **QWEN, "hidden_size": 5120, "intermediate_size": 13_824, "num_hidden_layers": 48, "num_attention_heads": 40,
    "num_key_value_heads": 8,
}  # fmt: skip
# Bytes that Qwen's model card asks for at 1M tokens.
ASKED = {"7B": (QWEN, 120e9), "14B": (QWEN_14B, 320e9)}


def config_of(shape: str) -> LlamaConfig:
    return LlamaConfig(**SHAPES[shape])


def layer_weights(config: Any) -> int:
    """Weights that every token passes, without embeddings and head."""
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    attention = config.hidden_size * config.head_dim * heads
    return config.num_hidden_layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def parameters(config: Any) -> int:
    embeddings = config.vocab_size * config.hidden_size
    return layer_weights(config) + embeddings * (1 if config.tie_word_embeddings else 2)


def prefill_operations(config: Any, n_tokens: int) -> float:
    """Two a weight and token; four a pair of a query and a key that it sees, and channel."""
    channels = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return 2.0 * layer_weights(config) * n_tokens + 2.0 * channels * n_tokens**2


def decode_bytes(config: Any, n_tokens: int, bytes_each: int = 2) -> float:
    """Read for one token: every weight, of the embeddings the head's alone, and the whole cache."""
    weights = layer_weights(config) + config.vocab_size * config.hidden_size
    return bytes_each * weights + kv_cache_bytes(config, n_tokens, bytes_each)


def weights_and_cache(config: Any, length: int, bytes_each: int = 2) -> int:
    """Bytes of the weights, two each, and of the cache."""
    return 2 * parameters(config) + kv_cache_bytes(config, length, bytes_each)


def gpus_needed(config: Any, length: int, bytes_each: int, device: Device = H100) -> tuple[int, int | None]:
    """The least number that holds weights in 2 bytes and the cache, and the next that divides the KV heads.

    None if no divisor is large enough: KV heads would have to be copied.
    """
    if device.room is None:
        return 1, 1
    least = math.ceil(weights_and_cache(config, length, bytes_each) / device.room)
    heads = config.num_key_value_heads
    return least, next((n for n in range(least, heads + 1) if heads % n == 0), None)


def modelled(shape: str, length: int, device: Device = H100) -> dict[str, Any]:
    config = config_of(shape)
    return {
        "kv_bytes": kv_cache_bytes(config, length, 2),
        "weight_bytes": 2 * parameters(config),
        "gpus": gpus_needed(config, length, 2, device),
        "gpus_8_bit_cache": gpus_needed(config, length, 1, device),
        "prefill_seconds": prefill_operations(config, length) / device.operations,
        "decode_seconds": decode_bytes(config, length) / device.bandwidth,
    }


# ------------------------------------------------------------------------------------ the model against measurements


def points() -> list[dict[str, Any]]:
    """Every measured point: source, device, config, length and what was measured."""
    found = []
    for path in sorted((ROOT / "docs/at_scale").glob("planning-*.json")):
        record = json.loads(path.read_text())
        for point in record["measured"]:
            if point["fits"]:
                where = ", ".join([record["device"], *(each.split(", ")[1] for each in record["machine"])])
                found.append({**point, "source": str(path.relative_to(ROOT)), "device": where})
    path = ROOT / "docs/benchmarks/attention-amx-float32.json"
    record = json.loads(path.read_text())
    values = {name: figure["value"] for name, figure in record["figures"].items()}
    common = {"shape": "0.1B", "layers": 6, "bytes_each": 4, "source": str(path.relative_to(ROOT))}
    common["device"] = f"{record['device']}, {record['machine'].split(', ')[1]}"
    for length in record["lengths"]:
        what = f"decode, {length} cached, batch 1"
        found.append({
            **common, "length": length, "decode_seconds": values[f"{what}: ms a step, stock"] / 1000,
            "kv_bytes": values[f"{what}: KV memory, stock (MB)"] * 1e6,
        })  # fmt: skip
    return found


def compared(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each point beside the model, with the rate that the median of the other points of its device and source reached.

    So the errors are those of the model's form, in length and size; the share of its peak that a device reaches is not
    tested by them.
    """
    rows: list[dict[str, Any]] = []
    for point in found:
        config = config_of(point["shape"])
        config.num_hidden_layers = point.get("layers", config.num_hidden_layers)
        length, each = point["length"], point["bytes_each"]
        work = {
            "kv_bytes": kv_cache_bytes(config, length, each),
            "prefill_seconds": prefill_operations(config, length),
            "decode_seconds": decode_bytes(config, length, each),
        }
        common = {key: point[key] for key in ("shape", "length", "source", "device")}
        if "layers" in point:
            common["shape"] += f" with {point['layers']} layers"
        rows += [
            {**common, "what": what, "measured": point[what], "work": work[what]} for what in work if what in point
        ]
    for row in rows:
        alike = [
            other
            for other in rows
            if other is not row and all(other[key] == row[key] for key in ("source", "device", "what"))
        ]
        rate = median(other["work"] / other["measured"] for other in alike) if alike else None
        row["modelled"] = row["work"] if row["what"] == "kv_bytes" else rate and row["work"] / rate
        row["error"] = row["modelled"] and row["modelled"] / row["measured"] - 1
    return rows


# Published prefills of 1M tokens on H100s: the shape, seconds, GPUs and the source.
PREFILLS: dict[str, tuple[dict[str, int], float, int, str]] = {
    "Llama-3.1-405B": (
        dict(hidden_size=16_384, intermediate_size=53_248, num_hidden_layers=126, num_attention_heads=128,
             num_key_value_heads=8, vocab_size=128_256),
        77, 128, "https://arxiv.org/abs/2411.01783",
    ),
    "Qwen2-72B": (
        dict(hidden_size=8192, intermediate_size=29_568, num_hidden_layers=80, num_attention_heads=64,
             num_key_value_heads=8, vocab_size=152_064),
        600, 8, "https://github.com/vllm-project/vllm/pull/6139",
    ),
}  # fmt: skip


def published() -> dict[str, dict[str, Any]]:
    """The share of the peak that each of these reached."""
    return {
        name: {
            "source": source,
            "seconds": seconds,
            "gpus": gpus,
            "share_of_peak": prefill_operations(LlamaConfig(**shape), 10**6) / gpus / seconds / PEAK,
        }
        for name, (shape, seconds, gpus, source) in PREFILLS.items()
    }


# ----------------------------------------------------------------------------------------------------------- training

# LoRA of rank 16 on attention in bfloat16, recomputed, with the chunked loss and tiles of 4,096 tokens in the MLP.
TRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    "8B, one GPU": ("8B", {}),
    "8B, one GPU, layer inputs offloaded": ("8B", {"training": {"gradient_checkpointing": "offload"}}),
    "8B, one GPU, four bits, offloaded": (
        "8B", {"training": {"gradient_checkpointing": "offload"}, "trainable": {"quantization": "nf4"}},
    ),
    "70B, one GPU, four bits, offloaded": (
        "70B", {"training": {"gradient_checkpointing": "offload"}, "trainable": {"quantization": "nf4"}},
    ),
    "70B, 8 GPUs, context parallel": (
        "70B", {"engine": {"kind": "context_parallel", "processes": 8, "context_parallel_size": 8}},
    ),
}  # fmt: skip
PLANNED = dict(sorted({**LENGTHS, "512k": 2**19}.items(), key=itemgetter(1)))
LENGTHS_COUNTED = 2**15, 2**16  # from which memory is linear in the length
DEPTHS = 2, 4  # of the models that are counted: every layer adds the same


def training_memory(shape: str, changes: dict[str, Any], length: int) -> Memory:
    training = {"steps": 1, "mlp_tokens": 4096, **changes.get("training", {})}
    settings = Settings.model_validate({
        "measured_on": "not measured", "model": shape, "output": "none",
        "data": {"sources": [{"path": "none"}], "documents": "joined"}, **changes, "training": training,
    })  # fmt: skip
    few, more = (
        memory_of(LlamaConfig(**{**SHAPES[shape], "num_hidden_layers": depth}), settings, length) for depth in DEPTHS
    )
    left = (config_of(shape).num_hidden_layers - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])
    return Memory(*(round(a + left * (b - a)) for a, b in zip(astuple(few), astuple(more))))


def longest_trained() -> dict[str, dict[int, int]]:
    """The longest row that fits each card, in tokens, by what is trained; 0 if less than 1,024."""
    found = {}
    for name, (shape, changes) in TRAINED.items():
        short, long = (training_memory(shape, changes, length).peak for length in LENGTHS_COUNTED)
        each = (long - short) / (LENGTHS_COUNTED[1] - LENGTHS_COUNTED[0])
        found[name] = {
            card: max(0, int(LENGTHS_COUNTED[0] + (ROOM * card * 1e9 - short) / each) // 1024 * 1024) for card in CARDS
        }
    return found


def training_table(found: dict[str, dict[int, int]]) -> str:
    lines = [
        f"| LoRA of | {' | '.join(f'{card} GB' for card in CARDS)} |",
        "|---" * (len(CARDS) + 1) + "|",
        *(
            f"| {name} | {' | '.join(f'*≈ {length // 1024:,}k*' if length else '–' for length in by_card.values())} |"
            for name, by_card in found.items()
        ),
        "",
        f"Longest sequence that fits in {in_percent(ROOM)}% of each card, in tokens (1k = 1,024), modelled and not "
        "measured on a GPU: rank 16 on attention, bfloat16, `gradient_checkpointing: recompute` or `offload`, `loss: "
        "chunked` and `mlp_tokens: 4096`. Extrapolated from 32k and 64k tokens.",
    ]
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------- the page


def size(n_bytes: float) -> str:
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.0f} MiB"


def duration(seconds: float) -> str:
    for least, unit, scale in ((3600, "h", 3600), (90, "min", 60), (1, "s", 1)):
        if seconds >= least:
            return f"{seconds / scale:.1f} {unit}"
    return f"{1000 * seconds:.1f} ms"


def in_range(seconds: float) -> str:
    """A prefill of a narrow model, at the shares of the peak that it may reach."""
    return f"{duration(seconds)} to {duration(seconds * REACHED / NARROW_REACHED)}"


def cell(measured: float | None, model: float, say: Any) -> str:
    """Measured as it is; modelled in italics with ≈."""
    return f"*≈ {say(model)}*" if measured is None else say(measured)


def gpus(needed: tuple[int, int | None]) -> str:
    """The least number, and in brackets the one for tensor parallelism if it is another."""
    least, parallel = needed
    return f"{least}" if least == parallel else f"{least} ({parallel or 'none'})"


def planning_rows(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for shape in SHAPES:
        for name, length in PLANNED.items():
            of_gpu = [p for p in found if "H100" in p["device"] and (p["shape"], p["length"]) == (shape, length)]
            rows.append({
                "shape": shape, "length": length, "name": name, "modelled": modelled(shape, length),
                "measured": of_gpu[0] if of_gpu else {},
            })  # fmt: skip
    return rows


def blocks(
    rows: list[dict[str, Any]], tests: list[dict[str, Any]], paper: dict[str, Any], trained: dict[str, dict[int, int]]
) -> dict[str, str]:
    """The generated blocks of the page by name."""
    body = [
        f"| {row['shape']} ({MODELS[row['shape']]}) | {row['name']} | {size(row['modelled']['weight_bytes'])} | "
        + " | ".join(
            cell(row["measured"].get(what), row["modelled"][what], say)
            for what, say in (
                ("kv_bytes", size),
                ("prefill_seconds", in_range if row["shape"] in NARROW and not row["measured"] else duration),
                ("decode_seconds", duration),
            )
        )
        + f" | {gpus(row['modelled']['gpus'])} | {gpus(row['modelled']['gpus_8_bit_cache'])} |"
        for row in rows
    ]
    head = "| model | tokens | weights | KV cache | prefill, one H100 | decode step, one H100 | "
    head += "80 GB GPUs needed | the same with an 8-bit KV cache |"
    on_gpu = sum(bool(row["measured"]) for row in rows)
    note = "Nothing was run on a GPU yet: every number with *≈*, in italics, is modelled."
    if on_gpu:
        note = f"{on_gpu} rows were measured on an H100 (plain numbers); those with *≈*, in italics, are modelled."
    longest = {row["shape"]: row["modelled"] for row in rows if row["name"] == "1M"}
    (least8, parallel8), (least70, parallel70) = longest["8B"]["gpus"], longest["70B"]["gpus"]
    return {
        "table": "\n".join([head, "|---" * 8 + "|", *body, "", note]),
        "example": example(),
        "checks": checks(tests),
        "training": training_table(trained),
        "published": "By the same count these reached "
        + " and ".join(f"{in_percent(each['share_of_peak'])}% ({name})" for name, each in paper.items())
        + " of the peak. At the lower share, the table's prefills take "
        + f"{REACHED / min(each['share_of_peak'] for each in paper.values()):.1f} times as long.",
        "asked": "By the count of this page, weights and cache take "
        + " and ".join(
            f"{needed / 1e9:.0f} GB (the {name}; Qwen asks for {asked / needed:.1f} times as much)"
            for name, (shape, asked) in ASKED.items()
            for needed in [weights_and_cache(LlamaConfig(**shape), LENGTHS["1M"])]
        )
        + ".",
        "short": f"In short, one sequence of 1M tokens needs {least8} GPUs of 80 GB for an 8B, {parallel8} in "
        f"practice, and {least70} for a 70B, {parallel70} in practice.",
    }


def example() -> str:
    """The sum for a model that is not in the table."""
    config = LlamaConfig(**QWEN)
    length, count, room = LENGTHS["1M"], parameters(config), H100.room or math.inf
    kv, weights = kv_cache_bytes(config, length, 2), 2 * count
    lines = [
        "```console",
        f"$ ctxext describe {EXAMPLE} --target-length 1M",
        "…",
        f"KV cache at {length:,}   {kv / 2**30:.2f} GiB per sequence in bfloat16",
        "```",
        "",
        f"Weights: {count / 1e9:.1f} billion parameters × 2 bytes = {size(weights)}. With the cache that is "
        f"{size(kv + weights)}, or {(kv + weights) / 1e9:.1f} GB. One GPU has room for {room / 1e9:.0f} GB: "
        f"{gpus_needed(config, length, 2)[0]} are needed. An 8-bit cache takes {size(kv / 2)}, with the weights "
        f"{(kv / 2 + weights) / 1e9:.1f} GB: {gpus_needed(config, length, 1)[0]} is enough.",
    ]
    return "\n".join(lines)


def checks(tests: list[dict[str, Any]]) -> str:
    """Every measured number beside the model."""
    names = {"kv_bytes": "KV cache", "prefill_seconds": "prefill", "decode_seconds": "decode step"}
    lines = ["| what | shape, tokens | measured | modelled | error | device | from |", "|---" * 7 + "|"]
    for test in tests:
        say = size if test["what"] == "kv_bytes" else duration
        if test["error"] is None:
            continue
        file = Path(test["source"]).relative_to("docs")
        lines.append(
            f"| {names[test['what']]} | {test['shape']}, {test['length']:,} | {say(test['measured'])} | "
            f"*≈ {say(test['modelled'])}* | {test['error']:+.1%} | {test['device']} | [{file.name}]({file}) |"
        )
    worst = [
        f"{name} {in_percent(max(errors), 1)}%"
        for what, name in names.items()
        if (errors := [abs(test["error"]) for test in tests if test["what"] == what and test["error"] is not None])
    ]
    return "\n".join([*lines, "", f"Largest errors: {', '.join(worst)}."])


def page(found: dict[str, str]) -> str:
    """The page with its generated blocks replaced."""
    text = PAGE.read_text(encoding="utf-8")
    for name, block in found.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        text = text[: text.index(begin)] + f"{begin}\n{block}\n{end}" + text[text.index(end) + len(end) :]
    return text


def main() -> None:
    found = points()
    rows, tests, paper, trained = planning_rows(found), compared(found), published(), longest_trained()
    RECORD.write_text(json.dumps({
        "assumed": {"peak": PEAK, "bandwidth": BANDWIDTH, "share of peak": REACHED, "share of bandwidth": READ,
                    "room": H100.room},
        "rows": rows, "tests": tests, "published": paper, "longest trained": trained,
    }, indent=1) + "\n")  # fmt: skip
    PAGE.write_text(page(blocks(rows, tests, paper, trained)))
    print(f"{PAGE.relative_to(ROOT)}: {len(rows)} rows, {len(tests)} measured numbers.")


if __name__ == "__main__":
    main()
