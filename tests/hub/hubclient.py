"""The client in this process turned to the test Hub: the library reads its environment when it is imported, which
other tests may have made it do."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from hubserver import WRITER, Hub
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http


def use(hub: Hub, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The client in this process: its endpoint, cache, token, no Xet, and no waits."""
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", WRITER)
    monkeypatch.setenv("TMPDIR", str(folder / "tmp"))
    (folder / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder / "tmp"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
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
    monkeypatch.setattr("ckpttool.hub.sending._WAIT", 0.01)


def patience(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """How long the client waits for a server that says nothing: the machine that runs the tests may be slow itself."""
    monkeypatch.setenv("CKPTTOOL_HUB_TIMEOUT", str(seconds))
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", seconds)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", seconds)
    huggingface_hub.close_session()
