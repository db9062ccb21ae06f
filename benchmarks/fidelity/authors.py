"""Golden numbers from the authors' own code: `python benchmarks/fidelity/authors.py NAME [CHECKOUT]`.

CHECKOUT is a clone of the repository in `SOURCES[NAME]` at its commit (the script checks that). Its files are
imported unmodified, run over `GEOMETRIES`, and what they return goes into `docs/fidelity/authors.json` with the
repository, commit, file and command; their code does not. Every number is as their code computes it, in float32.
If the file has the same numbers already, it is left as it is.

`resonance` and `posgen` need einops; `longppl` needs nothing beyond transformers.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import json
import math
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ctxext.utils.machine import versions

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "docs/fidelity/authors.json"

Case = dict[str, Any]

# (rotary dimensions, rope_theta, trained length), and a model with them; the last are at the edges of the formulas.
GEOMETRIES: dict[str, tuple[int, float, int]] = {
    "Llama 2": (128, 1e4, 4096),
    "Llama 3": (128, 5e5, 8192),
    "Qwen 3": (128, 1e6, 32768),
    "Gemma": (256, 1e4, 8192),
    "Phi-3": (96, 1e4, 4096),
    "SmolLM2": (64, 1e5, 8192),
    "the bundled model": (64, 1250.0, 512),
    "GPT-NeoX": (24, 1e4, 2048),
    "PosGen": (64, 1e4, 65),
    "theta 100": (32, 1e2, 777),
}
FACTORS = (1.0, 1.5, 4.0, 32.0)
# Every pair makes more than 32 turns, so that YaRN's ramp ends before it begins. No known model is like that.
CROSSED = {"model": "crossed", "dim": 16, "theta": 10.0, "length": 32768, "factor": 4.0}


@dataclass(frozen=True)
class Source:
    """Where a function's numbers come from: a repository of github.com, its commit, and the file in it."""

    repository: str
    commit: str
    file: str
    run: Callable[[Path], Iterator[Case]]

    @property
    def folder(self) -> str:
        """Where `git clone` puts it."""
        return self.repository.partition("/")[2]

    def __str__(self) -> str:
        return f"{self.repository}@{self.commit[:7]}"


def grid() -> Iterator[tuple[Case, int, float, int, float]]:
    for model, (dim, theta, length) in GEOMETRIES.items():
        for factor in FACTORS:
            case = {"model": model, "dim": dim, "theta": theta, "length": length, "factor": factor}
            yield case, dim, theta, length, factor


