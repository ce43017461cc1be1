from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where prepared models and compiled kernels go: $ANABRANCH_TEST_CACHE (kept), else a directory of this session."""
    cache = os.environ.get("ANABRANCH_TEST_CACHE")
    return Path(cache) if cache else tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def prepared_model(model_cache: Path) -> Path:
    """The default model's prepared directory."""
    from anabranch.engine.live.prepare import prepare

    return prepare("default", model_cache)
