"""llama.cpp itself, in this process: the log-probabilities that it gives a text.

Through the wheel `xllamacpp`, which comes with `pip install '.[llama-cpp]'`.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor


class GGUFModel:
    """A GGUF file as llama.cpp's server runs it, on the CPU, with keys and values in float32.

    Flash attention is off and nothing is resized to fit memory, so that the comparison is of the model. The server
    listens on a free port of localhost. Leaving the context manager ends the server and frees the memory.
    """

    def __init__(self, path: str | Path, *, n_ctx: int | None = None, threads: int | None = None) -> None:
        """Load `path`.

        Args:
            n_ctx: context size in tokens, at most the file's own, which is the default.
            threads: CPU threads; torch's number by default.

        Raises:
            ImportError: `xllamacpp` is not installed.
            FileNotFoundError: no such file.
            ValueError: llama.cpp could not load it.
        """
        try:
            import xllamacpp
        except ImportError as error:
            raise ImportError(
                "llama.cpp is run through the package xllamacpp. Install it: pip install '.[llama-cpp]' in the clone"
            ) from error
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not a file. Pass the path of a GGUF file.")
        try:
            self._server: Any = xllamacpp.Server(self._parameters(xllamacpp, path, n_ctx, threads))
            # Wait until the server's loop answers: a server closed before its loop starts hangs forever.
            self._server.handle_metrics()
        except RuntimeError as error:
            raise ValueError(f"llama.cpp could not load {path} ({error}). Is it complete and supported?") from error
        self.path = path

    def _parameters(self, xllamacpp: Any, path: Path, n_ctx: int | None, threads: int | None) -> Any:
        """What llama-server's command line would set."""
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = n_ctx or 0
        params.n_parallel = 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads or torch.get_num_threads()
        params.n_gpu_layers = 0
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.fit_params = params.warmup = params.ctx_shift = False
        params.cache_ram_mib = params.n_ctx_checkpoints = 0
        params.verbosity = -1
        params.endpoint_metrics = True
        return params

    @property
    def vocab_size(self) -> int:
        """Tokens in the file's vocabulary."""
        return int(self._asked("/v1/models")["data"][0]["meta"]["n_vocab"])

    @property
    def trained_length(self) -> int:
        """The context length in tokens that the file states."""
        return int(self._asked("/v1/models")["data"][0]["meta"]["n_ctx_train"])

    def tokenize(self, text: str) -> list[int]:
        """`text` by the file's tokenizer, with the BOS if the tokenizer adds one."""
        return list(self._asked("/tokenize", {"content": text, "add_special": True})["tokens"])

    def _asked(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        request = urllib.request.Request(
            self._server.listening_address + path,
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        # No proxy: the server is in this process.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=60) as answer:
            return dict(json.load(answer))

    def logprobs(self, input_ids: Sequence[int], start: int = 1) -> Float64[Tensor, " token"]:
        """log p(input_ids[k] | input_ids[:k]) in nats, for k from `start` on.

        The tokens before `start` are read at once, the rest one at a time, as in decoding.

        Raises:
            ValueError: nothing to score, or more tokens than the context holds.
        """
        ids = [int(token) for token in input_ids]
        if not 1 <= start < len(ids):
            raise ValueError(f"start must be from 1 to {len(ids) - 1}, as {len(ids)} tokens were given; got {start}.")
        # llama.cpp gives log-probabilities only of generated tokens, from the logits before any bias, so a bias forces
        # each token in turn, after a prompt of which all but one token is in the cache.
        return torch.tensor([self._logprob(ids[:k], ids[k]) for k in range(start, len(ids))], dtype=torch.float64)

    def _logprob(self, prompt: list[int], token: int) -> float:
        answer = self._server.handle_completions({
            "prompt": prompt,
            "max_tokens": 1,
            "logit_bias": [[token, 1e6]],
            "temperature": 0,
            "logprobs": 1,
            "cache_prompt": True,
        })  # fmt: skip
        if "choices" not in answer:
            message = answer.get("error", answer).get("message", answer)
            raise ValueError(
                f"llama.cpp rejected {len(prompt)} tokens: {message}. The context length is n_ctx or the file's, "
                "whichever is shorter."
            )
        (written,) = answer["choices"][0]["logprobs"]["content"]
        if written["id"] != token:
            raise RuntimeError(f"llama.cpp generated token {written['id']} instead of {token}.")
        return float(written["logprob"])

    def close(self) -> None:
        """Free the model; it cannot be used again."""
        self._server = None

    def __enter__(self) -> GGUFModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
