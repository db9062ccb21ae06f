"""Evaluate what an extension gains and what it costs."""

from ctxext.utils.extras import require

require("eval")

from ctxext.evals import needle, ruler  # noqa: F401  each registers its tasks
