"""Fit rescale factors to a model, and find the best method for it."""
