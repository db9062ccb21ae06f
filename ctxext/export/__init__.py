"""Export extensions to other inference engines, and verify that those apply them."""
