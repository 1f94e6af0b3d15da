"""An S3 server on this machine: moto, behind a proxy that notes what is asked for and fails as networks do.

server.put("run/step-1", folder)         uploads a folder
server.faults.append(fault)              `fault(request)` returns what goes wrong, or None; see `Request`
server.requests                          `["GET run/step-1/.metadata", ...]`

Google's XML API is that of S3 with other headers: what its clients send is translated, and objects have generations.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import pytest

from support.s3_parts import Parts

BUCKET = "bucket"


@dataclass(frozen=True, slots=True)
class Request:
    """A request: `Request("GET", "run/x.safetensors", "", {"range": "bytes=0-7"})`."""

    method: str
    name: str
    query: str
    headers: dict[str, str]

    def __str__(self) -> str:
        query = self.query.partition("=")[0]
        return f"{self.method} {self.name}" + (f"?{query}" if query else "")


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with an answer: it has another status and body, is late, cut off, or has other bytes."""

    status: int = 0
    body: bytes = b""
    seconds: float = 0.0
    drops: bool = False  # the connection, after half of the body
    refuses: bool = False  # it is closed without an answer, and the request is not carried out
    changes: bool = False  # the last byte of the body
    loses: bool = False  # the answer, when the request was carried out
    damages: bool = False  # the last byte of what is sent


def error(status: int, code: str) -> Fault:
    """The answer of S3 with a code."""
    return Fault(status, f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode())


