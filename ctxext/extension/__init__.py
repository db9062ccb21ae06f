"""Planning an extension from a request, describing it, and saving the extended model."""
