"""What a file of this room gives for a position encoding other than RoPE: `find`, and a subclass of `Encoding`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ctxext.core.edit import Surgery
from ctxext.methods import ContextMethod
from ctxext.models.text_config import text_config_of


@dataclass(frozen=True)
class SiteProof:
    """What was seen of a patch, each part of which could have failed.

    Attributes:
        formula_error: largest difference between what the live model's own code reads and the method's formula.
        effect: how far the model's output moved, so that what was changed is seen to be used.
        n_tokens: the length of the forward pass that was run; past the stock model's limit, where it has one that is
            not too long to run.
    """

    formula_error: float
    effect: float
    n_tokens: int

    def __str__(self) -> str:
        return (
            f"off by {self.formula_error:.1e} from the formula; moves the output by {self.effect:.1e} in a forward "
            f"pass of {self.n_tokens} tokens"
        )

    # Tables are held in float32 at best, and positions of some thousand tokens are good to 1e-4 radians there.
    FORMULA_BAR: ClassVar[float] = 1e-3


@dataclass(frozen=True)
class Encoding(ABC):
    """What a live model (one on meta too) keeps its positions in.

    Attributes:
        paths: the modules that hold it.
        trained_length: tokens, with `source` saying where that number comes from.
        limit: tokens past which the stock model fails; None where no limit exists.
    """

    name: ClassVar[str]  # as in `ContextMethod.encoding`
    default_method: ClassVar[str]
    # Why a saved model's weights and config cannot say it all, after "as"; None where they do.
    live_only: ClassVar[str | None] = None
    changes_weights: ClassVar[bool] = False

    paths: tuple[str, ...]
    trained_length: int
    source: str
    limit: int | None

    def check(self, method: ContextMethod, target_length: int) -> None:
        """Raise ValueError unless this model can be extended so; before anything is changed."""
        return

    @abstractmethod
    def updates(self, method: ContextMethod, target_length: int) -> dict[str, Any]:
        """The config fields to set, by name."""

    def notes(self, method: ContextMethod) -> tuple[str, ...]:
        """What a person should know, a sentence each."""
        return ()

    @abstractmethod
    def write(self, surgery: Surgery, method: ContextMethod, target_length: int) -> None:
        """Change the model; its config has been exchanged already."""

    @abstractmethod
    def prove(self, model: nn.Module, method: ContextMethod, before: Any) -> SiteProof:
        """Look at the changed model. It is in eval mode and without gradients."""

    def observe(self, model: nn.Module) -> Any:
        """What `prove` needs of the model before it is changed."""
        return None


def stated_length(config: Any, *names: str) -> tuple[str, int] | None:
    """The first of the fields `names` that says a length in tokens, and that length."""
    found = ((name, getattr(config, name, None)) for name in names)
    return next(((name, value) for name, value in found if isinstance(value, int) and value > 0), None)


def probe_inputs(model: nn.Module, n_tokens: int) -> dict[str, Any]:
    """Inputs for a forward pass of `n_tokens` random tokens of any kind of text model, seeded.

    An encoder-decoder model gets as many tokens in its decoder; one whose encoder reads no tokens (speech, images)
    gets invented encoder outputs.
    """
    config: Any = model.config
    text = text_config_of(config)
    device = next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    pad = getattr(text, "pad_token_id", None)
    n_rows = getattr(text, "num_codebooks", 1)  # MusicGen takes a row of the batch for each.
    ids = torch.randint(0, text.vocab_size - 1, (n_rows, n_tokens), generator=generator)
    ids = (ids if pad is None else ids + (ids >= pad)).to(device)  # pads have no positions
    eos = getattr(text, "eos_token_id", None)
    if isinstance(eos, int) and eos < text.vocab_size and eos != pad:
        ids[:, -1] = eos  # BART reads a class off it
    if not getattr(config, "is_encoder_decoder", False):
        return {"input_ids": ids}
    if model.main_input_name == "input_ids":
        return {"input_ids": ids, "decoder_input_ids": ids}
    from transformers.modeling_outputs import BaseModelOutput

    width = getattr(text, "d_model", None) or text.hidden_size
    heard = BaseModelOutput(torch.randn(1, 8, width, generator=generator).to(device, model.dtype))
    heard.attention_mask = torch.ones(1, 8, dtype=torch.long, device=device)  # which Moonshine's encoder hands on
    return {"encoder_outputs": heard, "decoder_input_ids": ids}


def run(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """The model's first output, logits or hidden states, in float32."""
    output = model(**inputs)
    tensor = getattr(output, "logits", None)
    return (output[0] if tensor is None else tensor).float()


@contextmanager
def seen_by(model: nn.Module, path: str, keyword: str | None = None) -> Iterator[list[Any]]:
    """Collects, for each call of the module at `path`, what it returned, or the keyword argument that it was given."""
    module, seen = model.get_submodule(path), []

    def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seen.append(output if keyword is None else kwargs[keyword])

    handle = module.register_forward_hook(after, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()
