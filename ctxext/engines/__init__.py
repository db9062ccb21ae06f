"""What other engines read."""
