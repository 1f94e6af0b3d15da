"""The same on Google Cloud Storage: the client of the cloud, and a server that translates what is its own.

gcp-storage-emulator does not have the XML API that obstore uses: no tags, `HEAD`, listings, parts or deletions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paths import CHECKPOINTS
from support.s3_server import Fault, Request, S3Server, error

import ckpttool
from ckpttool.errors import OverwriteError, RemoteError

FULL = str(CHECKPOINTS / "torch/full/ckpt.pt")
DCP = str(CHECKPOINTS / "dcp/fsdp2_w4/ckpt")
DST = "gs://bucket/out/step-3"
WAYS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dcp": (FULL, DST, {"to": "dcp", "to_world": 2}),
    "state": (DCP, DST, {"to": "safetensors"}),
    "file": (DCP, f"{DST}.pt", {}),
}


@pytest.fixture
def google(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    names = ("client_email", "private_key", "private_key_id")
    key = {"gcs_base_url": server.url, "disable_oauth": True, **dict.fromkeys(names, "")}
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(key))
    monkeypatch.setenv("GOOGLE_BASE_URL", server.url)
    return server


@pytest.mark.parametrize(("src", "dst", "options"), WAYS.values(), ids=WAYS)
def test_there_and_back(src: str, dst: str, options: dict[str, Any], google: S3Server) -> None:
    ckpttool.convert(src, dst, **options)
    assert ckpttool.diff(src, dst).same and ckpttool.verify(dst).exit_code == 0
    with pytest.raises(OverwriteError):
        ckpttool.convert(src, dst, **options)
    other = FULL if src == DCP else DCP
    options = {name: value for name, value in options.items() if name != "to_world"}
    ckpttool.convert(other, dst, overwrite=True, **options)
    assert ckpttool.diff(other, dst).same
    assert ckpttool.clean("gs://bucket/out").verdict == "clean"
    assert not [name for name in google.names() if "partial" in name]


def test_a_large_object_is_sent_in_parts(google: S3Server, tmp_path: Path) -> None:
    torch.save({"w": torch.rand(6 << 20)}, tmp_path / "large.pt")
    ckpttool.convert(tmp_path / "large.pt", DST, to="dcp")
    assert len([one for one in google.requests if "?partNumber" in one]) == 4
    assert ckpttool.diff(tmp_path / "large.pt", DST).same


def test_of_two_writers_one_wins(google: S3Server) -> None:
    """By the generations of objects, on which the conditions are."""

    def put(request: Request) -> Fault | None:
        if request.method == "PUT" and request.name.endswith(".metadata"):
            google.put("out/step-3/.metadata", b"theirs")
            google.generations[request.name] = 7
        return None

    google.faults = [put]
    with pytest.raises(OverwriteError, match="another run has written it"):
        ckpttool.convert(FULL, DST, to="dcp")
    google.faults.clear()
    assert google.get("out/step-3/.metadata") == b"theirs"
    with pytest.raises(OverwriteError):
        ckpttool.convert(FULL, DST, to="dcp")


def test_the_claim_of_a_run_that_ended_is_taken_over(google: S3Server) -> None:
    google.faults = [lambda r: error(503, "SlowDown") if r.method == "PUT" and r.name.endswith(".metadata") else None]
    with pytest.raises(RemoteError, match="failed several times"):
        ckpttool.convert(FULL, DST, to="dcp", resume=True)
    assert "out/.step-3.partial-0" in google.names()
    google.faults.clear()
    ckpttool.convert(FULL, DST, to="dcp", resume=True)
    assert ckpttool.diff(FULL, DST).same and not [name for name in google.names() if "partial" in name]
