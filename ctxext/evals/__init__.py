"""Measuring what an extension gained and what it cost."""
