"""Files that S3 assembles itself: their bytes pass this machine no more than they have to."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cli import environment, run, spawn
from support.folders import contents
from support.paths import CHECKPOINTS
from support.s3_server import Fault, Request, S3Server, error, variables
from transformers import LlamaConfig, LlamaForCausalLM

import ckpttool
from ckpttool.errors import CkptError, CorruptError, OverwriteError, RemoteError, UsageError
from ckpttool.storage import stores
from ckpttool.storage.assembled import SourceRun, divided, least_part

MIB = 1 << 20
DST = "s3://bucket/out"


def state(scale: int) -> dict[str, Any]:
    """Tensors of several parts, and tiny, empty and tied ones between them."""
    tiny = {f"tiny{i}": torch.rand(7 + i) for i in range(20)}
    model = {"a": torch.rand(scale * 24, 256), **tiny, "b": torch.rand(scale * 9, 1024), "e": torch.rand(0)}
    model |= {"c": torch.rand(20, 300), "d": torch.rand(scale * 4, 512), "tied": model["a"]}
    return {"model": model, "step": 3}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A state of 5 MiB in several formats. `bare` is of the library: it has no checksums."""
    folder = tmp_path_factory.mktemp("sources")
    torch.save(made := state(64), folder / "full.pt")
    ckpttool.convert(folder / "full.pt", folder / "ranks", to="dcp", to_world=2)
    ckpttool.convert(folder / "full.pt", folder / "model", to="safetensors", only="model", max_shard_size="2MiB")
    save_file({name: one for name, one in made["model"].items() if name != "tied"}, folder / "bare.safetensors")
    return {name: folder / name for name in ("full.pt", "ranks", "model", "bare.safetensors")}


