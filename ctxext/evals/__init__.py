"""Measuring what an extension gained and what it cost."""

from ctxext.evals import needle  # noqa: F401  registers its tasks
