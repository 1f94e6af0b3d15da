"""The client in this process turned to the test Hub: the library reads its environment when it is imported, which
other tests may have made it do."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http

from ckpttool.remote.hub import answers, retries
from support.hub_server import WRITER, Hub


def use(hub: Hub, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The client in this process: its endpoint, caches, token, no Xet, and no waits."""
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", WRITER)
    monkeypatch.setenv("TMPDIR", str(folder / "tmp"))
    (folder / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder / "tmp"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setenv("CKPTTOOL_HUB_NO_CACHE", "1")
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(folder / "assets"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_XET_CACHE", str(folder / "xet"))
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + template[template.index("/{") :])
    monkeypatch.setattr(answers, "STORAGES", (*answers.STORAGES, "local"))
    patience(monkeypatch, 60)
    huggingface_hub.close_session()

    class Clock:
        @staticmethod
        def sleep(seconds: float) -> None:
            hub.slept.append(seconds)

        def __getattr__(self, name: str) -> object:
            import time

            return getattr(time, name)

    for module in (_http, file_download):
        if hasattr(module, "time"):
            monkeypatch.setattr(module, "time", Clock())
    monkeypatch.setattr(retries, "_pause", lambda seconds, stopped: hub.slept.append(seconds))


def patience(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """How long the client waits for a server that says nothing: the machine that runs the tests may be slow itself."""
    monkeypatch.setenv("CKPTTOOL_HUB_TIMEOUT", str(seconds))
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", seconds)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", seconds)
    huggingface_hub.close_session()


@contextmanager
def everything_logged() -> Iterator[io.StringIO]:
    """All that any library logs in the block, at its most talkative."""
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.DEBUG)
    try:
        yield log
    finally:
        logging.getLogger().removeHandler(handler)
        logging.getLogger().setLevel(logging.WARNING)


def check_told_to_nobody(shown: Sequence[str], log: io.StringIO, folder: Path, hub: Hub) -> None:
    """The token was sent, and is in nothing that was shown or logged and in no file; no signature was shown."""
    assert WRITER not in "\n".join([*shown, log.getvalue()])
    assert "X-Signature" not in "\n".join(shown)
    for path in folder.rglob("*"):
        if path.is_file():
            assert WRITER.encode() not in path.read_bytes(), path
    assert any(one.authorization == f"Bearer {WRITER}" for one in hub.seen), "it was sent"
