"""A plan of an extension, and the changes to a live model that it makes, each with its inverse."""
