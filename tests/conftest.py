"""Shapes and dtypes in the signatures of the pure maths are checked while the tests run; no test has a time limit.

A whole run may have one: slow tests that would begin after `CTXEXT_SLOW_UNTIL` (seconds since 1970) are skipped, with
the reason. CI sets it, as its CPUs differ in speed.
"""

import os
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

# Before anything imports ctxext. ctxext.methods stays out: there, a wrong type must reach our own
# ValueError (factor="4") instead of the checker's, and its overrides are annotated with plain Tensor.
install_import_hook(["ctxext.encodings", "pictures"], "shapes.check")

# Hypothesis fails an example that takes 200 ms, and a test whose examples are slow to draw.
settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clock")


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """The dtype of exact comparisons, so that no CPU's rounding decides.

    The families' eager attention takes its softmax in float32, whatever the model's dtype; here it does not.
    """
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda scores, dim, dtype=None: softmax(scores, dim))
    return torch.float64


# A vector of frequencies couples no rows, positions or layers, so a law that holds for every method on one family and
# for one method of each kind on every family (and way through attention) seldom fails on the rest of the product.
EVERYWHERE = ("yarn", "dynamic_yarn", "self_extend")
FIRST = {"family": "llama", "cache": "dynamic", "implementation": "sdpa"}


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest reads the marks, and after
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    products = {item for item in items if item.path.name == "test_product.py"}
    for item in items:
        cell = item.callspec.params if hasattr(item, "callspec") else {}
        if cell.get("method", "yarn") not in EVERYWHERE and any(
            cell.get(axis, FIRST[axis]) != FIRST[axis] for axis in FIRST
        ):
            item.add_marker(pytest.mark.slow)
            products.add(item)
    yield
    # What seldom fails comes last, in case the time is up: last of each half, as a worker of pytest-xdist gets one.
    first, last = ([item for item in items if (item in products) == late] for late in (False, True))
    middle = len(first) // 2
    rest = len(items) // 2 - middle
    items[:] = [*first[:middle], *last[:rest], *first[middle:], *last[rest:]]


def pytest_runtest_setup(item: pytest.Item) -> None:
    until = os.environ.get("CTXEXT_SLOW_UNTIL")
    if until and item.get_closest_marker("slow") and time.time() > float(until):
        pytest.skip("a slow test, and CTXEXT_SLOW_UNTIL is over")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, by Playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs a browser: no chromium found on the PATH")
    with playwright.sync_playwright() as driver:
        yield driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
