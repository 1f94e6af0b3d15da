"""The test Hub."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import huggingface_hub
import pytest
from support.hub_client import use
from support.hub_server import Hub


@pytest.fixture(scope="session", autouse=True)
def _certificates_are_read_once() -> Iterator[None]:
    """A client reads those of all authorities when it is made, and the test Hub needs none."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    made = Hub(tmp_path / "hub")
    use(made, monkeypatch, tmp_path)
    yield made
    made.close()
    huggingface_hub.close_session()
