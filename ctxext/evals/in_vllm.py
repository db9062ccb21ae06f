"""Measure a checkpoint in vLLM, in this process: prompts in batches, whose common prefixes are read once."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from difflib import get_close_matches
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from ctxext.evals.engine import Answer, Losses
from ctxext.evals.loading import check_dtype
from ctxext.evals.perplexity import TextTask
from ctxext.evals.prompts import Prompter
from ctxext.evals.results import Record
from ctxext.evals.samples import Sample, fingerprint
from ctxext.evals.targets import LocalModel, Rows, Variant, check_continues_text, known_lengths, refuse_cost
from ctxext.export.probe import FAR_TOKENS, NotExtended, make_probe, read_probe
from ctxext.export.rules import NotExportable, export_for
from ctxext.export.served import check_logprobs
from ctxext.export.verify import Probed, judge_engine
from ctxext.extension.metadata_file import RECORD, weights_fingerprint
from ctxext.extension.method_file import PROBE
from ctxext.hub.checkpoint import load_model, load_tokenizer, read_config, saved_extension
from ctxext.models.context import has_rope, read_context
from ctxext.models.text_config import text_config_of
from ctxext.utils.machine import machine
from ctxext.utils.values import is_count, shown

SEED = 0
# Arguments of `vllm.LLM` that are not options.
OURS = (
    "model", "dtype", "seed", "hf_overrides", "enable_prefix_caching", "skip_tokenizer_init", "load_format",
    "logprobs_mode", "max_logprobs",
)  # fmt: skip
# The tokens of the prompts that vLLM is given at once: their answers are saved together.
AT_ONCE = 2**18


class VLLM:
    """A checkpoint in vLLM, loaded when it is first asked.

    Everything is greedy, and log-probabilities are the model's own, before any sampling.

    Args:
        limit: of prompt and answer together, in tokens.
        options: further arguments of `vllm.LLM`.
    """

    def __init__(self, folder: Path, *, dtype: str, limit: int, overrides: dict[str, Any], **options: Any) -> None:
        self.folder, self.limit = folder, limit
        self._arguments = {
            "model": str(folder), "dtype": dtype, "max_model_len": limit, "hf_overrides": overrides, "seed": SEED,
            "enable_prefix_caching": True, "skip_tokenizer_init": True, **options,
        }  # fmt: skip

    @cached_property
    def _llm(self) -> Any:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm import LLM

        return LLM(**self._arguments)

    @cached_property
    def _stops(self) -> list[int]:
        """The tokens that end an answer, as in transformers."""
        if (self.folder / "generation_config.json").is_file():
            own = GenerationConfig.from_pretrained(self.folder)
        else:
            own = GenerationConfig.from_model_config(read_config(self.folder))
        ends = own.eos_token_id
        return ends if isinstance(ends, list) else [] if ends is None else [ends]

    def _asked(self, prompts: Sequence[Sequence[int]], each: Sequence[dict[str, Any]]) -> list[Any]:
        """vLLM's output for each prompt, by the sampling parameters of each."""
        from vllm import SamplingParams

        parameters = [SamplingParams(temperature=0, detokenize=False, **one) for one in each]
        return list(
            self._llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], parameters, use_tqdm=False)
        )

    def losses(self, ids: Sequence[int]) -> Losses:
        """The loss of each token but the first."""
        # The last token is generated, as a prompt must leave room for one.
        wanted = {"prompt_logprobs": 1, "logprobs": 1, "max_tokens": 1, "allowed_token_ids": [ids[-1]]}
        (found,) = self._asked([ids[:-1]], [wanted])
        entries = [*found.prompt_logprobs[1:], found.outputs[0].logprobs[0]]
        losses = torch.tensor([-entry[token].logprob for entry, token in zip(entries, ids[1:])])
        check_logprobs(-losses, "vLLM")
        top1 = [max(entry, key=lambda token: entry[token].logprob) for entry in entries]
        return Losses(losses, torch.tensor(top1))

    def generate(self, samples: Sequence[Sample]) -> list[Answer]:
        """The greedy answers, of at most `answer_tokens` tokens, and their log-probabilities."""
        prompts = [sample.input_ids[: sample.n_prompt] for sample in samples]
        wanted = [
            {"max_tokens": sample.answer_tokens, "logprobs": 0, "stop_token_ids": self._stops} for sample in samples
        ]
        outputs = [found.outputs[0] for found in self._asked(prompts, wanted)]
        return [
            Answer(
                list(output.token_ids),
                sum(entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids)),
            )
            for output in outputs
        ]

    def answers(self, samples: Sequence[Sample]) -> list[Answer]:
        """The greedy answers, and the log-probabilities of the right ones: of a wrong answer's sample, each token of
        the right one is read after those before it, of which the cache has almost all."""
        found = self.generate(samples)
        right = [list(sample.input_ids[sample.n_prompt :]) for sample in samples]
        missed = [k for k, (answer, tokens) in enumerate(zip(found, right)) if answer.written != tokens]
        places = [(k, end) for k in missed for end in range(samples[k].n_prompt, len(samples[k].input_ids))]
        forced = self._asked(
            [samples[k].input_ids[:end] for k, end in places],
            [{"max_tokens": 1, "logprobs": 0, "allowed_token_ids": [samples[k].input_ids[end]]} for k, end in places],
        )
        of_right = dict.fromkeys(missed, 0.0)
        for (k, end), output in zip(places, forced):
            of_right[k] += output.outputs[0].logprobs[0][samples[k].input_ids[end]].logprob
        logprobs = [of_right.get(k, answer.logprob) for k, answer in enumerate(found)]
        check_logprobs(torch.tensor(logprobs), "vLLM")
        return [Answer(answer.written, logprob) for answer, logprob in zip(found, logprobs)]

    def close(self) -> None:
        """Free its memory; asked again, it loads again."""
        if "_llm" in vars(self):
            self._llm.llm_engine.engine_core.shutdown()
            del self._llm


