"""Measuring what an extension gained and what it cost."""

from ctxext.utils.extras import require

require("eval")

from ctxext.evals import needle, ruler  # noqa: F401  each registers its tasks
