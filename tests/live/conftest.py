from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def prepared_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model's prepared directory, made once per session, or once for all in $ANABRANCH_TEST_CACHE."""
    from anabranch.engine.live.prepare import prepare

    cache = os.environ.get("ANABRANCH_TEST_CACHE")
    return prepare("default", Path(cache) if cache else tmp_path_factory.mktemp("models"))