@pytest.fixture
def small_parts(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, whose parts have 128 KiB at least."""
    for name, nbytes in {"LEAST": 128 << 10, "_SENT": 128 << 10, "_COPIED": 512 << 10}.items():
        monkeypatch.setattr(f"ckpttool.storage.assembled.{name}", nbytes)
    monkeypatch.setattr("ckpttool.remote.cloud.upload.PART", 256 << 10)
    monkeypatch.setattr("ckpttool.operations.write._WORTH_STREAMING", 1 << 10)
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 128 << 10)
    return server


def start(server: S3Server, *names: str, sources: dict[str, Path]) -> list[str]:
    """Upload sources, begin to count, and return their addresses."""
    addresses = [server.put(f"in/{name}", sources[name]) for name in names]
    server.received = server.sent = server.parts.copied = 0
    server.requests.clear()
    return addresses


def output(server: S3Server) -> list[str]:
    return [name for name in server.names() if not name.startswith("in/")]


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ranks": ("ranks", {"to": "safetensors"}),
    "model": ("ranks", {"to": "safetensors", "only": "model", "max_shard_size": "3MiB"}),
    "torch": ("full.pt", {"to": "safetensors"}),
    "shards": ("model", {"to": "safetensors", "max_shard_size": "4MiB"}),
    "to torch": ("ranks", {"to": "torch"}),
    "to dcp": ("full.pt", {"to": "dcp"}),
    "joined": ("ranks", {"to": "dcp", "to_world": 1}),
    "cast": ("ranks", {"to": "safetensors", "dtype": "model.a=bfloat16"}),
    "bare": ("bare.safetensors", {"to": "dcp"}),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("tells", [True, False], ids=["told", "read"])
@pytest.mark.parametrize(("name", "options"), CASES.values(), ids=CASES)
def test_it_is_what_is_written_here(
    name: str, options: dict[str, Any], tells: bool, sources: dict[str, Path], small_parts: S3Server, tmp_path: Path
) -> None:  # fmt: skip
    server, here = small_parts, tmp_path / "here"
    ckpttool.convert(sources[name], here, **options)
    (address,) = start(server, name, sources=sources)
    server.parts.tells_sums = tells
    result = ckpttool.convert(address, DST, **options)
    there = contents(server.download("out", tmp_path / "there")) or {".": server.get("out")}
    assert there == (contents(here) or {".": here.read_bytes()})
    assert server.uploads() == [] and result.sent.compared_bytes == result.sent.sent_bytes
    size = result.sent.sent_bytes
    if name == "bare.safetensors" and not tells:
        assert "neither the store nor the source has checksums" in result.notes[-1]
        assert server.received > size and result.sent.copied_bytes == 0
        return
    # Of a cast nothing can be copied, and all else is.
    assert result.sent.copied_bytes == server.parts.copied > size * (0.25 if "dtype" in options else 0.5)
    assert server.received < size - result.sent.copied_bytes + 64 * 1024
    assert result.sent.read_bytes == (0 if tells else result.sent.copied_bytes)


def test_an_object_of_parts_of_5_mib(server: S3Server, tmp_path: Path) -> None:
    torch.save(state(1 << 10), tmp_path / "full.pt")
    ckpttool.convert(tmp_path / "full.pt", tmp_path / "ranks", to="dcp", to_world=2)
    ckpttool.convert(tmp_path / "ranks", tmp_path / "all.safetensors", only="model")
    (address,) = start(server, "ranks", sources={"ranks": tmp_path / "ranks"})
    ckpttool.convert(address, "s3://bucket/all.safetensors", only="model")
    assert server.get("all.safetensors") == (tmp_path / "all.safetensors").read_bytes()
    # Of 71 MB.
    assert server.parts.copied > 57_000_000 and server.received < 14_000_000 and server.sent < 16_000_000
    (tmp_path / "got.safetensors").write_bytes(server.get("all.safetensors") or b"")
    assert torch.equal(
        load_file(tmp_path / "got.safetensors")["b"],
        torch.load(tmp_path / "full.pt", weights_only=True)["model"]["b"],
    )


def test_never(sources: dict[str, Path], small_parts: S3Server) -> None:
    (address,) = start(small_parts, "ranks", sources=sources)
    results = [
        run("convert", address, DST, "--to", "safetensors", "--in-store", "never"),
        run("reshard", address, f"{DST}-2", "--to-world", "1", "--in-store", "never"),
        run("export", address, f"{DST}-3", "--in-store", "never"),
    ]
    for result in results:
        assert result.exit_code == 0 and "inside the store" not in result.stdout + result.stderr
    assert not small_parts.parts.copied
    result = run("convert", address, f"{DST}-4", "--to", "safetensors")
    assert " inside the store, with the checksums that it told" in result.stdout
    with pytest.raises(UsageError, match=r"`in_store=\"sometimes\"` is neither"):
        ckpttool.convert(address, DST, to="dcp", in_store="sometimes")


def test_reshard(sources: dict[str, Path], small_parts: S3Server, tmp_path: Path) -> None:
    ckpttool.reshard(sources["ranks"], tmp_path / "three", to_world=3)
    (address,) = start(small_parts, "ranks", sources=sources)
    result = ckpttool.reshard(address, DST, to_world=3)
    assert contents(small_parts.download("out", tmp_path / "there")) == contents(tmp_path / "three")
    # Of the ranks' rows a third has no checksum alone, and the store tells that of its part.
    assert result.sent.copied_bytes > result.sent.sent_bytes // 2


@pytest.mark.parametrize("size", [None, "4MB"], ids=["one", "shards"])
def test_export(size: str | None, small_parts: S3Server, tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=2, vocab_size=1000, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    ckpttool.convert(tmp_path / "model", tmp_path / "run", to="dcp", to_world=2)
    ckpttool.export(tmp_path / "run", tmp_path / "here", assets=tmp_path / "model", max_shard_size=size, card=False)
    (address,) = start(small_parts, "run", sources={"run": tmp_path / "run"})
    for policy in ("auto", "never"):
        result = ckpttool.export(
            address,
            DST,
            assets=tmp_path / "model",
            max_shard_size=size,
            card=False,
            in_store=policy,
            overwrite=policy == "never",
        )
        there = contents(small_parts.download("out", tmp_path / policy))
        assert there == contents(tmp_path / "here")
        assert (result.sent.copied_bytes > result.sent.sent_bytes // 2) == (policy == "auto")
    assert small_parts.uploads() == []


def test_small_tensors_are_not_copied(small_parts: S3Server) -> None:
    address = small_parts.put("in", CHECKPOINTS / "dcp/fsdp2_w4/ckpt")
    result = ckpttool.convert(address, DST, to="safetensors")
    assert not [one for one in small_parts.requests if "upload" in one]
    assert result.sent.copied_bytes == 0 and not [note for note in result.notes if "store" in note]


def test_all_that_is_there_is_replaced(sources: dict[str, Path], small_parts: S3Server) -> None:
    address, other = start(small_parts, "ranks", "full.pt", sources=sources)
    ckpttool.convert(CHECKPOINTS / "torch/full/ckpt.pt", DST, to="safetensors")
    with pytest.raises(OverwriteError):
        ckpttool.convert(address, DST, to="safetensors")
    result = ckpttool.convert(address, DST, to="safetensors", overwrite=True)
    assert result.sent.copied_bytes and ckpttool.diff(address, DST).same
    ckpttool.convert(other, "s3://bucket/one.safetensors", only="model")
    ckpttool.convert(address, "s3://bucket/one.safetensors", only="model", overwrite=True)
    assert ckpttool.diff(address, "s3://bucket/one.safetensors", only="model").same
    for src in (address, DST, "s3://bucket/one.safetensors"):
        with pytest.raises(UsageError):
            ckpttool.convert(src, src, to="safetensors", overwrite=True)
    assert small_parts.uploads() == [] and not [name for name in output(small_parts) if "partial" in name]


# What goes wrong ------------------------------------------------------------------------------------------------------


def copies(request: Request) -> bool:
    return "x-amz-copy-source" in request.headers and "uploadId" in request.query


def begins(request: Request) -> bool:
    return request.method == "POST" and request.query.startswith("uploads") and "x-amz-checksum-type" in request.headers


def completes(request: Request) -> bool:
    return (
        request.method == "POST"
        and request.query.startswith("uploadId")
        and "boto" in request.headers["user-agent"].lower()
    )


def sends(request: Request) -> bool:
    return request.method == "PUT" and "uploadId" in request.query and not copies(request)


REFUSED: dict[str, Callable[[Request], Fault | None]] = {
    "parts": lambda r: error(501, "NotImplemented") if copies(r) else None,
    "checksums": lambda r: error(400, "InvalidRequest") if begins(r) else None,
    "rights": lambda r: error(403, "AccessDenied") if copies(r) else None,
}


@pytest.mark.parametrize("fault", REFUSED.values(), ids=REFUSED)
def test_what_the_store_does_not_copy_is_sent(
    fault: Callable[[Request], Fault | None], sources: dict[str, Path], small_parts: S3Server
) -> None:  # fmt: skip
    (address,) = start(small_parts, "ranks", sources=sources)
    small_parts.faults = [fault]
    result = ckpttool.convert(address, DST, to="safetensors", max_shard_size="3MiB")
    assert sum("copied nothing itself: the store refused it" in note for note in result.notes) == 1
    assert ckpttool.diff(address, DST).same and small_parts.uploads() == [] and len(output(small_parts)) > 3


def test_without_boto3(sources: dict[str, Path], small_parts: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    (address,) = start(small_parts, "ranks", sources=sources)
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    result = ckpttool.convert(address, DST, to="safetensors")
    assert "boto3 is not installed" in result.notes[-1] and ckpttool.diff(address, DST).same


def after(count: int, is_one: Callable[[Request], bool], then: Callable[[], Fault | None]) -> Callable[[Request], Any]:
    """A fault once so many requests of a kind were made."""
    seen = [0]

    def fault(request: Request) -> Fault | None:
        seen[0] += is_one(request)
        return then() if is_one(request) and seen[0] > count else None

    return fault


FAULTS: dict[str, Callable[[], Callable[[Request], Fault | None]]] = {
    "copy": lambda: after(2, copies, lambda: error(503, "SlowDown")),
    "copy dropped": lambda: after(2, copies, lambda: Fault(refuses=True)),
    "aborted meanwhile": lambda: after(2, copies, lambda: error(404, "NoSuchUpload")),
    "sent": lambda: after(1, sends, lambda: error(503, "SlowDown")),
    "sent damaged": lambda: after(0, sends, lambda: Fault(damages=True)),
    "completed": lambda: after(0, completes, lambda: error(500, "InternalError")),
    "expired": lambda: after(1, copies, lambda: error(400, "ExpiredToken")),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("to", ["safetensors", "one"])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_faults(
    fault: Callable[[], Callable[[Request], Fault | None]], to: str, sources: dict[str, Path], small_parts: S3Server
) -> None:  # fmt: skip
    """An error, and nothing is left; or the right result."""
    (address,) = start(small_parts, "ranks", sources=sources)
    small_parts.faults = [fault()]
    dst, options = (DST, {"to": "safetensors"}) if to != "one" else (f"{DST}.safetensors", {"only": "model"})
    begun = time.monotonic()
    try:
        ckpttool.convert(address, dst, **options)
    except RemoteError as failed:
        left = [name for name in output(small_parts) if not name.startswith(".out")]
        assert "s3cret" not in str(failed) and left == []
    else:
        assert ckpttool.diff(address, dst, **({"only": "model"} if to == "one" else {})).same
    assert time.monotonic() - begun < 30
    small_parts.faults.clear()
    ckpttool.convert(address, dst, overwrite=bool(output(small_parts)), **options)
    assert small_parts.uploads() == [] and len(output(small_parts)) == (1 if to == "one" else 2)


def test_an_answer_that_is_lost(sources: dict[str, Path], small_parts: S3Server) -> None:
    (address,) = start(small_parts, "ranks", sources=sources)
    lost = [Fault(loses=True)]
    small_parts.faults = [lambda request: lost.pop() if completes(request) and lost else None]
    ckpttool.convert(address, "s3://bucket/one.safetensors", only="model")
    assert not lost and ckpttool.diff(address, "s3://bucket/one.safetensors", only="model").same


@pytest.mark.parametrize("tells", [True, False], ids=["told", "read"])
def test_a_source_that_changes(tells: bool, sources: dict[str, Path], small_parts: S3Server) -> None:
    server = small_parts
    (address,) = start(server, "ranks", sources=sources)
    server.parts.tells_sums = tells
    name = "in/ranks/__1_0.distcp"
    data = bytearray(server.get(name) or b"")
    data[len(data) // 2] ^= 1

    before, refused = server.tags()[name], list[bool]()

    def change(request: Request) -> None:
        if begins(request):
            server.put(name, bytes(data))
        if copies(request) and unquote(request.headers["x-amz-copy-source"]).endswith(name):
            refused.append(unescape(before) == request.headers.get("x-amz-copy-source-if-match"))

    server.faults = [change]
    with pytest.raises(RemoteError, match=r"__1_0.distcp` changed while it was being read"):
        ckpttool.convert(address, DST, to="safetensors")
    assert refused and all(refused)
    assert output(server) == [] and server.uploads() == []


@pytest.mark.sweep(2)
@pytest.mark.parametrize("tells", [True, False], ids=["told", "read"])
@pytest.mark.parametrize("one", [True, False], ids=["file", "folder"])
def test_a_source_that_is_damaged(one: bool, tells: bool, sources: dict[str, Path], small_parts: S3Server) -> None:
    """It is found without being read, or after it was copied: by the checksum of its writer."""
    server = small_parts
    (address,) = start(server, "ranks", sources=sources)
    server.parts.tells_sums = tells
    data = bytearray(server.get("in/ranks/__1_0.distcp") or b"")
    data[len(data) // 2] ^= 1
    server.put("in/ranks/__1_0.distcp", bytes(data))
    with pytest.raises(CorruptError, match="but the writer recorded"):
        ckpttool.convert(address, DST + ".safetensors" * one, to="safetensors", only="model")
    assert server.parts.copied or not tells
    assert output(server) == [] and server.uploads() == []


@pytest.mark.sweep(2)
@pytest.mark.parametrize("tells", [True, False], ids=["told", "read"])
@pytest.mark.parametrize("one", [True, False], ids=["file", "folder"])
def test_a_store_that_copies_something_else(
    one: bool, tells: bool, sources: dict[str, Path], small_parts: S3Server
) -> None:  # fmt: skip
    server = small_parts
    (address,) = start(server, "ranks", sources=sources)
    server.parts.tells_sums = tells
    changed: list[str] = []

    def shift(request: Request) -> None:
        if copies(request) and not changed:
            first, last = (int(part) for part in request.headers["x-amz-copy-source-range"][6:].split("-"))
            changed.append(request.headers["x-amz-copy-source-range"])
            server.parts.instead[changed[0]] = f"bytes={first - 8}-{last - 8}"

    server.faults = [shift]
    with pytest.raises(RemoteError, match="the store has copied something else"):
        ckpttool.convert(address, DST + ".safetensors" * one, to="safetensors", only="model")
    assert changed and output(server) == [] and server.uploads() == []


def test_two_writers(sources: dict[str, Path], small_parts: S3Server) -> None:
    """Of two that write one object, one wins, and the other is told."""
    server = small_parts
    (address,) = start(server, "ranks", sources=sources)
    told: list[CkptError] = []

    def write(name: str) -> None:
        try:
            ckpttool.convert(address, "s3://bucket/one.safetensors", only="model")
        except CkptError as failed:
            told.append(failed)

    both = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert [type(one) for one in told] == [OverwriteError]
    assert ckpttool.diff(address, "s3://bucket/one.safetensors", only="model").same and server.uploads() == []


def test_an_object_that_somebody_else_has_made_meanwhile(sources: dict[str, Path], small_parts: S3Server) -> None:
    (address,) = start(small_parts, "ranks", sources=sources)
    small_parts.faults = [after(0, completes, lambda: small_parts.put("one.safetensors", b"theirs") and None)]
    with pytest.raises(OverwriteError, match="another run has written it"):
        ckpttool.convert(address, "s3://bucket/one.safetensors", only="model")
    assert small_parts.get("one.safetensors") == b"theirs" and small_parts.uploads() == []


# Parts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_parts_are_those_that_s3_takes(seed: int) -> None:
    """Parts of 5 MiB to 5 GiB, at most 10,000, whose bytes are all of the file in order, copied where they may be."""
    rng = random.Random(seed)
    place = stores.locate("/")
    scale = rng.choice([100, MIB, 20 * MIB, 3 << 30, 400 << 30])
    at, runs = rng.randrange(0, 9000), list[SourceRun]()
    for _ in range(rng.choice([1, 3, 300])):
        nbytes = rng.randrange(1, scale)
        runs.append(SourceRun(at, nbytes, place, rng.randrange(1 << 40)))
        at += nbytes + rng.choice([0, 0, 64, 6 * MIB])
    size = min(at + rng.choice([0, 100]), 5 << 40)
    runs = [one for one in runs if one.start + one.nbytes <= size]
    parts, least = divided(size, runs), least_part(size)
    assert len(parts) <= 10_000 and all(part.nbytes <= 5 << 30 for part in parts)
    assert all(part.nbytes >= max(least, 5 * MIB) for part in parts[:-1])
    end = 0
    for part in parts:
        assert part.start == end
        end += part.nbytes
        if part.source is not None:
            run = runs[part.run]
            assert run.start <= part.start and part.start + part.nbytes <= run.start + run.nbytes
            assert part.offset - part.start == run.offset - run.start
    assert end == size
    # What is long enough is copied, but for what makes the part before it long enough.
    copied = {part.run for part in parts if part.source is not None}
    assert all(number in copied for number, run in enumerate(runs) if run.nbytes >= 2 * least)


# Kills ----------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_runs_that_are_killed_at_random(server: S3Server, tmp_path: Path) -> None:
    made = state(1 << 10)
    del made["model"]["tied"]  # the index alone knows of it
    torch.save(made, tmp_path / "full.pt")
    ckpttool.convert(tmp_path / "full.pt", tmp_path / "ranks", to="dcp", to_world=2)
    address = server.put("in", tmp_path / "ranks")
    how: dict[str, Any] = {"to": "safetensors", "only": "model", "max_shard_size": "40MiB"}
    ckpttool.convert(address, DST, **how)
    expected = output(server)
    for name in expected:
        server.ask("DELETE", f"/bucket/{name}")
    rng, seen = random.Random(3), set[str]()
    options = ["--to", "safetensors", "--only", "model", "--max-shard-size", "40MiB"]
    for _ in range(30):
        reached, most = threading.Event(), rng.randrange(8, 70)
        server.requests.clear()
        server.faults = [lambda _, e=reached, n=most: (len(server.requests) > n and e.set()) or Fault(seconds=0.01)]
        process = spawn("convert", address, DST, *options, env=environment(**variables(server)))
        while process.poll() is None and not reached.is_set():
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        time.sleep(0.3)
        server.faults.clear()
        is_there = "out/model.safetensors.index.json" in server.names()
        seen.add("whole" if is_there else f"{min(1, len(server.uploads()))} uploads")
        # Of a model whose last shard is there, only the index is missing.
        with suppress(CkptError) if not is_there else nullcontext():
            ckpttool.inspect(DST)
            assert ckpttool.diff(address, DST, only="model").same
        ckpttool.convert(address, DST, **how, overwrite=is_there)
        assert ckpttool.diff(address, DST, only="model").same and server.uploads() == []
        assert output(server) == expected
        for name in output(server):
            server.ask("DELETE", f"/bucket/{name}")
    print(sorted(seen))
    assert {"0 uploads", "1 uploads"} <= seen
