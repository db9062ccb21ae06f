"""Runs in vLLM's own environment: what its server would do with a command line, without HTTP.

Reads one JSON object a line, `{"arguments": [...], "prompts": [[ids], ...]}`; parses the arguments of `vllm serve` with
vLLM's own parser, starts the engine, and writes a line with the log-probabilities of each prompt's tokens but the first
(`{"logprobs": [[...], ...]}`, null where one is not finite), or with `{"error": "..."}`. If the arguments name an
adapter, it is asked under that. A request may also hold `"continued": [[ids], ...]` and `"new_tokens"`: the prompts are
then continued greedily, in one batch, and the answer holds `"continuations"`.
"""

import before_vllm  # noqa: F401
from answering import answer_requests  # isort: split

import gc
import os

from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.lora.request import LoRARequest
from vllm.model_executor.models import registry
from vllm.utils.argparse_utils import FlexibleArgumentParser

registry._run_in_subprocess = lambda inspect: inspect()  # which would lack torchvision's operators


def measured(arguments, prompts, environment=(), continued=(), new_tokens=1):
    os.environ.pop("VLLM_ALLOW_LONG_MAX_MODEL_LEN", None)
    os.environ.update(environment)
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    if parsed.model_tag is not None:
        parsed.model = parsed.model_tag
    engine = LLM.from_engine_args(EngineArgs.from_cli_args(parsed))
    try:
        wanted = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        adapters = [LoRARequest(each.name, 1, each.path) for each in parsed.lora_modules or ()]
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        found = engine.generate(asked, wanted, use_tqdm=False, lora_request=adapters[0] if adapters else None)
        logprobs = [
            [entry[token].logprob for entry, token in zip(one.prompt_logprobs[1:], ids[1:])]
            for one, ids in zip(found, prompts)
        ]
        wanted = SamplingParams(max_tokens=new_tokens, temperature=0, logprobs=0, ignore_eos=True)
        asked = [{"prompt_token_ids": ids} for ids in continued]
        continuations = []
        for one in engine.generate(asked, wanted, use_tqdm=False) if continued else ():
            ids, by_step = one.outputs[0].token_ids, one.outputs[0].logprobs
            continuations.append({
                "tokens": list(ids),
                "logprobs": [entry[token].logprob for entry, token in zip(by_step, ids)],
                "read from the cache": one.num_cached_tokens,
            })  # fmt: skip
        return {"logprobs": logprobs, "continuations": continuations}
    finally:
        engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()


answer_requests(measured)
