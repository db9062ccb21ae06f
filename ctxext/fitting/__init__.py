"""Rescale factors for one model: learned by gradient, or searched for."""

from ctxext.utils.extras import require

require("eval")
