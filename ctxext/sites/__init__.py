"""Module surgery on live models, one file for each kind of position encoding."""
