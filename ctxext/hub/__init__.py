"""Checkpoints, adapters and extensions, on disk and on the hub."""
