"""Evaluate what an extension gains and what it costs."""

from ctxext.evals import association, babilong, conversation, counting, functions, helmet, longbench, needle, ruler  # noqa: F401  register tasks
