"""A headless Chromium, spoken to by the DevTools protocol over a pipe: no driver and no package is needed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--force-color-profile=srgb"),
)


class Page:
    """A page of a browser. `problems` are errors of the console and of the log, `requests` what was asked for."""

    def __init__(self) -> None:
        if PROGRAM is None:
            pytest.skip("there is no chromium")
        self.folder = tempfile.mkdtemp()
        to_browser, self.out = os.pipe()
        self.inn, from_browser = os.pipe()
        low = [_above(fd) for fd in (to_browser, from_browser)]
        actions = [(os.POSIX_SPAWN_DUP2, low[0], 3), (os.POSIX_SPAWN_DUP2, low[1], 4)]
        actions += [(os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]
        words = [PROGRAM, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={self.folder}", "about:blank"]
        self.pid = os.posix_spawn(PROGRAM, words, os.environ, file_actions=actions, setpgroup=0)
        for fd in {to_browser, from_browser, *low}:
            os.close(fd)
        self.number, self.rest = 0, b""
        self.problems: list[str] = []
        self.requests: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        os.close(self.out)
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.inn)
        shutil.rmtree(self.folder, ignore_errors=True)

    def send(self, method: str, **params: Any) -> Any:
        return self.call(method, self.session, **params)

    def call(self, method: str, session: str | None = None, **params: Any) -> Any:
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while (answer := self.receive()).get("id") != self.number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def receive(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            assert select.select([self.inn], [], [], 300)[0], "the browser does not answer"
            got = os.read(self.inn, 1 << 16)
            assert got, "the browser ended"
            self.rest += got
        line, self.rest = self.rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"])[:500])
        elif message.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str(params["args"]))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])
        elif message.get("method") == "Page.javascriptDialogOpening":
            self.problems.append(f"dialog: {params['message']}")
        elif message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        return message

    def open(self, path: Path, fragment: str = "") -> None:
        # An address that differs in its fragment alone would not be loaded.
        for url in ("about:blank", path.as_uri() + fragment):
            self.send("Page.navigate", url=url)
            while self.receive().get("method") != "Page.loadEventFired":
                pass

    def view(self, width: int, height: int, scheme: str) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def ask(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, *keys: str) -> None:
        codes = {"Enter": 13, "Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "/": 191}
        codes["Backspace"] = 8
        for key in keys:
            settings = {"key": key, "windowsVirtualKeyCode": codes.get(key, ord(key[0].upper()))}
            text = {"text": "\r" if key == "Enter" else key} if len(key) == 1 or key == "Enter" else {}
            self.send("Input.dispatchKeyEvent", type="keyDown", **settings, **text)
            self.send("Input.dispatchKeyEvent", type="keyUp", **settings)
        self.ask("new Promise(done => setTimeout(done, 30))")

    def picture(self, path: Path, full: bool = False) -> None:
        found = self.send("Page.captureScreenshot", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(found["data"]))


def _above(descriptor: int) -> int:
    """Return a copy of a descriptor that is not 3 or 4, which the browser takes."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
