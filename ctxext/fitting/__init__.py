"""Rescale factors for one model: learned by gradient, or searched for."""
