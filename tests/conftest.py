"""Shapes and dtypes in the signatures of the pure maths are checked while the tests run."""

from jaxtyping import install_import_hook

# Before anything imports ctxext. ctxext.methods stays out: there, a wrong type must reach our own
# ValueError (factor="4") instead of the checker's, and its overrides are annotated with plain Tensor.
install_import_hook("ctxext.encodings", "shapes.check")
