"""The methods: each a frozen dataclass, pure maths on numbers. Add yours here.

`scaling.py` holds methods that rescale frequencies, `dynamic.py` length-dependent ones, and `remapping.py` those that
remap positions inside attention; `tables.py` and `biases.py` are for encodings other than RoPE. `contract.py` defines
what each must implement. A frequency method is one vector and one scalar: rescale factors λ (`inv_freq' = inv_freq /
λ`) and a multiplier of cos and sin. It sees a `RopeGeometry`, never a model or a config.

    @register("half_pi", aliases=())
    @dataclass(frozen=True, kw_only=True)
    class HalfPI(RopeScaling):
        \"""λ_i = factor on the lower half of the frequencies, 1 elsewhere.\"""
        paper: ClassVar[Paper] = Paper("My notes", 2026, "https://example.org")

        def rescale_factors(self, rope, length=None):
            pairs = rope.dim // 2
            factors = torch.ones(pairs, dtype=torch.float64)
            factors[pairs // 2 :] = self.factor
            return over_lengths(factors, length)

λ must be finite and > 0; use `NO_ROTATION` for a pair that does not rotate, as JSON has no infinity.

That is all: `extend_context(model, method="half_pi")`, the command line, the saved config (as transformers'
`longrope`) and the tests' matrix find it by name.
"""

from ctxext.methods.contract import (
    NO_ROTATION,
    Branch,
    BucketScaling,
    ContextMethod,
    DistanceScaling,
    Paper,
    PositionRemapping,
    PositionScaling,
    RopeMethod,
    RopeScaling,
    SlopeScaling,
    TableResizing,
    check_factor,
    list_methods,
    longrope_parameters,
    make_method,
    method_class,
    method_from_dict,
    over_lengths,
    register,
)
from ctxext.methods.scaling import ABF, PI, DroPE, Llama3, NTKAware, NTKByParts, Resonance, YaRN

import ctxext.methods.clipped  # noqa: F401, it registers cope  # isort: skip
from ctxext.methods.dynamic import DynamicNTK, DynamicYaRN, LongRoPE, TransformersDynamic  # isort: skip
from ctxext.methods.remapping import DualChunkAttention, ReRoPE, SelfExtend  # isort: skip
from ctxext.methods.tables import (  # isort: skip
    Hierarchical,
    RowInterpolation,
    SinusoidalExtrapolation,
    SinusoidalInterpolation,
    Tiling,
)
from ctxext.methods.biases import AlibiScaling, DistanceInterpolation, MaxDistanceScaling  # isort: skip
from ctxext.methods.native import (  # isort: skip
    as_longrope,
    geometry_in_use,
    method_from_rope_parameters,
    scaled_rope_parameters,
)

__all__ = [
    "ABF",
    "NO_ROTATION",
    "PI",
    "AlibiScaling",
    "Branch",
    "BucketScaling",
    "ContextMethod",
    "DistanceInterpolation",
    "DistanceScaling",
    "DroPE",
    "DualChunkAttention",
    "DynamicNTK",
    "DynamicYaRN",
    "Hierarchical",
    "Llama3",
    "LongRoPE",
    "MaxDistanceScaling",
    "NTKAware",
    "NTKByParts",
    "Paper",
    "PositionRemapping",
    "PositionScaling",
    "ReRoPE",
    "Resonance",
    "RopeMethod",
    "RopeScaling",
    "RowInterpolation",
    "SelfExtend",
    "SinusoidalExtrapolation",
    "SinusoidalInterpolation",
    "SlopeScaling",
    "TableResizing",
    "Tiling",
    "TransformersDynamic",
    "YaRN",
    "as_longrope",
    "check_factor",
    "geometry_in_use",
    "list_methods",
    "longrope_parameters",
    "make_method",
    "method_class",
    "method_from_dict",
    "method_from_rope_parameters",
    "over_lengths",
    "register",
    "scaled_rope_parameters",
]
