"""Forward passes that observe a live model and leave it unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from ctxext.models.text_config import text_config_of


@contextmanager
def probing(model: nn.Module) -> Iterator[None]:
    """Eval mode, no gradients, no compiled graph, no autocast, a separate random state, within a `with` block."""
    parameters = model.parameters() if torch.cuda.is_available() else ()
    device = next((p.device for p in parameters if p.device.type == "cuda"), None)
    with (
        without_autocast(),
        torch.random.fork_rng(devices=[] if device is None else [device]),
        torch.compiler.set_stance("force_eager"),
        nullcontext() if on_meta(model) else in_eval_mode(model),  # on meta nothing runs
        torch.no_grad(),
    ):
        yield


@contextmanager
def without_autocast() -> Iterator[None]:
    """Run every device type in the model's own dtypes, within a `with` block."""
    accelerator = torch.accelerator.current_accelerator()
    types = {"cpu", *([] if accelerator is None else [accelerator.type])}
    with ExitStack() as stack:
        for device_type in types:
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every module into eval mode within a `with` block, then it (or its replacement) back into its old mode."""
    modes = {path: module.training for path, module in model.named_modules()}
    model.eval()
    try:
        yield
    finally:
        for path, module in model.named_modules():
            module.training = modes.get(path, module.training)


@contextmanager
def running(model: nn.Module) -> Iterator[None]:
    """Turn any error of the model's code into a RuntimeError."""
    try:
        yield
    except Exception as error:
        dtypes = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()}
        remedy = "Extend it before it is sharded or wrapped, on one device."
        if len(dtypes) > 1 and "dtype" in str(error):
            remedy = f"Its weights are in {' and '.join(sorted(dtypes))}: convert it with model.to(dtype)."
        raise RuntimeError(
            f"{type(model).__name__} could not run the forward pass that verifies the patch ({type(error).__name__}: "
            f"{error}). {remedy}"
        ) from error


def has_hooks(model: nn.Module) -> bool:
    """Whether accelerate hooks move weights as the model runs."""
    return any("_hf_hook" in module.__dict__ for module in model.modules())


def on_meta(model: nn.Module) -> bool:
    """Whether weights are on the meta device, so that no forward pass can run yet."""
    return any(p.device.type == "meta" for p in model.parameters()) and not has_hooks(model)


def probe_inputs(model: nn.Module, n_tokens: int) -> dict[str, Any]:
    """Seeded random inputs for a forward pass of `n_tokens` tokens, for any kind of text model.

    An encoder-decoder model gets as many in its decoder, and random encoder outputs if its encoder reads no tokens
    (speech, images).
    """
    config: Any = model.config
    text = text_config_of(config)
    device = next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    pad = getattr(text, "pad_token_id", None)
    n_rows = getattr(text, "num_codebooks", 1)  # MusicGen expects one row of the batch per codebook.
    ids = torch.randint(0, text.vocab_size - 1, (n_rows, n_tokens), generator=generator)
    ids = (ids if pad is None else ids + (ids >= pad)).to(device)  # padding tokens have no positions
    eos = getattr(text, "eos_token_id", None)
    if isinstance(eos, int) and eos < text.vocab_size and eos != pad:
        ids[:, -1] = eos  # BART classifies from its hidden state
    if not getattr(config, "is_encoder_decoder", False):
        return {"input_ids": ids}
    if model.main_input_name == "input_ids":
        return {"input_ids": ids, "decoder_input_ids": ids}
    from transformers.modeling_outputs import BaseModelOutput

    width = getattr(text, "d_model", None) or text.hidden_size
    heard = BaseModelOutput(torch.randn(1, 8, width, generator=generator).to(device, cast(torch.dtype, model.dtype)))
    heard.attention_mask = torch.ones(1, 8, dtype=torch.long, device=device)  # returned by Moonshine's encoder
    return {"encoder_outputs": heard, "decoder_input_ids": ids}


def run(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """The model's first output, logits or hidden states, in float32."""
    with running(model):
        output = model(**inputs)
    tensor = getattr(output, "logits", None)
    return (output[0] if tensor is None else tensor).float()


@contextmanager
def seen_by(model: nn.Module, path: str, keyword: str | None = None) -> Iterator[list[Any]]:
    """Collect what each call of the module at `path` returned, or its argument `keyword`."""
    module, seen = model.get_submodule(path), []

    def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seen.append(output if keyword is None else kwargs[keyword])

    handle = module.register_forward_hook(after, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()
