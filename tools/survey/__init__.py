"""Every model type of the installed transformers: built small, extended, and told apart by what comes of it."""
