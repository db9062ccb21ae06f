"""Extend the context window of Hugging Face language models, with proof.

from ctxext import extend_context

extend_context(model, factor=4, method="yarn")
print(model.context_extension)
"""

__version__ = "0.1.0"

from ctxext.adapters import load
from ctxext.api import describe_context, extend_config, extend_context, restore_context, temporarily_extended
from ctxext.methods import (
    ABF,
    PI,
    ContextMethod,
    DroPE,
    DualChunkAttention,
    DynamicNTK,
    DynamicYaRN,
    Llama3,
    LongRoPE,
    NTKAware,
    NTKByParts,
    Paper,
    PositionRemapping,
    ReRoPE,
    Resonance,
    RopeScaling,
    SelfExtend,
    TransformersDynamic,
    YaRN,
    list_methods,
    register,
)

__all__ = [
    "ABF",
    "PI",
    "ContextMethod",
    "DroPE",
    "DualChunkAttention",
    "DynamicNTK",
    "DynamicYaRN",
    "Llama3",
    "LongRoPE",
    "NTKAware",
    "NTKByParts",
    "Paper",
    "PositionRemapping",
    "ReRoPE",
    "Resonance",
    "RopeScaling",
    "SelfExtend",
    "TransformersDynamic",
    "YaRN",
    "describe_context",
    "extend_config",
    "extend_context",
    "list_methods",
    "load",
    "register",
    "restore_context",
    "temporarily_extended",
]
