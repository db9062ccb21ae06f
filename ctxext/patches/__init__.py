"""Changes to live models, one mechanism a file."""
