"""Extend the context window of Hugging Face language models, with proof.

from ctxext import extend_context

extend_context(model, factor=4, method="yarn")
print(model.context_extension)
"""

__version__ = "0.1.0"

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # of `ctxext.methods`, only what `__all__` names is there at run time
    from ctxext.api import describe_context, extend_config, extend_context, restore_context, temporarily_extended
    from ctxext.hub.adapters import load
    from ctxext.methods import *  # noqa: F403

__all__ = [
    "ABF", "PI", "STRING", "AlibiScaling", "BucketScaling", "CoPE", "ContextMethod", "DistanceInterpolation",
    "DistanceScaling", "DroPE", "DualChunkAttention", "DynamicNTK", "DynamicYaRN", "Hierarchical", "Llama3", "LongRoPE",
    "MaxDistanceScaling", "NTKAware", "NTKByParts", "PRoPE", "Paper", "PositionRemapping", "PositionScaling",
    "QueryTemperature", "ReRoPE", "Resonance", "RopeMethod", "RopeScaling", "RowInterpolation", "SelfExtend",
    "SinusoidalExtrapolation", "SinusoidalInterpolation", "SlopeScaling", "TableResizing", "Tiling",
    "TransformersDynamic", "YaRN", "describe_context", "extend_config", "extend_context", "list_methods", "load",
    "register", "restore_context", "temporarily_extended",
]  # fmt: skip

_VERBS = {
    "load": "hub.adapters",
    **dict.fromkeys(
        ("describe_context", "extend_config", "extend_context", "restore_context", "temporarily_extended"), "api"
    ),
}


def __getattr__(name: str) -> Any:
    """Import names lazily, as importing torch takes seconds."""
    if name not in __all__:
        raise AttributeError(f"module 'ctxext' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"ctxext.{_VERBS.get(name, 'methods')}"), name)
    return found
