"""Large files are sent to a bucket while they are filled, and no copy of them is on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.folders import contents
from support.s3_server import Fault, Request, S3Server, error
from support.simulated_ranks import cut, mesh, save
from torch.distributed.tensor import Shard

import ckpttool
from ckpttool.errors import CkptError, CorruptError, OverwriteError, ReadError, RemoteError
from ckpttool.remote.cloud import address
from ckpttool.storage.streamed import StreamedFile

PART = 1 << 20


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A state of 11 MiB, with tensors across several parts and tiny ones between them: in one file, in the shards of
    ranks, and in columns."""
    folder = tmp_path_factory.mktemp("sources")
    tiny = {f"tiny{i}": torch.rand(7 + i) for i in range(40)}
    model = {
        "a": torch.rand(1500, 512),
        **tiny,
        "b": torch.rand(3000, 512),
        "c": torch.rand(100, 300),
        "e": torch.rand(0),
    }
    torch.save({"model": model, "step": 3, "nested": {"list": [1, "two"]}}, folder / "full.pt")
    ckpttool.convert(folder / "full.pt", folder / "ranks", to="dcp", to_world=3)
    wide = {name: model[name] for name in ("a", "b", "c")}
    save(folder / "columns", 2, lambda rank: {name: cut(one, mesh(2), Shard(1)) for name, one in wide.items()})
    return {name: str(folder / name) for name in ("full.pt", "ranks", "columns")}


