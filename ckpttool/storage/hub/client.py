"""The client of huggingface_hub, made to give up: left alone it waits for ever for a server that does not answer.

The token and the endpoint are found where the library looks for them: `HF_TOKEN`, `hf auth login`, `HF_ENDPOINT`.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from logging import ERROR, LogRecord
from typing import Any

import huggingface_hub
from huggingface_hub import HfApi, file_download
from huggingface_hub.utils import _http, logging
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from ckpttool.errors import UsageError
from ckpttool.version import __version__

TIMEOUT = 60.0  # seconds without a byte in either direction
_VARIABLE = "CKPTTOOL_HUB_TIMEOUT"
_prepared = False


def timeout() -> float:
    """Seconds after which a silent server is given up. Raises UsageError for a variable that is no number."""
    text = os.environ.get(_VARIABLE, "")
    try:
        seconds = float(text) if text else TIMEOUT
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"`{_VARIABLE}={text}` is no number of seconds", hint=f"write `{_VARIABLE}=60`")
    return seconds


def api() -> HfApi:
    """A client that is quiet and gives up. Raises UsageError for a library that cannot be told to."""
    _prepare()
    endpoint = os.environ.get("HF_ENDPOINT") or None
    return HfApi(endpoint=endpoint, library_name="ckpttool", library_version=__version__)


def _without_signatures(record: LogRecord) -> bool:
    record.msg, record.args = re.sub(r"(https?://[^\s?]*\?)\S+", r"\1...", record.getMessage()), ()
    return True


def _prepare() -> None:
    global _prepared
    if _prepared:
        return
    if not hasattr(huggingface_hub, "set_client_factory"):
        raise UsageError(
            f"`hf://` needs huggingface_hub 1.0 or later, and {huggingface_hub.__version__} is installed",
            hint="`pip install -U huggingface_hub`",
        )
    seconds = timeout()
    # Rust reads them when its session is made, which is at the first file.
    os.environ.setdefault("HF_XET_CLIENT_READ_TIMEOUT", f"{seconds:g}s")
    os.environ.setdefault("HF_XET_CLIENT_CONNECT_TIMEOUT", f"{seconds:g}s")

    # What it says before it tries again has addresses in it, and those of a store are signed.
    for name in (_http.__name__, file_download.__name__):
        logging.get_logger(name).addFilter(_without_signatures)
    huggingface_hub.set_client_factory(_giving_up(_http._GLOBAL_CLIENT_FACTORY))
    _prepared = True


def _giving_up(make: Callable[[], Any]) -> Callable[[], Any]:
    def factory() -> Any:
        made = make()
        # Not the client's own, which many of its calls overrule by none at all.
        made.event_hooks = {**made.event_hooks, "request": [*made.event_hooks["request"], _limit]}
        return made

    return factory


def _limit(request: Any) -> None:
    given = request.extensions.get("timeout", {})
    ours = timeout()
    request.extensions["timeout"] = {
        kind: ours if given.get(kind) is None else given[kind] for kind in ("connect", "read", "write", "pool")
    }


class _Quiet:
    """Without the library's own progress bars and warnings, which name addresses with signatures in them and say
    before us what we say better. The process may be somebody's training script: all is as it was afterwards."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = (False, 0)

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._before = (not are_progress_bars_disabled(), logging.get_verbosity())
                disable_progress_bars()
                if not os.environ.get("HF_HUB_VERBOSITY") and not os.environ.get("HF_DEBUG"):
                    logging.set_verbosity(ERROR)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                bars, level = self._before
                logging.set_verbosity(level)
                if bars:
                    enable_progress_bars()


quietly = _Quiet()


def token() -> str | None:
    """The token that is sent, to be kept out of everything that is shown."""
    return huggingface_hub.get_token()
