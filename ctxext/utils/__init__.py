"""Shared helpers: value checks, JSON files, processes, servers."""
