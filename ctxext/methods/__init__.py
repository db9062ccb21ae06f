"""The methods: each a frozen dataclass, pure maths on numbers. Add yours here: CONTRIBUTING.md has an example.

`scaling.py` and `clipped.py` hold methods that rescale frequencies, `dynamic.py` length-dependent ones, and
`remapping.py` those that remap positions inside attention; `tables.py` and `biases.py` are for encodings other than
RoPE. `contract.py` defines what each must implement. A frequency method is one vector and one scalar: rescale factors λ
(`inv_freq' = inv_freq / λ`) and a multiplier of cos and sin. It sees a `RopeGeometry`, never a model or a config.

λ must be finite and > 0; use `NO_ROTATION` for a pair that does not rotate, as JSON has no infinity. `register` is all
that `extend_context`, the command line, the saved config (as transformers' `longrope`) and the tests' matrix need.
"""

# isort: off
from ctxext.methods.contract import (
    NO_ROTATION, Branch, BucketScaling, ContextMethod, DistanceScaling, Paper, PositionRemapping, PositionScaling,
    RopeMethod, RopeScaling, SlopeScaling, TableResizing, check_factor, in_words, list_methods, longrope_parameters,
    make_method, method_class, method_from_dict, over_lengths, register, with_options,
)  # fmt: skip

# `list_methods` keeps this order.
from ctxext.methods.scaling import ABF, PI, DroPE, Llama3, NTKAware, NTKByParts, Resonance, YaRN
from ctxext.methods.clipped import CoPE, PRoPE
from ctxext.methods.dynamic import DynamicNTK, DynamicYaRN, LongRoPE, TransformersDynamic
from ctxext.methods.remapping import STRING, DualChunkAttention, ReRoPE, SelfExtend
from ctxext.methods.temperature import QueryTemperature
from ctxext.methods.tables import (
    Hierarchical, RowInterpolation, SinusoidalExtrapolation, SinusoidalInterpolation, Tiling,
)  # fmt: skip
from ctxext.methods.biases import AlibiScaling, DistanceInterpolation, MaxDistanceScaling
from ctxext.methods.native import (
    as_longrope, geometry_in_use, method_from_rope_parameters, scaled_rope_parameters, yarn_growth,
)  # fmt: skip
# isort: on

__all__ = [
    "ABF", "NO_ROTATION", "PI", "STRING", "AlibiScaling", "Branch", "BucketScaling", "CoPE", "ContextMethod",
    "DistanceInterpolation", "DistanceScaling", "DroPE", "DualChunkAttention", "DynamicNTK", "DynamicYaRN",
    "Hierarchical", "Llama3", "LongRoPE", "MaxDistanceScaling", "NTKAware", "NTKByParts", "PRoPE", "Paper",
    "PositionRemapping", "PositionScaling", "QueryTemperature", "ReRoPE", "Resonance", "RopeMethod", "RopeScaling",
    "RowInterpolation", "SelfExtend", "SinusoidalExtrapolation", "SinusoidalInterpolation", "SlopeScaling",
    "TableResizing", "Tiling", "TransformersDynamic", "YaRN", "as_longrope", "check_factor", "geometry_in_use",
    "in_words", "list_methods", "longrope_parameters", "make_method", "method_class", "method_from_dict",
    "method_from_rope_parameters", "over_lengths", "register", "scaled_rope_parameters", "with_options", "yarn_growth",
]  # fmt: skip