class S3Server:
    """The server, with one bucket."""

    def __init__(self) -> None:
        from moto import backends
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        backends.list_of_moto_modules = cache(partial(list, backends.list_of_moto_modules()))  # for each request
        self._moto = DomainDispatcherApplication(create_backend_app)
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # the body would wait for the acknowledgement of the headers

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:
                    self.close_connection = True

            def log_message(self, *_: Any) -> None:
                pass

            def pass_on(self) -> None:
                server._pass_on(self)

        for method in ("GET", "PUT", "POST", "DELETE", "HEAD"):
            setattr(Handler, f"do_{method}", Handler.pass_on)
        self._proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._proxy.daemon_threads = True
        threading.Thread(target=self._proxy.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._proxy.server_address[1]}"
        self.clear()

    def clear(self) -> None:
        """Empty the bucket, and forget all requests and faults."""
        self.faults: list[Callable[[Request], Fault | None]] = []
        self.requests: list[str] = []
        self.generations: dict[str, int] = {}
        self.received = self.sent = 0  # bytes of bodies
        self.parts = Parts(self.ask)
        self.ask("POST", "/moto-api/reset")
        self.ask("PUT", f"/{BUCKET}")

    def close(self) -> None:
        self._proxy.shutdown()

    def ask(self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Any:
        """Make a request past the proxy, and return the answer, which is read."""
        from werkzeug.test import Client

        # Who may do what is not tested: moto takes any key.
        signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request"}
        return Client(self._moto).open(path, method=method, data=body, headers={**signed, **(headers or {})})

    def put(self, name: str, what: Path | bytes) -> str:
        """Upload bytes, a file or a folder, and return the address."""
        if isinstance(what, Path) and what.is_dir():
            for path in what.rglob("*"):
                if path.is_file():
                    self.put(f"{name}/{path.relative_to(what).as_posix()}", path)
        else:
            self.ask("PUT", f"/{BUCKET}/{quote(name)}", what if isinstance(what, bytes) else what.read_bytes())
        return f"s3://{BUCKET}/{name}"

    def get(self, name: str) -> bytes | None:
        """Return the bytes of an object, None if there is none."""
        answer = self.ask("GET", f"/{BUCKET}/{quote(name)}")
        return answer.data if answer.status_code == 200 else None

    def names(self) -> list[str]:
        """Return the names of all objects."""
        text = self.ask("GET", f"/{BUCKET}?list-type=2").text
        return sorted(unquote(part.partition("</Key>")[0]) for part in text.split("<Key>")[1:])

    def uploads(self) -> list[str]:
        """Return the names of objects of which parts were sent, and neither completed nor aborted."""
        text = self.ask("GET", f"/{BUCKET}?uploads").text
        return sorted(unquote(part.partition("</Key>")[0]) for part in text.split("<Key>")[1:])

    def tags(self) -> dict[str, str]:
        """Return the tag of each object: those with the same one have the same bytes."""
        text = self.ask("GET", f"/{BUCKET}?list-type=2").text
        parts = [part.partition("<ETag>") for part in text.split("<Key>")[1:]]
        return {unquote(one.partition("</Key>")[0]): tag.partition("</ETag>")[0] for one, _, tag in parts}

    def download(self, name: str, folder: Path) -> Path:
        """Write all objects below a name to a folder."""
        for one in self.names():
            if one.startswith(f"{name}/"):
                path = folder / one.removeprefix(f"{name}/")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self.get(one) or b"")
        return folder

    def _fault(self, request: Request) -> Fault:
        fault = next((found for each in self.faults if (found := each(request)) is not None), Fault())
        refusal = None if fault.status or fault.refuses else self.parts.refusal(request)
        return fault if refusal is None else error(*refusal)

    def _translate(self, headers: dict[str, str], generation: str | None) -> None:
        """Make headers those that moto takes."""
        if span := headers.get("x-amz-copy-source-range"):
            headers["x-amz-copy-source-range"] = self.parts.taken(span)
        if copied := headers.pop("x-goog-copy-source", None):
            headers["x-amz-copy-source"] = f"/{copied}"
        if generation == "0":
            headers["if-none-match"] = "*"

    def _pass_on(self, handler: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(handler.path)
        headers = {name.lower(): value for name, value in handler.headers.items()}
        name = unquote(parts.path).removeprefix(f"/{BUCKET}").lstrip("/")
        request = Request(handler.command, name, parts.query, headers)
        body = handler.rfile.read(int(headers.get("content-length", 0)))
        self.requests.append(str(request))
        self.received += len(body)
        fault = self._fault(request)
        time.sleep(fault.seconds)
        if fault.refuses:
            handler.close_connection = True
            return
        if fault.damages and body:
            body = body[:-1] + bytes([body[-1] ^ 1])
        generation = headers.pop("x-goog-if-generation-match", None)
        self._translate(headers, generation)
        if generation not in (None, "0", str(self.generations.get(name))):
            fault = error(412, "PreconditionFailed")
        if fault.status:
            status, answered, data = fault.status, [("Content-Type", "application/xml")], fault.body
        else:
            answer = self.ask(handler.command, handler.path, body, headers)
            status, data = answer.status_code, answer.data
            answered = [(k, v) for k, v in answer.headers if k.lower() not in ("connection", "transfer-encoding")]
            if status == 200 and handler.command in ("PUT", "POST"):
                self.generations[name] = self.generations.get(name, 1000) + 1
            data = self.parts.answer(request, body, data) if status == 200 else data
            if handler.command == "PUT":
                answered = [(k, v) for k, v in answered if k.lower() != "content-length"]
            answered.append(("x-goog-generation", str(self.generations.get(name, 1000))))
        if fault.loses:
            handler.close_connection = True
            return
        if fault.changes and data:
            data = data[:-1] + bytes([data[-1] ^ 1])
        handler.send_response(status)
        if not any(k.lower() == "content-length" for k, _ in answered):
            answered.append(("Content-Length", str(len(data))))
        for key, value in answered:
            handler.send_header(key, value)
        handler.end_headers()
        if fault.drops:
            handler.wfile.write(data[: len(data) // 2])
            handler.close_connection = True
        else:
            handler.wfile.write(data)
            self.sent += len(data)


def use(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn the clients of this process, and of those that it starts, to the server."""
    for name, value in variables(server).items():
        monkeypatch.setenv(name, value)


def variables(server: S3Server) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "AKIDOFTESTS",
        "AWS_SECRET_ACCESS_KEY": "s3cretOfTests",
        "AWS_REGION": "us-east-1",
    }
