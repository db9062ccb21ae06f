"""Changes to live models, one mechanism per file."""
