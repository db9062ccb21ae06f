"""Shapes and dtypes in the signatures of the pure maths are checked while the tests run; no test has a time limit."""

import pytest
import torch
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

# Before anything imports ctxext. ctxext.methods stays out: there, a wrong type must reach our own
# ValueError (factor="4") instead of the checker's, and its overrides are annotated with plain Tensor.
install_import_hook("ctxext.encodings", "shapes.check")

# Hypothesis fails an example that takes 200 ms, and a test whose examples are slow to draw.
settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clock")


@pytest.fixture
def float64_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """The families' eager attention takes its softmax in float32, whatever the model's dtype."""
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda scores, dim, dtype=None: softmax(scores, dim))
