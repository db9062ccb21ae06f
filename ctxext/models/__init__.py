"""What a model's config and the table of known checkpoints say about its context."""
