"""transformers' own server against extended models, over HTTP.

It returns no log-probabilities of text, but its endpoint /v1/systemone returns those of some tokens, the labels, at
marked places of one. They are compared with those of the unextended checkpoint, extended in this process.
"""

from __future__ import annotations

import atexit
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from at_scale.cells import Cell
from engines.conformance import Conformance, EngineError
from engines.servers import running
from engines.subjects import FOLDER, TARGET, TRAINED, Subject
from finetuning import free_port
from jaxtyping import Float64
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctxext import extend_context
from ctxext.assets import MODEL
from ctxext.export.probe import MAYBE, MAYBE_NOT
from ctxext.export.verify import verify
from ctxext.utils.endpoint import Endpoint

PLACES, LABELS = 64, 16  # at most 64 questions a request
# A question's instructions are the text up to its mark.
TEMPLATE = "{% for question in questions %}{{ question.instructions }}<|mark|>{% endfor %}"


def read(texts: Sequence[str]) -> list[list[int]]:
    """The tokens of each text, without a special one before it."""
    return AutoTokenizer.from_pretrained(MODEL)(list(texts), add_special_tokens=False).input_ids


@lru_cache
def labels() -> dict[str, int]:
    """The most frequent tokens of the text, as texts that are read as one token, and their ids."""
    tokenizer, found = AutoTokenizer.from_pretrained(MODEL), dict[str, int]()
    for token, _ in Counter(Subject("bundled").text()).most_common():
        text = tokenizer.decode([token])
        if len(found) < LABELS and read([text]) == [[token]]:
            found[text] = token
    return found


def pieces(tokens: int) -> list[str]:
    """`PLACES` texts that make up at most `tokens` tokens."""
    tokenizer, ids = AutoTokenizer.from_pretrained(MODEL), Subject("bundled").text()[:tokens]
    size = len(ids) // PLACES
    # The server reads a special token in a request as text.
    texts = [tokenizer.decode(ids[k * size : (k + 1) * size], skip_special_tokens=True) for k in range(PLACES)]
    while sum(len(each) for each in read(texts)) > tokens:
        texts = [text[:-1] for text in texts]
    return texts


def label_logprobs(model: Any, texts: Sequence[str]) -> Float64[Tensor, "place label"]:
    """log p of each label, among the labels, after each piece."""
    ids = read(texts)
    ends = torch.tensor([len(each) for each in ids]).cumsum(0) - 1
    with torch.inference_mode():
        logits = model(torch.tensor([[token for each in ids for token in each]]), use_cache=False).logits[0]
    return logits[ends][:, list(labels().values())].double().log_softmax(-1)