@pytest.fixture
def streams(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the files that were sent so, in small parts."""
    monkeypatch.setattr("ckpttool.remote.cloud.upload.PART", PART)
    monkeypatch.setattr("ckpttool.operations.write._WORTH_STREAMING", 1 << 10)
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
    sizes: list[int] = []
    fill = StreamedFile.fill
    monkeypatch.setattr(StreamedFile, "fill", lambda file: (sizes.append(file.size), fill(file))[1])
    return sizes


CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "dcp": ("full.pt", {"to": "dcp"}, 1),
    "joined": ("ranks", {"to": "dcp", "to_world": 2}, 2),
    "columns": ("columns", {"to": "dcp"}, 2),
    "cast": ("ranks", {"to": "dcp", "dtype": "bfloat16"}, 3),
    "ranks": ("full.pt", {"to": "fsdp1", "only": "model", "to_world": 2}, 2),
}


@pytest.mark.parametrize(("name", "options", "count"), CASES.values(), ids=CASES)
def test_directories(
    name: str,
    options: dict[str, Any],
    count: int,
    sources: dict[str, str],
    streams: list[int],
    server: S3Server,
    tmp_path: Path,
) -> None:
    ckpttool.convert(sources[name], tmp_path / "here", **options)
    result = ckpttool.convert(sources[name], "s3://bucket/there", **options)
    assert contents(server.download("there", tmp_path / "got")) == contents(tmp_path / "here")
    assert len(streams) == count and result.file_bytes == 0
    assert result.sent.compared_bytes == result.sent.sent_bytes
    # What is the same is not sent again: it is compared with what is filled here.
    streams.clear()
    server.requests.clear()
    again = ckpttool.convert(sources[name], "s3://bucket/there", **options, overwrite=True)
    assert {file.status for file in again.sent.files if file.nbytes > PART} == {"unchanged"} and not streams
    assert not [one for one in server.requests if "?partNumber" in one]


@pytest.mark.parametrize("name", ["full.pt", "ranks", "columns"])
def test_one_file(
    name: str,
    sources: dict[str, str],
    streams: list[int],
    server: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From a bucket to a bucket, too; nothing of it is on this disk."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    most = [0]

    def look(request: Request) -> Fault | None:
        found = [path.stat().st_blocks for path in (tmp_path / "tmp").rglob("*") if path.is_file()]
        most[0] = max(most[0], sum(found) * 512)
        return None

    server.faults = [look]
    ckpttool.convert(sources[name], tmp_path / "here.pt")
    address = server.put("in/full.pt" if name.endswith(".pt") else "in", Path(sources[name]))
    for src in (sources[name], address):
        streams.clear()
        ckpttool.convert(src, "s3://bucket/out.pt", overwrite=True)
        assert server.get("out.pt") == (tmp_path / "here.pt").read_bytes() and len(streams) == 1
        assert not [one for one in server.names() if "partial" in one]
        server.put("out.pt", b"of another size")
    assert most[0] < PART


@pytest.mark.sweep(3)
@pytest.mark.parametrize("to", ["torch", "dcp"])
@pytest.mark.parametrize("kind", ["damage", "503", "expired", "replaced", "wrong"])
def test_what_fails(
    kind: str, to: str, sources: dict[str, str], streams: list[int], server: S3Server, tmp_path: Path
) -> None:
    """In the middle: an error of either side ends the other, and nothing is there, also no part."""
    import boto3  # type: ignore[import-untyped]

    data = bytearray(Path(sources["full.pt"]).read_bytes())
    if kind == "damage":
        data[len(data) * 2 // 3] ^= 1
    source = tmp_path / "full.pt"
    source.write_bytes(data)
    dst = "s3://bucket/out.pt" if to == "torch" else "s3://bucket/out"

    def decide(request: Request) -> Fault | None:
        if "partNumber=5" in request.query:
            if kind == "replaced":
                with open(source, "r+b") as stream:  # at no time is it shorter
                    stream.write(data)
            faults = {
                "503": error(503, "SlowDown"),
                "expired": error(403, "ExpiredToken"),
                "wrong": Fault(damages=True),
            }
            return faults.get(kind)
        return None

    server.faults = [decide]
    errors: dict[str, type[CkptError]] = {"damage": CorruptError, "replaced": ReadError}
    with pytest.raises(errors.get(kind, RemoteError)) as raised:
        ckpttool.convert(source, dst, to=to)
    said = {"damage": "CRC", "503": "failed several times", "expired": "expired", "replaced": "changed while"}
    assert said.get(kind, "is not what was sent") in raised.value.message
    server.faults.clear()
    assert server.names() == [] and len(streams) == 1
    assert not boto3.client("s3").list_multipart_uploads(Bucket="bucket").get("Uploads")


FAULTS = {
    "503": error(503, "SlowDown"),
    "500": error(500, "InternalError"),
    "cut": Fault(drops=True),
    "refused": Fault(refuses=True),
    "lost": Fault(loses=True),
    "damaged": Fault(damages=True),
    "changed": Fault(changes=True),
    "412": error(412, "PreconditionFailed"),
    "409": error(409, "ConditionalRequestConflict"),
    "404": error(404, "NoSuchUpload"),
    "expired": error(403, "ExpiredToken"),
    "skewed": error(403, "RequestTimeTooSkewed"),
    "error in 200": error(200, "InternalError"),
    "nothing": Fault(200),
    "page": Fault(200, b"<html>hello</html>"),
}
PLACES: dict[str, Callable[[Request], bool]] = {
    "list": lambda r: r.method == "GET" and "list-type" in r.query,
    "claim": lambda r: r.method == "PUT" and r.name.endswith(".partial-0"),
    "look": lambda r: r.method == "GET" and r.name.endswith(".partial-0"),
    "begin": lambda r: r.method == "POST" and r.query.startswith("uploads"),
    "part": lambda r: r.method == "PUT" and "partNumber=2" in r.query,
    "last part": lambda r: r.method == "PUT" and "partNumber=5" in r.query,
    "complete": lambda r: r.method == "POST" and r.query.startswith("uploadId"),
    "small": lambda r: r.method == "PUT" and r.name.endswith("integrity.json"),
    "index": lambda r: r.method == "PUT" and r.name.endswith(".metadata"),
    "delete": lambda r: r.method == "POST" and r.query.startswith("delete"),
}
PASSING = ("503", "500", "cut", "refused", "lost")


@pytest.mark.sweep(32)
@pytest.mark.parametrize("lasts", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", FAULTS)
def test_every_fault_everywhere(
    kind: str, place: str, lasts: bool, sources: dict[str, str], streams: list[int], server: S3Server
) -> None:
    """While two files are sent: the result is right or an error says why, and what is left is nothing, or a complete
    checkpoint, or what the next run removes."""
    src, dst = sources["full.pt"], "s3://bucket/out/step-3"
    reached = [0]

    def decide(request: Request) -> Fault | None:
        if not PLACES[place](request):
            return None
        reached[0] += 1
        return FAULTS[kind] if lasts or reached[0] == 1 else None

    server.faults = [decide]
    error: CkptError | None = None
    try:
        ckpttool.convert(src, dst, to="dcp", to_world=2)
    except CkptError as raised:
        error = raised
    server.faults.clear()
    assert reached[0] and not server.uploads()
    assert lasts or kind not in PASSING or error is None, error
    names = server.names()
    is_complete = "out/step-3/.metadata" in names
    assert error is not None or is_complete
    if is_complete:
        assert ckpttool.diff(src, dst).same
        assert error is None or "is complete" in str(error.hint)
    elif names:
        assert error is not None and "ckpttool clean s3://bucket/out --yes" in str(error.hint)
    ckpttool.convert(src, dst, to="dcp", to_world=2, overwrite=is_complete)
    assert len(server.names()) == 4 and not server.uploads() and ckpttool.diff(src, dst).same


@pytest.mark.parametrize("name", [".metadata", pytest.param("integrity.json", marks=pytest.mark.long)])
def test_what_arrives_late(
    name: str, sources: dict[str, str], streams: list[int], server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request was given up, and the store carries it out later: an index completes what is there, and all else is
    removed by the next run."""
    src, dst = sources["full.pt"], "s3://bucket/out/step-3"
    monkeypatch.setenv("CKPTTOOL_CLOUD_TIMEOUT", "1")
    monkeypatch.setattr(address, "RETRIES", 1)
    server.faults = [lambda r: Fault(seconds=4) if r.method == "PUT" and r.name.endswith(name) else None]
    with pytest.raises(RemoteError, match="does not answer in time") as raised:
        ckpttool.convert(src, dst, to="dcp", to_world=2)
    hint = "may still become complete" if name == ".metadata" else "removes what arrives late"
    assert hint in str(raised.value.hint) and "out/.step-3.partial-0" in server.names()
    until = time.monotonic() + 30
    while f"out/step-3/{name}" not in server.names():
        assert time.monotonic() < until
        time.sleep(0.1)
    server.faults.clear()
    time.sleep(2)  # what was asked for again
    if name == ".metadata":
        assert ckpttool.diff(src, dst).same
        with pytest.raises(OverwriteError):
            ckpttool.convert(src, dst, to="dcp", to_world=2)
    else:
        ckpttool.convert(src, dst, to="dcp", to_world=2)
    assert ckpttool.diff(src, dst).same and len(server.names()) == 4 and not server.uploads()


@pytest.mark.parametrize("to", ["dcp", "torch", "safetensors"])
def test_a_source_that_changes_in_its_bucket(
    to: str, streams: list[int], server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTTOOL_CLOUD_MEMORY", "16MiB")
    torch.save({"a": torch.rand(3 << 20), "b": torch.rand(3 << 20)}, tmp_path / "src.pt")
    data = (tmp_path / "src.pt").read_bytes()
    src = server.put("in/src.pt", data)
    reads = [0]

    def change(request: Request) -> Fault | None:
        if request.method == "GET" and request.name == "in/src.pt":
            reads[0] += 1
            if reads[0] == 4:
                server.put("in/src.pt", data[:-3_000_000] + b"\1" + data[-2_999_999:])
        return None

    server.faults = [change]
    with pytest.raises(RemoteError, match=r"in/src.pt` changed while it was being read"):
        ckpttool.convert(src, f"s3://bucket/out{'.pt' * (to == 'torch')}", to=to)
    assert server.names() == ["in/src.pt"] and not server.uploads()


@pytest.mark.parametrize("count", range(1, 5))
def test_a_file_that_is_given_up_while_it_is_filled(
    count: int, sources: dict[str, str], streams: list[int], server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sender has failed: that is raised where it is filled, too."""
    write, calls = StreamedFile.write_all, [0]

    def stopping(file: StreamedFile, path: str, pieces: Any) -> None:
        write(file, path, pieces)
        calls[0] += 1
        if calls[0] != count:
            return
        with suppress(RemoteError), file.failing():
            raise RemoteError("the sender failed", hint="run the command again", file="x")

    monkeypatch.setattr(StreamedFile, "write_all", stopping)
    with pytest.raises(RemoteError, match="the sender failed"):
        ckpttool.convert(sources["full.pt"], "s3://bucket/out", to="dcp")
    assert server.names() == [] and not server.uploads()
