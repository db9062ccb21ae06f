"""What other engines read, and whether they answer as the model does."""
