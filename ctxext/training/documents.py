"""sdpa without masks of tokens × tokens: one call for each packed document, and for each block of a sliding window.

transformers separates packed documents, and limits a sliding window, by one mask for the whole row: 16 GiB for 131,072
tokens, and twice that again in the dtype of the scores. Its kernels also compute all that the mask hides.
"""

from __future__ import annotations

import inspect
import re
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ctxext.attention.documents import attend_by_block
from ctxext.attention.masks import BlockMask, block_mask
from ctxext.core.apply import transformers_model
from ctxext.core.edit import Edit
from ctxext.core.probing import in_eval_mode
from ctxext.models.text_config import text_config_of

# Where a model's code asks whether the implementation is sdpa.
BY_NAME = re.compile(r"_attn_implementation\s*(==|!=|in\b|not in\b)[^\n]*sdpa")
NAME = "ctxext_documents"  # the attention implementation
BAR = {4: 1e-4, 8: 1e-4, 2: 5e-2}  # of the largest logit, by bytes of a number: kernels sum in another order


def use_document_attention(model: nn.Module) -> Edit:
    """Make sdpa run on each packed document alone, until `undo` of the result. Exact but for rounding.

    Documents are told from each other by their positions, as transformers does, in passes without a cache and without
    padding; other passes are transformers' own. Layers with a sliding window or with chunks are included. Call it after
    PEFT has wrapped the model, and under autocast if it is trained so.

    Raises:
        RuntimeError: the model does not attend by transformers' sdpa, does this already, or its logits for two packed
            documents differ from those with a mask. The model is unchanged.
    """
    inner = transformers_model(model)
    config, edit = text_config_of(inner.config), Edit(inner)
    if config._attn_implementation == NAME:
        raise RuntimeError(
            f"{type(inner).__name__} attends to each packed document alone already. Call `undo` of what that call "
            "returned. In a copy it cannot be undone: copy the model before."
        )
    if config._attn_implementation != "sdpa":
        raise RuntimeError(
            f"{type(inner).__name__} attends by {config._attn_implementation}, not by sdpa. Load it with "
            "attn_implementation='sdpa'."
        )
    # Sparse attention that runs for "eager" and "sdpa" alone (MiniMax-M3) selects every key of a short probe.
    sources = {sys.modules[type(module).__module__] for module in inner.modules()}
    if any(BY_NAME.search(inspect.getsource(each)) for each in sources if each.__name__.startswith("transformers.")):
        raise RuntimeError(f"{type(inner).__name__} needs masks for packed documents: its code does more for 'sdpa'.")
    ids = torch.randint(0, config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0))
    positions = torch.stack([torch.arange(64) % 40, torch.arange(64) % 25])
    with torch.no_grad(), in_eval_mode(inner):
        try:
            given = {name: each.to(inner.device) for name, each in (("input_ids", ids), ("position_ids", positions))}
            wanted = inner(**given, use_cache=False).logits
            edit.set_config_field(config, "_attn_implementation_internal", NAME)
            off = float((inner(**given, use_cache=False).logits - wanted).abs().max() / wanted.abs().max())
            if not off <= BAR[wanted.dtype.itemsize]:
                raise RuntimeError(f"logits differ by {off:.1e} of the largest")
        except Exception as error:  # model code raises many exception types
            edit.undo()
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise RuntimeError(f"{type(inner).__name__} needs masks for packed documents: {error}.") from error
    return edit


def _mask(*args: Any, **kwargs: Any) -> Any:
    mask = block_mask(*args, **kwargs)
    by_block = isinstance(mask, BlockMask) and not mask.is_causal and mask.documents is not None
    return mask if by_block else sdpa_mask(*args, **kwargs)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    attend = partial(ALL_ATTENTION_FUNCTIONS["sdpa"], module)
    if not isinstance(attention_mask, BlockMask):
        return attend(query, key, value, attention_mask, **kwargs)
    keep = bool(kwargs.get("dropout"))  # which draws other numbers when a block is computed again
    return attend_by_block(attention_mask, partial(attend, **kwargs), query, key, value, keep=keep), None


# A model that another process pickled finds them once this module is imported.
AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
