"""What the tests of data share: a cache of their own, the bundled tokenizer, and the bundled model."""

from __future__ import annotations

import datasets
import pytest
from transformers import AutoTokenizer

from ctxext.assets import MODEL


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """`datasets` keeps its cache here instead of at home, and draws no bars."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        datasets.disable_progress_bars()
        yield
        datasets.enable_progress_bars()


@pytest.fixture(scope="session")
def tokenizer():
    """Vocabulary 4096, BOS 0, EOS 1, model_max_length 512."""
    return AutoTokenizer.from_pretrained(MODEL)
