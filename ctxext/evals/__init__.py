"""Evaluate what an extension gains and what it costs."""

from ctxext.evals import association, conversation, counting, functions, needle, ruler  # noqa: F401  register tasks
