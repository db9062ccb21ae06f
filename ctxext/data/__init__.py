"""Training data: sources, packing, mixtures and collators."""

from ctxext.data.collators import CREAM, Collator, Plain, PoSE, Skipping, check_positions, make_collator
from ctxext.data.mixture import Mixture
from ctxext.data.packing import Accounting, Packed, pack
from ctxext.data.sources import Source, read_source

__all__ = [
    "CREAM",
    "Accounting",
    "Collator",
    "Mixture",
    "Packed",
    "Plain",
    "PoSE",
    "Skipping",
    "Source",
    "check_positions",
    "make_collator",
    "pack",
    "read_source",
]