@dataclass
class InTransformersServe(Conformance):
    """The stock command line of the installed transformers; each request names the folder that it asks."""

    name = "transformers-serve"
    title = f"transformers serve {transformers.__version__}"
    forms = (FOLDER,)

    def ready(self) -> dict[str, Any]:
        return {"versions": {name: sys.modules[name].__version__ for name in ("transformers", "torch")}}

    @property
    def subjects(self) -> Sequence[Subject]:
        """Those with the bundled model's tokenizer, of which the labels are, and without an image processor."""
        return [subject for subject in super().subjects if subject.name != "gemma3"]

    def cells(self) -> Sequence[Cell]:
        methods = ("yarn",) if self.tiny else tuple(Subject("bundled").methods)
        return [*super().cells(), *(Cell(f"bundled {method} passkeys", 20, partial(self.passkeys, method))
                                    for method in methods)]  # fmt: skip

    def negatives(self) -> list[Cell]:
        return [Cell("mistake: yarn, unextended", 20, self.ignored)]

    @cached_property
    def url(self) -> str:
        """The server, which ends with this process."""
        settings = self.folder / "decision.json"
        settings.write_text(json.dumps({"labels": {"choice": list(labels())}, "chat_template": TEMPLATE}))
        url = f"http://127.0.0.1:{(port := free_port())}"
        command = [str(Path(sys.executable).with_name("transformers")), "serve", "--device", "cpu"]
        command += ["--dtype", "float32", "--decision-config", str(settings), "--port", str(port)]
        stack = ExitStack()
        atexit.register(stack.close)
        stack.enter_context(running(command, f"{url}/health", self.folder / "server.log", HF_HUB_OFFLINE="1"))
        return url

    def served(self, subject: Subject, method: str, form: str) -> tuple[dict[str, Any], tuple[str, ...]]:
        folder = subject.extended(method)
        return {"folder": str(folder.resolve())}, ("transformers", "serve", str(folder))

    def plain(self, subject: Subject, tokens: int) -> dict[str, Any]:
        return {"folder": str(subject.base.resolve())}

    def ask(self, request: dict[str, Any], prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        raise EngineError("transformers serve returns no log-probabilities of prompts; see answered")

    def answered(self, folder: str, texts: Sequence[str]) -> Float64[Tensor, "place label"]:
        """log p of each label after each piece, by the server. Raises EngineError."""
        options = dict.fromkeys(labels())
        questions = {str(k): {"type": "choice", "instructions": text, "criteria": options}
                     for k, text in enumerate(texts)}  # fmt: skip
        try:
            server = Endpoint(self.url, model=folder, retries=0)
            answer = server.call("systemone", {"model": folder, "state": "", "questions": questions})
        except (OSError, RuntimeError, ValueError) as error:
            raise EngineError(str(error)) from error
        n_read, n_sent = answer["usage"]["input_tokens"], sum(len(each) for each in read(texts))
        if n_read != n_sent:
            raise EngineError(f"the server read {n_read} tokens, not the {n_sent} that were sent")
        found = [list(answer["answers"][name]["probabilities"].values()) for name in questions]
        return torch.tensor(found, dtype=torch.float64).log()

    # ---------------------------------------------------------------------------------- measuring

    @contextmanager
    def model(self, subject: Subject, method: str | None) -> Iterator[Any]:
        """The unextended checkpoint, extended in this process: the server's folder was written by another way."""
        model = AutoModelForCausalLM.from_pretrained(subject.base, dtype=torch.float32).eval()
        if method is not None:
            extend_context(model, method=subject.methods[method])
        yield model

    def judged(self, subject: Subject, method: str, request: dict[str, Any]) -> dict[str, Any]:
        """How far the labels' log-probabilities are from those of the extended model, up to the target."""
        texts = pieces(TARGET - 1)
        found = self.answered(request["folder"], texts)
        with self.model(subject, method) as model:
            expected = label_logprobs(model, texts)
        with self.model(subject, None) as model:
            effect = (label_logprobs(model, texts) - expected).abs().mean()
        apart = (found - expected).abs()
        return {"mean": float(apart.mean()), "max": float(apart.max()), "effect": float(effect),
                "positions": len(apart), "labels": len(labels())}  # fmt: skip

    def unextended(self, subject: Subject) -> dict[str, Any]:
        texts = pieces(TRAINED)
        try:
            found = self.answered(self.plain(subject, TRAINED)["folder"], texts)
        except EngineError as error:
            return {"error": str(error)}
        with self.model(subject, None) as model:
            apart = (found - label_logprobs(model, texts)).abs()
        return {"mean": float(apart.mean()), "positions": len(apart)}

    def passkeys_in(self, folder: str, method: str) -> dict[str, Any]:
        """What `ctxext verify` says of the server, which it asks for passkeys."""
        subject = Subject("bundled")
        subject.probe(method)
        found = verify(self.url, subject.probe_path(method), model=folder).verdict
        return {"verdict": found.name, "passkeys": found.passkeys}

    def passkeys(self, method: str) -> dict[str, Any]:
        try:
            found = self.passkeys_in(str(Subject("bundled").extended(method).resolve()), method)
        except (EngineError, ValueError) as error:
            return {"not asked": str(error)}
        return {"not asked": None, "expected": MAYBE, **found}

    def ignored(self) -> dict[str, Any]:
        found = self.passkeys_in(str(Subject("bundled").base.resolve()), "yarn")
        return {"right": found["verdict"] == MAYBE_NOT, "judged right": int(found["verdict"] == MAYBE_NOT),
                "verdicts": {found["verdict"]: 1}, "expected": [MAYBE_NOT], **found}  # fmt: skip

    def record(self, kept: dict[str, Any]) -> dict[str, Any]:
        passkeys = {name: value for name, value in kept.items() if "not asked" in value}
        rest = {name: value for name, value in kept.items() if name not in passkeys}
        return {**super().record(rest), "compared": f"{LABELS} labels at {PLACES} places", "passkeys": passkeys}
