"""Evaluate what an extension gains and what it costs."""

from ctxext.evals import needle, ruler  # noqa: F401  each registers its tasks
