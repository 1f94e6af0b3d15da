"""The test Hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from support.hub_client import use
from support.hub_server import Hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    made = Hub(tmp_path / "hub")
    use(made, monkeypatch, tmp_path)
    yield made
    made.close()
    huggingface_hub.close_session()