def load(path: Path) -> ModuleType:
    """The module in a file, without the package around it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def numbers(values: Tensor) -> list[float]:
    """Eight digits, of the seven that float32 has."""
    return [float(f"{value:.8g}") for value in values.tolist()]


def yarn(file: Path) -> Iterator[Case]:
    embedding = load(file).LlamaYaRNScaledRotaryEmbedding
    crossed = (CROSSED, *(CROSSED[key] for key in ("dim", "theta", "length", "factor")))
    for case, dim, theta, length, factor in (*grid(), crossed):
        # max_position_embeddings is the length of a table that is not looked at.
        made = embedding(
            dim, max_position_embeddings=1, base=theta, scale=factor, original_max_position_embeddings=length
        )
        yield {**case, "attention_factor": made.mscale, "inv_freq": numbers(made.inv_freq)}


def ntk(file: Path) -> Iterator[Case]:
    embedding = load(file).LlamaNTKScaledRotaryEmbedding
    for case, dim, theta, _, factor in grid():
        made = embedding(dim, max_position_embeddings=1, base=theta, alpha=factor)
        yield {**case, "inv_freq": numbers(made.inv_freq)}


def dynamic_yarn(file: Path) -> Iterator[Case]:
    """The factor of a case is that of a call of factor × length tokens."""
    embedding = load(file).LlamaDynamicYaRNScaledRotaryEmbedding
    for case, dim, theta, length, factor in grid():
        if (factor * length).is_integer():
            made = embedding(dim, max_position_embeddings=1, base=theta, original_max_position_embeddings=length)
            made(torch.zeros(1), seq_len=int(factor * length))
            yield {**case, "attention_factor": made.mscale, "inv_freq": numbers(made.inv_freq)}


def longrope(file: Path) -> Iterator[Case]:
    """With λ drawn at random: what is checked is how they are applied, and the attention factor."""
    embedding = load(file).LongRoPEScaledRotaryEmbedding
    draw = torch.Generator().manual_seed(0)
    for case, dim, theta, length, factor in grid():
        rescale = numbers(1 + (factor - 1) * torch.rand(dim // 2, generator=draw))
        made = embedding(
            dim,
            rescale,
            max_position_embeddings=factor * length,
            original_max_position_embeddings=length,
            base=theta,
        )
        inv_freq = made._calc_inv_freq(None, "cpu")
        yield {**case, "rescale": rescale, "attention_factor": made.mscale, "inv_freq": numbers(inv_freq)}


def resonance(file: Path) -> Iterator[Case]:
    embedding = load(file).LlamaYaRNScaledResonanceRotaryEmbedding
    for case, dim, theta, length, factor in grid():
        made = embedding(
            dim, max_position_embeddings=1, base=theta, scale=factor, original_max_position_embeddings=length
        )
        yield {**case, "attention_factor": made.mscale, "inv_freq": numbers(made.r_inv_freq)}


def posgen(file: Path) -> Iterator[Case]:
    """The four encodings of the PosGen experiment, built as its decoder builds them for 64 and 256 tokens."""
    for package in ("src", "src.models", "src.models.components", "src.models.components.positional_embedding"):
        # Packages without their __init__, which imports the whole training code.
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [str(file.parents[4] / package.replace(".", "/"))]
    plain = importlib.import_module(f"{package}.rotary_scaled")
    rounded = importlib.import_module(f"{package}.rotary_resonance")
    dim, theta, trained, target = 64, 1e4, 65, 257
    scaled = {"base": theta, "max_position_embeddings": target, "scaling_factor": target / trained, "beta_fast": 2}
    embeddings = {
        "rope": plain.RotaryEmbedding(dim, max_position_embeddings=trained, base=theta),
        "resonance": rounded.ResonanceRotaryEmbedding(dim, max_position_embeddings=trained, base=theta),
        "yarn": plain.YaRNScaledRotaryEmbedding(dim, **scaled),
        "resonance_yarn": rounded.ResonanceYaRNScaledRotaryEmbedding(dim, **scaled),
    }
    for name, made in embeddings.items():
        inv_freq = made.r_inv_freq if name.startswith("resonance") else made.inv_freq
        case = {"encoding": name, "dim": dim, "theta": theta, "length": trained, "factor": target / trained}
        yield {**case, "attention_factor": getattr(made, "mscale", 1.0), "inv_freq": numbers(inv_freq)}


def posgen_sequences(file: Path) -> Iterator[Case]:
    """Sequences of the three subtasks from a few beginnings, by the classes that write their data."""

    namespace = {"Dataset": object, "List": list, "PreTrainedTokenizerFast": None}
    base = one_class(file, "SequenceDataset", **namespace)
    for subtask, name in (("recursive", "recurrent"), ("cot", "cot"), ("semi_recursive", "semi_recurrent")):
        class_name = "".join(part.capitalize() for part in name.split("_")) + "SequenceDataset"
        made = one_class(file.with_name(f"{name}_sequence.py"), class_name, SequenceDataset=base)
        # Their constructor makes files.
        rule = made.__new__(made)
        vars(rule).update(near_count=3, far_count=1, total_dependency_count=4, modular=17, arith_task="mod_addition")
        for begin in ([0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 5], [0, 1, 2, 6]):
            yield {"subtask": subtask, "numbers": rule._extend_sequence(list(begin), 256)}


def one_class(file: Path, name: str, **namespace: Any) -> Any:
    """The class `name` of a file that itself needs an older transformers, executed as it is in `namespace`."""
    tree = ast.parse(file.read_text())
    body: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    exec(compile(ast.Module(body, type_ignores=[]), str(file), "exec"), namespace)
    return namespace[name]


def cope(file: Path) -> Iterator[Case]:
    """Their rotary embedding asks transformers for RoPE's frequencies; here it gets those of theta in float32."""

    def default(config: Any, device: Any) -> tuple[Tensor, float]:
        return 1.0 / (config.theta ** (torch.arange(0, config.dim, 2).float() / config.dim)), 1.0

    # The annotation of the constructor is evaluated.
    namespace = {"ROPE_INIT_FUNCTIONS": {"default": default}, "LlamaConfig": object}
    embedding = one_class(file, "LlamaRotaryEmbedding", nn=nn, torch=torch, **namespace)
    for model, (dim, theta, length) in GEOMETRIES.items():
        for hard in (False, True):
            config = SimpleNamespace(
                theta=theta, dim=dim, max_position_embeddings=length, use_cope=not hard, use_hardclip=hard
            )
            made = embedding(config)
            case = {"model": model, "dim": dim, "theta": theta, "length": length, "clipped": made.clip_low_n}
            yield {**case, "hard": hard, "inv_freq": numbers(made.inv_freq)}


