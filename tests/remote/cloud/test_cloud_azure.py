"""The same on Azure, as Azurite has it: `npm install -g azurite`."""

from __future__ import annotations

import base64
import hashlib
import hmac
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate
from typing import Any

import pytest
from support.paths import CHECKPOINTS

import ckpttool
from ckpttool.errors import OverwriteError, RemoteError

pytestmark = pytest.mark.long
# Of the emulator, for everybody.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
SAMPLES: list[tuple[str, str, dict[str, Any]]] = [
    ("torch/full/ckpt.pt", "az://run/a/dcp", {"to": "dcp", "to_world": 2}),
    ("dcp/fsdp2_w4/ckpt", "az://run/a/state", {"to": "safetensors"}),
    ("dcp/fsdp2_w4/ckpt", "az://run/a/all.pt", {}),
]


@pytest.fixture(scope="module")
def _port() -> Iterator[int]:
    pytest.importorskip("obstore")
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--silent", "--inMemoryPersistence", "--skipApiVersionCheck", "--blobPort", str(port)]
    process = subprocess.Popen([program, *words])
    try:
        for _ in range(100):
            try:
                create_container(port, "run")
                break
            except urllib.error.URLError:
                time.sleep(0.2)
        yield port
    finally:
        process.kill()
        process.wait()


def create_container(port: int, name: str) -> None:
    date, version = formatdate(usegmt=True), "2021-08-06"
    text = f"PUT{chr(10) * 12}x-ms-date:{date}\nx-ms-version:{version}\n/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    signature = base64.b64encode(hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()).decode()
    headers = {"x-ms-date": date, "x-ms-version": version, "Authorization": f"SharedKey {ACCOUNT}:{signature}"}
    url = f"http://127.0.0.1:{port}/{ACCOUNT}/{name}?restype=container"
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)).close()


@pytest.mark.parametrize(("src", "dst", "options"), SAMPLES, ids=lambda value: str(value)[-9:])
def test_there_and_back(
    src: str, dst: str, options: dict[str, Any], _port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = f"http://127.0.0.1:{_port}/{ACCOUNT}"
    text = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={endpoint};"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    local = CHECKPOINTS / src
    ckpttool.convert(local, dst, **options)
    assert ckpttool.diff(local, dst).same
    with pytest.raises(OverwriteError):
        ckpttool.convert(local, dst, **options)
    ckpttool.convert(local, dst, overwrite=True, **options)
    assert ckpttool.diff(local, dst).same and ckpttool.clean("az://run/a").verdict == "clean"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text.replace(KEY, f"A{KEY[1:]}"))
    with pytest.raises(RemoteError, match="do not allow this") as raised:
        ckpttool.inspect(dst)
    assert KEY[1:] not in str(raised.value)
