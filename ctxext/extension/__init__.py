"""Extending a live model: the request, the plan, its proof, saving and undoing it."""
