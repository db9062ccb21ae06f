"""The plan of an extension, and its reversible changes to a live model."""
