"""What a config, and what is known of published models, say of a model's context."""