class InVLLM(LocalModel):
    """A checkpoint in vLLM, as saved, which must apply its extension (`ctxext verify`).

    Args:
        dtype: as in `ctxext.evals.loading.placement`.
        options: further arguments of `vllm.LLM`, such as `tensor_parallel_size`; a smaller `max_model_len` needs less
            memory.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: vLLM cannot run the extension, or has no such option.
    """

    engine: VLLM

    def __init__(
        self,
        folder: Path,
        prompter: Prompter,
        name: str,
        trained_length: int | None = None,
        *,
        dtype: str = "auto",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        check_dtype(dtype)
        options = dict(options or {})
        if ours := [name for name in options if name in OURS]:
            raise ValueError(f"{ours[0]} of vLLM is set here. Drop it from the options (for dtype there is --dtype).")
        if not is_count(limit := options.get("max_model_len", 1), 1):
            raise ValueError(f"max_model_len must be a number of tokens >= 1, got {shown(limit)}.")
        config = read_config(folder)
        check_continues_text(config)
        overrides = overrides_for(folder)
        if importlib.util.find_spec("vllm") is None:
            raise ImportError("--backend vllm needs vLLM, which is not installed: pip install vllm")
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform

        known = [field.name for field in fields(EngineArgs)]
        for option in options:
            if option not in known:
                near = "".join(f"; did you mean {name!r}?" for name in get_close_matches(option, known, 1))
                raise ValueError(f"vLLM has no option {option!r}{near or '.'} `vllm serve --help` lists them.")
        if dtype == "auto":  # vLLM's own would be float16 for float32
            own = str(config.dtype).removeprefix("torch.")
            dtype = "float32" if current_platform.is_cpu() or own == "None" else own
        trained, reach = known_lengths(config)
        reach = options.pop("max_model_len", reach)
        self.folder, self.prompter, self.name = folder, prompter, name
        self.engine = VLLM(folder, dtype=dtype, limit=reach, overrides=overrides, **options)
        self.fingerprint = fingerprint(config.to_json_string(), weights_fingerprint(folder))
        chosen = "".join(f", {option}={value}" for option, value in sorted(options.items()))
        how = f"vLLM {vllm.__version__}, greedy, seed {SEED}, prefix caching{chosen}"
        self.facts = {"dtype": dtype, "scoring": how}
        self.about = {
            "trained_length": trained_length or trained,
            "reach": reach,
            "machine": machine(current_platform.device_type),
        }

    def limit(self, variant: Variant) -> int | None:
        return self.engine.limit

    def check(self, texts: Collection[TextTask], ids: Sequence[int], generate: bool) -> None:
        """And that vLLM applies the folder's extension, by its probe."""
        refuse_cost(texts)
        if "live" not in self.about:
            self.about["live"] = self._verified()

    def applied(self, variant: Variant) -> AbstractContextManager[Any]:
        if variant.extension is not None:
            raise ValueError("vLLM runs a checkpoint as saved. Extend it first: ctxext extend.")
        return nullcontext()

    def outcomes(self, batches: Iterable[Rows], generate: bool) -> Iterator[list[tuple[Sample, Record]]]:
        waiting = iter(batches)
        for first in waiting:
            each = sum(len(row) for row in first) * len(first[0][0].input_ids)
            together = [first, *islice(waiting, AT_ONCE // each)]
            samples = [sample for rows in together for row in rows for sample in row]
            scored = [sample for sample in samples if sample.answer and not generate]
            free = [sample for sample in samples if not sample.answer or generate]
            yield [
                *(self.record(sample, *answer) for sample, answer in zip(scored, self.engine.answers(scored))),
                *(self.record(sample, answer.written) for sample, answer in zip(free, self.engine.generate(free))),
            ]

    def _verified(self) -> str:
        """What the probe shows, in words.

        Raises:
            ValueError: vLLM does not apply the extension.
        """
        try:
            if (self.folder / PROBE).is_file():
                probe = read_probe(self.folder / PROBE)
            else:
                probe = make_probe(load_model(self.folder).eval(), load_tokenizer(self.folder))
        except NotExtended:
            return "not extended"
        engine = Probed(
            name="vLLM",
            logprobs=lambda ids: -self.engine.losses(ids).losses.double(),
            tail=lambda ids: -self.engine.losses(ids).losses[-FAR_TOKENS:].double(),
        )
        verdict = judge_engine(probe, engine, probe.far_length(self.engine.limit))
        if not verdict.is_live:
            raise ValueError(
                f"vLLM does not run the extension of {self.folder} ({verdict.name}: {verdict.reason}). See `ctxext "
                "export` for what it needs, or use --backend transformers."
            )
        return f"{probe.summary}: {verdict.reason}, up to {verdict.asked_to:,} tokens"


def overrides_for(folder: Path) -> dict[str, Any]:
    """What vLLM needs beside the checkpoint's config.json (`--hf-overrides`).

    Raises:
        ValueError: it cannot run the extension.
    """
    instead = "Use --backend transformers, or `ctxext serve` and --server."
    config, saved = read_config(folder), saved_extension(folder)
    if saved is not None:
        name = saved.summary if saved.method is None else saved.method.name
        raise ValueError(f"vLLM cannot run {name}, which config.json cannot express, so {RECORD} stores it. {instead}")
    if not (has_rope(text_config_of(config)) and read_context(config).is_scaled):
        return {}
    try:
        flags = export_for("vllm", config).flags
    except NotExportable as error:
        raise ValueError(f"vLLM cannot run this model's scaling ({str(error).rstrip('.')}). {instead}") from None
    return dict(json.loads(dict(pairwise(flags)).get("--hf-overrides", "{}")))
