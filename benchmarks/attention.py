"""What in-attention RoPE costs: decoding, prefill, memory and compilation, beside stock transformers.

    python benchmarks/attention.py                          # about ten minutes on two cores
    python benchmarks/attention.py --dtype bfloat16         # of use where the CPU has units for it
    python benchmarks/attention.py --device cuda
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 python benchmarks/attention.py
    ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 python benchmarks/attention.py --dtype bfloat16
    python benchmarks/attention.py --trained 64 --lengths 128 512 --prefill 1024 --slots 256    # a look

The models have SmolLM2-135M's shape with 6 of its 30 layers and share the same random weights: where weights lie in
memory alone moves a decode step by 5%. Stock has transformers' own YaRN, with sdpa. On a CPU in float32 unless told
otherwise, on a GPU in bfloat16. The environment variables keep a CPU from its widest units, as if it had none.

- Decoding runs interleaved in random order, a step of every model behind as many cached tokens; the keys before are
  random numbers, put into the caches by their own `update`. Ratios are medians over the rounds; stock again over stock
  says how much of them is noise. The first step rotates all keys, and is a figure of its own.
- Prefill is timed interleaved as well; its memory is the growth in a process of its own that gives back what it frees.
- Compiled decoding runs over a static cache, against the same model not compiled.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
from report import WARM, Report, cpu_units, interleaved, options, over, seconds
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache, DynamicCache, LlamaConfig, StaticCache

from ctxext import extend_context
from ctxext.attention import keys
from ctxext.training.estimate import PeakMemory

STOCK, AGAIN = "stock", "stock again"
NTK, THEIR_DYNAMIC = "dynamic_ntk", "transformers' dynamic"
METHODS = (NTK, "self_extend", "dca", "rerope")
# Tokens of the shorter rows of a batch of four, as a share of the longest.
ROWS = (1.0, 0.875, 0.75, 0.625)
THETA = 100_000.0
# SmolLM2-135M's, with 6 of its 30 layers.
SHAPE: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
    "tie_word_embeddings": True,
}
# Without these glibc keeps what was freed, and the growth of one and the same prefill varies by a third. At 1 MiB it
# still keeps some 20 MB of the outputs of tiles, which vary by 10 MB.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
# By which a CPU with wider units computes as one without them.
LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
SHORT = 256  # tokens of the pass that is not counted

# At most, over stock.
DECODE_TIME, KV_MEMORY, PREFILL_TIME, PREFILL_MEMORY = 1.1, 1.05, 1.3, 1.1


def random_models(
    names: tuple[str, ...],
    trained: int,
    target: int,
    device: torch.device,
    dtype: torch.dtype | None = None,
    **shape: Any,
) -> dict[str, Any]:
    """Models that share their weights, each extended from `trained` to `target` tokens in the way of its name.

    Args:
        dtype: None for float32 on a CPU and bfloat16 on a GPU.
        shape: fields of the config, in place of those in SHAPE.
    """
    found: dict[str, Any] = {}
    for name in names:
        config = LlamaConfig(
            **{**SHAPE, **shape},
            max_position_embeddings=trained,
            attn_implementation="sdpa",
            rope_parameters=rope_parameters(name, trained, target),
            initializer_range=0.05,  # so that scores spread by more than 1, and positions matter
        )
        torch.manual_seed(0)
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype or usual(device)).eval()
        if found:
            model.load_state_dict(next(iter(found.values())).state_dict(), assign=True)
        if config.rope_parameters["rope_type"] == "default":
            extend_context(model, target_length=target, method=name)
        found[name] = model
    return found


def usual(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def rope_parameters(name: str, trained: int, target: int) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": "default"}
    if name in (STOCK, AGAIN):
        scaling = {"rope_type": "yarn", "factor": target / trained, "original_max_position_embeddings": trained}
    elif name == THEIR_DYNAMIC:
        scaling = {"rope_type": "dynamic", "factor": target / trained}
    return {"rope_theta": THETA, **scaling}


# ------------------------------------------------------------------------------------------ decoding


class Decoder:
    """A model with a cache that holds `lengths` tokens, one number a row, padded on the left to the longest."""

    def __init__(self, model: Any, lengths: list[int], cache: Cache, run: Any = None) -> None:
        self.model, self.cache, self.run = model, cache, model if run is None else run
        self.seen = max(lengths)
        self.padding = torch.tensor([[self.seen - length] for length in lengths], device=model.device)
        self.fill()
        self.token = torch.ones((len(lengths), 1), dtype=torch.long, device=model.device)

    def fill(self) -> None:
        columns = torch.arange(self.seen, device=self.model.device)
        rotary, config = self.model.model.rotary_emb, self.model.config
        if hasattr(rotary, "owner"):
            keys.expect(self.cache, (columns - self.padding).clamp(min=0), rotary.owner, config.num_hidden_layers)
        generator = torch.Generator(self.model.device).manual_seed(0)
        shape = (len(self.padding), config.num_key_value_heads, self.seen, config.head_dim)
        for layer in range(config.num_hidden_layers):
            key, value = (
                torch.randn(shape, generator=generator, device=self.model.device, dtype=self.model.dtype)
                for _ in range(2)
            )
            self.cache.update(key, value, layer)

    def inputs(self) -> dict[str, Tensor]:
        """What `generate` gives for the next token."""
        positions = self.seen - self.padding
        if not isinstance(self.cache, DynamicCache):
            return {"position_ids": positions}  # a mask would change its shape with every step
        columns = torch.arange(self.seen + 1, device=self.model.device)
        return {"position_ids": positions, "attention_mask": (columns >= self.padding).long()}

    @torch.no_grad()
    def step(self) -> object:
        """The next token of every row, which are read: a GPU is waited for."""
        output = self.run(input_ids=self.token, past_key_values=self.cache, use_cache=True, **self.inputs())
        self.seen += 1
        return output.logits[:, -1].argmax(-1).tolist()


def cache_bytes(cache: Cache) -> int:
    """Bytes of a cache: keys, values, positions, and what rotations depend on."""
    tensors = []
    for layer in cache.layers:
        tensors += [layer.keys, layer.values]
        if isinstance(layer, keys.PositionedLayer):
            tensors += [layer.state, layer._places.keys]
    storages = [each.untyped_storage() for each in tensors if isinstance(each, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def decoding(report: Report, models: dict[str, Any], length: int, lengths: list[int], rounds: int) -> None:
    decoders = {name: Decoder(model, lengths, DynamicCache(config=model.config)) for name, model in models.items()}
    what = f"decode, {length} cached, batch {len(lengths)}"
    times = interleaved({name: decoder.step for name, decoder in decoders.items()}, WARM + rounds, what)
    typical = median(times[STOCK][WARM:])
    report.add(f"{what}: ms a step, stock", 1000 * typical)
    report.add(f"{what}: time, {AGAIN} over stock", over(times, AGAIN, STOCK))
    held = {name: cache_bytes(decoder.cache) for name, decoder in decoders.items()}
    for name in METHODS:
        report.add(f"{what}: time, {name} over stock", over(times, name, STOCK), at_most=DECODE_TIME)
        report.add(f"{what}: time of the first step, {name} over a later one of stock", times[name][0] / typical)
        report.add(f"{what}: KV memory, {name} over stock", held[name] / held[STOCK], at_most=KV_MEMORY)
    report.add(f"{what}: KV memory, stock (MB)", held[STOCK] / 1e6)


def compiled_decoding(report: Report, models: dict[str, Any], slots: int, rounds: int) -> None:
    """Over a static cache of `slots` tokens, which is full at the end."""
    backend = "inductor"
    if models[NTK].device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++"))):
        backend = "aot_eager"
    what = f"decode, static cache of {slots}, {backend}"
    works, first = {}, {}
    for name in (STOCK, NTK):
        for way in ("eager", "compiled"):
            model = models[name]
            cache = StaticCache(config=model.config, max_cache_len=slots)
            run = torch.compile(model, backend=backend, fullgraph=True) if way == "compiled" else model
            decoder = Decoder(model, [slots - rounds - WARM - 1], cache, run)
            works[f"{name}, {way}"], first[f"{name}, {way}"] = decoder.step, seconds(decoder.step)
    times = interleaved(works, WARM + rounds, what)
    ratio = over(times, f"{NTK}, compiled", f"{NTK}, eager")
    # Without a compiler there is nothing to win.
    report.add(f"{what}: time, {NTK} over itself in eager", ratio, at_most=1.0 if backend == "inductor" else None)
    report.add(f"{what}: time, stock over itself in eager", over(times, f"{STOCK}, compiled", f"{STOCK}, eager"))
    for way in ("eager", "compiled"):
        report.add(f"{what}: time, {NTK} over stock, both {way}", over(times, f"{NTK}, {way}", f"{STOCK}, {way}"))
    report.add(f"{what}: seconds to compile, {NTK}", first[f"{NTK}, compiled"])


# ------------------------------------------------------------------------------------------- prefill


def prompt(length: int, device: torch.device) -> Tensor:
    return torch.randint(0, SHAPE["vocab_size"], (1, length), generator=torch.Generator().manual_seed(0)).to(device)


@torch.no_grad()
def prefill(model: Any, tokens: Tensor) -> object:
    """The token after a prompt, with a cache filled."""
    return model(input_ids=tokens, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1).tolist()


def prefill_time(report: Report, models: dict[str, Any], length: int, rounds: int) -> None:
    tokens = prompt(length, models[STOCK].device)
    for model in models.values():
        prefill(model, tokens[:, :SHORT])
    works = {name: lambda model=model: prefill(model, tokens) for name, model in models.items()}
    times = interleaved(works, rounds, f"prefill of {length}")
    report.add(f"prefill of {length}: time, {AGAIN} over stock", over(times, AGAIN, STOCK, skip=0))
    for name in METHODS:
        ratio = over(times, name, STOCK, skip=0)
        report.add(f"prefill of {length}: time, {name} over stock", ratio, at_most=PREFILL_TIME)
    report.add(f"prefill of {length}: seconds, stock", median(times[STOCK]))


def memory_in_a_process(
    name: str, trained: int, target: int, length: int, device: torch.device, dtype: torch.dtype | None = None
) -> int:
    """`memory_growth` of a new model, in a process of its own."""
    command = [
        sys.executable, __file__, "--memory", name, "--trained", str(trained), "--prefill", str(length),
        "--target", str(target), "--device", str(device), "--dtype", str(dtype or usual(device)).removeprefix("torch."),
    ]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **GIVE_BACK})
    return int(done.stdout.split()[-1])


def prefill_memory(report: Report, args: argparse.Namespace) -> None:
    names = (STOCK, *METHODS)
    growth = {
        name: memory_in_a_process(name, args.trained, args.target, args.prefill, args.device, args.dtype)
        for name in track(names, f"memory of a prefill of {args.prefill}")
    }
    for name in METHODS:
        ratio = growth[name] / growth[STOCK]
        report.add(f"prefill of {args.prefill}: growth of memory, {name} over stock", ratio, at_most=PREFILL_MEMORY)
    report.add(f"prefill of {args.prefill}: growth of memory, stock (MB)", growth[STOCK] / 1e6)


def memory_growth(model: Any, length: int) -> int:
    """Bytes by which a prefill of `length` tokens raises the peak of this process, or of its GPU."""
    tokens = prompt(length, model.device) % model.config.vocab_size
    prefill(model, tokens)  # what a first call allocates for good: some 20 MB of kernels and their scratch space
    return growth(model, tokens)


def growth(model: Any, tokens: Tensor) -> int:
    """The same of a prefill of `tokens`, which needs no other first."""
    memory = PeakMemory(model.device)
    before = memory.now
    prefill(model, tokens)
    return memory.at_most - before


# ----------------------------------------------------------------------------------------- exactness


@torch.no_grad()
def difference(name: str, device: torch.device, dtype: torch.dtype) -> float:
    """Largest of any logit between one pass over 256 tokens and one token at a time, for a model trained at 64."""
    model = random_models((name,), 64, 256, device, dtype, num_hidden_layers=2)[name]
    tokens, cache = prompt(256, device), DynamicCache(config=model.config)
    whole = model(input_ids=tokens, use_cache=False).logits
    steps = [model(input_ids=token, past_key_values=cache, use_cache=True).logits for token in tokens.split(1, dim=1)]
    return float((torch.cat(steps, dim=1) - whole).abs().max())


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16_384], help="tokens cached when decoding")
    parser.add_argument("--prefill", type=int, default=8192, help="tokens of the prompt")
    parser.add_argument("--slots", type=int, default=4096, help="of the static cache")
    parser.add_argument("--trained", type=int, default=2048, help="tokens that the models count as trained")
    parser.add_argument("--rounds", type=int, default=60, help="of decode steps")
    parser.add_argument("--prefills", type=int, default=15, help="rounds of prefill")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="float32 on a CPU, bfloat16 on a GPU if not given"
    )
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    parser.add_argument("--target", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.dtype = getattr(torch, args.dtype) if args.dtype else usual(args.device)
    args.target = args.target or 2 * max(args.prefill, args.slots, *args.lengths)
    if args.memory:
        model = random_models((args.memory,), args.trained, args.target, args.device, args.dtype)[args.memory]
        print(memory_growth(model, args.prefill))
        return
    on_gpu, dtype = args.device.type == "cuda", str(args.dtype).removeprefix("torch.")
    units = "cuda" if on_gpu else cpu_units()
    report = Report("attention", seed=0)
    for name in (*METHODS, THEIR_DYNAMIC):
        largest = difference(name, args.device, args.dtype)
        most = 1e-4 if args.dtype == torch.float32 and not on_gpu and name != THEIR_DYNAMIC else None
        report.add(f"decode against one pass: largest difference of a logit, {name}", largest, at_most=most)
    shared = (args.trained, args.target, args.device, args.dtype)
    models = random_models((STOCK, AGAIN, *METHODS), *shared)
    for length in args.lengths:
        for rows in (1, len(ROWS)):
            decoding(report, models, length, [int(length * share) for share in ROWS[:rows]], args.rounds)
    compiled_decoding(report, models, args.slots, args.rounds)
    prefill_time(report, models, args.prefill, args.prefills)
    prefill_memory(report, args)
    report.finish(
        args.output or Path(f"docs/benchmarks/attention-{units.lower()}-{dtype}.json"),
        device=torch.cuda.get_device_name(args.device) if on_gpu else "cpu",
        units=units,
        limited_by={name: os.environ[name] for name in LIMITS if name in os.environ},
        dtype=dtype,
        lengths=args.lengths, prefill=args.prefill, slots=args.slots, trained=args.trained, rounds=args.rounds,
        prefills=args.prefills,
    )  # fmt: skip


if __name__ == "__main__":
    main()