def chunkllama(file: Path) -> Iterator[Case]:
    """The distance between every query and key, and those of a decoding step, read off their attention's logits.

    Queries and keys are projected to constants, so that a logit is the cosine of distance × frequency. Their flash
    attention is replaced by a recorder of logits; the frequency is so low that the cosine gives the distance back.
    """
    from transformers.models.llama import modeling_llama

    seen: list[Tensor] = []

    def record(query: Tensor, key: Tensor, value: Tensor, causal: bool, return_attn_probs: bool) -> tuple[Any, ...]:
        logits = torch.einsum("bqhd,bkhd->bqk", query.double(), key.double())[0]
        if causal:
            logits = logits.masked_fill(torch.ones_like(logits).triu(1).bool(), math.nan)
        seen.append(logits)
        return torch.zeros_like(query), torch.zeros(1, 1, query.shape[1]), None

    flash = ModuleType("flash_attn.flash_attn_interface")
    flash.flash_attn_func, flash.flash_attn_qkvpacked_func = record, None  # type: ignore[attr-defined]
    sys.modules |= {"flash_attn": ModuleType("flash_attn"), flash.__name__: flash}
    # They patch transformers' classes, one of which transformers 5 has no more.
    modeling_llama.LlamaFlashAttention2 = type("LlamaFlashAttention2", (), {})  # type: ignore[attr-defined]
    module = load(file)
    for trained, local, tokens in ((32, None, 96), (64, None, 150), (64, 16, 150), (33, None, 60), (64, 24, 100)):
        module.replace_with_chunkllama(trained, local)
        base = 1e4  # of two pairs: the second turns by 0.01 a token
        rotary = module.ChunkLlamaRotaryEmbedding(4, max_position_embeddings=trained, base=base)
        query, key = torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 0.0, 0.0])
        attention = SimpleNamespace(
            q_proj=lambda x, q=query: q.expand(1, x.shape[1], 4).clone(),
            k_proj=lambda x, k=key: k.expand(1, x.shape[1], 4).clone(),
            v_proj=lambda x: torch.zeros(1, x.shape[1], 4),
            o_proj=lambda x: x,
            num_heads=1,
            num_key_value_heads=1,
            num_key_value_groups=1,
            head_dim=4,
            hidden_size=4,
            rotary_emb=rotary,
        )
        seen.clear()
        module.forward(attention, torch.zeros(1, tokens, 4), position_ids=torch.arange(tokens)[None])
        step = module.chunk_size - module.local_window
        distances = torch.full((tokens, tokens), -1, dtype=torch.long)
        scale = float(seen[0][0, 0])  # of distance 0: the square of their attention factor
        logits = iter(seen)
        for begin in range(0, tokens, step):
            spans = [(begin, min(begin + step, tokens))]
            spans += [(begin - step, begin)] if begin else []
            spans += [(0, begin - step)] if begin > step else []
            for first, last in spans:
                angles = (next(logits) / scale).clamp(-1, 1).acos() / 0.01
                assert angles.nan_to_num().sub(angles.nan_to_num().round()).abs().max() < 0.2, "an unclear distance"
                block = angles.round().nan_to_num(-1).long()
                distances[begin : begin + len(block), first:last] = block
        assert next(logits, None) is None
        assert (distances.tril().ge(0) | distances.triu(1).bool()).all()
        rows = [row[: k + 1].tolist() for k, row in enumerate(distances)]
        yield {
            "length": trained,
            "chunk_size": module.chunk_size,
            "local_window": module.local_window,
            "attention_factor": math.sqrt(scale),
            "distances": rows,
            "decoded": decoded(module, trained, tokens),
        }


