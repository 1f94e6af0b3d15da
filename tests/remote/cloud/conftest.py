"""The S3 server of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import s3_server
from support.s3_server import S3Server


@pytest.fixture(scope="session")
def _server() -> Iterator[S3Server]:
    for package in ("obstore", "moto", "flask", "flask_cors"):
        pytest.importorskip(package, reason="`pip install -c constraints.txt -e '.[dev]'` brings the S3 server")
    made = S3Server()
    yield made
    made.close()


@pytest.fixture
def server(_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, with an empty bucket."""
    _server.clear()
    s3_server.use(_server, monkeypatch)
    monkeypatch.setattr("ckpttool.remote.cloud.address.RETRIES", 2)
    monkeypatch.setattr("ckpttool.remote.cloud.address.FIRST_WAIT", 0.01)
    monkeypatch.setenv("CKPTTOOL_CLOUD_TIMEOUT", "20")
    return _server