def decoded(module: ModuleType, trained: int, tokens: int) -> list[int]:
    """The distances from the last of `tokens` tokens by ChunkLlama's decoding step, which uses no flash attention.

    Values are one-hot, so that the output is the attention to each key; logits are 16 cos(distance / 20).
    """
    dim, frequency, largest = 256, 0.05, 16.0
    rotary = module.ChunkLlamaRotaryEmbedding(
        # So long that no attention factor is applied; the last pair turns by `frequency`.
        dim,
        max_position_embeddings=16 * trained,
        base=frequency ** (-dim / (dim - 2)),
    )
    unit = torch.nn.functional.one_hot(torch.tensor(dim // 2 - 1), dim).float()

    class Cache:
        keys = values = torch.zeros(1, 1, 0, dim)

        def get_usable_length(self, new: int, layer: int) -> int:
            return self.keys.shape[2]

        def update(self, keys: Tensor, values: Tensor, layer: int, cache_kwargs: Any) -> tuple[Tensor, Tensor]:
            self.keys, self.values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
            return self.keys, self.values

    cache = Cache()

    def values(x: Tensor) -> Tensor:
        seen = cache.keys.shape[2]
        return torch.eye(dim)[None, seen : seen + x.shape[1]]

    attention = SimpleNamespace(
        q_proj=lambda x: (unit * largest * math.sqrt(dim)).expand(1, x.shape[1], dim).clone(),
        k_proj=lambda x: unit.expand(1, x.shape[1], dim).clone(),
        v_proj=values,
        o_proj=lambda x: x,
        num_heads=1,
        num_key_value_heads=1,
        num_key_value_groups=1,
        head_dim=dim,
        hidden_size=dim,
        layer_idx=0,
        rotary_emb=rotary,
    )
    for first, last in ((0, tokens - 1), (tokens - 1, tokens)):
        output, _, _ = module.forward(
            attention,
            torch.zeros(1, last - first, dim),
            position_ids=torch.arange(first, last)[None],
            past_key_value=cache,
        )
    logits = output[0, -1, :tokens].double().log()
    cosines = 1 + (logits - logits[-1]) / largest  # the last key is the query's own, at distance 0
    distances = cosines.clamp(-1, 1).acos() / frequency
    assert (distances - distances.round()).abs().max() < 0.2, "an unclear distance"
    return [int(distance) for distance in distances.round().tolist()]


def longppl(file: Path) -> Iterator[Case]:
    """Key tokens of the texts of key_tokens.py by their function, as intervals of characters."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from fidelity.key_tokens import LENGTHS, SHORT, model_and_tokenizer, texts

    find = load(file).find_key_token
    for bos, ends in ((False, "whole blocks"), (False, "a short last block"), (True, "whole blocks")):
        model, tokenizer = model_and_tokenizer(bos)
        for text in texts(tokenizer, LENGTHS[ends]):
            found = find(text, model, tokenizer, trunc_len=SHORT // 2, sliding_window=SHORT // 2)
            yield {"bos": bos, "ends": ends, "intervals": found.tolist()}


YARN = ("jquesnelle/yarn", "995db5b575e75230b3384d658f8b944c9662f775")
RESONANCE = ("sheryc/resonance_rope", "4a7f5a703b2e96756939db51916937ab7c5ab3a9")
SOURCES = {
    "yarn": Source(*YARN, "scaled_rope/LlamaYaRNScaledRotaryEmbedding.py", yarn),
    "ntk": Source(*YARN, "scaled_rope/LlamaNTKScaledRotaryEmbedding.py", ntk),
    "dynamic_yarn": Source(*YARN, "scaled_rope/LlamaDynamicYaRNScaledRotaryEmbedding.py", dynamic_yarn),
    "longrope": Source("microsoft/LongRoPE", "c9e56aa54007c328399677232a489feec446e4b8", "rope/longrope.py", longrope),
    "resonance": Source(
        *RESONANCE, "llama_finetuning/scaled_rope/LlamaYaRNScaledResonanceRotaryEmbedding.py", resonance
    ),
    "posgen": Source(*RESONANCE, "src/models/components/positional_embedding/rotary_resonance.py", posgen),
    "posgen_sequences": Source(*RESONANCE, "src/data/components/base_sequence_dataset.py", posgen_sequences),
    "dca": Source(
        "HKUNLP/ChunkLlama", "2add4d7c99d24dcc1ab03414cc602abb2e28cf2c", "chunkllama_attn_replace.py", chunkllama
    ),
    "cope": Source("hrlics/CoPE", "ed52ba5e2d80aaea7577144109c572e93e84e537", "modeling_cope.py", cope),
    "longppl": Source("PKU-ML/LongPPL", "1decd2a70d9ee78488adea49c088f8bc472f4938", "longppl/longppl.py", longppl),
}


def check_out(source: Source, checkout: str) -> None:
    """Raise SystemExit with the commands to run unless `checkout` is an unchanged clone at the commit."""

    def git(*command: str) -> str:
        done = subprocess.run(["git", "-C", checkout, *command], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    where, short = Path(checkout), source.commit[:7]
    # A folder within another repository has a commit, too.
    if not where.is_dir() or git("rev-parse", "--show-toplevel") != str(where.resolve()):
        clone = f"git clone https://github.com/{source.repository} {checkout}".removesuffix(f" {source.folder}")
        shown = checkout if where.is_absolute() else f"./{checkout}"
        raise SystemExit(f"error: no clone in {shown}: {clone} && git -C {checkout} checkout {short}")
    head, changed = git("rev-parse", "HEAD"), git("diff", "HEAD", "--diff-filter=M", "--name-only").split()
    if head != source.commit:
        raise SystemExit(
            f"error: {checkout} is at {head[:7]}, expected {short}: git -C {checkout} fetch && "
            f"git -C {checkout} checkout {short}"
        )
    if changed:
        raise SystemExit(f"error: {checkout} has changed files ({', '.join(changed)}): git -C {checkout} stash")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Run the authors' code and keep its numbers in docs/fidelity/authors.json.",
        epilog="; ".join(f"{name}: {source}" for name, source in SOURCES.items()),
    )
    parser.add_argument("name", choices=SOURCES, help="what to compute; the repository of each is below")
    parser.add_argument("checkout", nargs="?", help="a clone of the repository (default: its name, here)")
    options = parser.parse_args(arguments)
    name, source = options.name, SOURCES[options.name]
    checkout = options.checkout or source.folder
    check_out(source, checkout)
    try:
        cases = json.loads(json.dumps(list(source.run(Path(checkout) / source.file))))
    except ModuleNotFoundError as error:
        raise SystemExit(f"error: {source.repository} needs {error.name}: pip install {error.name}") from None
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.is_file() else {}
    before = golden.get(name, {})
    made = {
        "repository": f"https://github.com/{source.repository}",
        "commit": source.commit,
        "file": source.file,
        "command": f"python benchmarks/fidelity/authors.py {name} {source.folder}",
        "versions": {**versions(), "python": platform.python_version()},
        "cases": cases,
    }
    where = GOLDEN.relative_to(ROOT) if GOLDEN.is_relative_to(ROOT) else GOLDEN
    print(f"{name}: {len(cases)} cases by {source.file} of {source}.")
    if {**before, "versions": None} == {**made, "versions": None}:
        print(f"All are equal to those in {where}.")
    else:
        old = before.get("cases", [])
        differ = len(cases) - sum(map(dict.__eq__, cases, old))
        print(f"{differ} differ from those in {where}, which now has the new ones." if old else f"Added to {where}.")
        write({**golden, name: made})
    print("To compare ctxext with them: python benchmarks/fidelity/run.py")


def write(golden: dict[str, Any]) -> None:
    """One case a line."""
    parts = []
    for key in sorted(golden):
        record = dict(golden[key])
        cases = ",\n".join(f"  {json.dumps(case, separators=(',', ':'))}" for case in record.pop("cases"))
        parts.append(f' "{key}": {json.dumps(record)[:-1]}, "cases": [\n{cases}]}}')
    GOLDEN.parent.mkdir(parents=True, exist_ok=True)
    GOLDEN.write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    main()
