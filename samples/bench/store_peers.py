"""Checkpoints in buckets with torch: `python store_peers.py TOOL SRC DST` does one job and prints its seconds, of
the clock and of the processor.

FsspecReader, FsspecWriter   torch's own classes, over s3fs
aioboto3                     torch's reader and writer over whole objects, which aioboto3 moves in parts at once
"""

from __future__ import annotations

import asyncio
import io
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict


class _Kept(io.BytesIO):
    """A stream whose bytes are there when it was closed."""

    def close(self) -> None:
        pass


class Objects(FileSystemBase):  # type: ignore[misc]
    """Whole objects as streams."""

    def _do(self, verb: str, stream: io.BytesIO, path: str) -> None:
        import aioboto3  # type: ignore[import-not-found]

        bucket, _, key = path.removeprefix("s3://").partition("/")

        async def do() -> None:
            async with aioboto3.Session().client("s3") as client:
                move: Callable[..., Awaitable[None]] = getattr(client, verb)
                await (move(stream, bucket, key) if verb == "upload_fileobj" else move(bucket, key, stream))

        asyncio.run(do())

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.BytesIO]:
        stream = _Kept()
        if "r" in mode:
            self._do("download_fileobj", stream, str(path))
            stream.seek(0)
        yield stream
        if "w" in mode:
            # It would close it.
            self._do("upload_fileobj", io.BytesIO(stream.getbuffer()), str(path))

    def concat_path(self, path: Any, suffix: str) -> str:
        return f"{path}/{suffix}"

    def init_path(self, path: Any) -> str:
        return str(path)

    def rename(self, path: Any, new_path: Any) -> None:
        with self.create_stream(path, "rb") as old, self.create_stream(new_path, "wb") as new:
            new.write(old.getbuffer())

    def mkdir(self, path: Any) -> None:
        pass

    def exists(self, path: Any) -> bool:
        return False

    def rm_file(self, path: Any) -> None:
        pass

    def ls(self, path: Any) -> list[str]:
        raise NotImplementedError

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def reader(tool: str, path: str) -> Any:
    if tool != "aioboto3":
        return FsspecReader(path)
    made = FileSystemReader("unused")
    made.fs, made.path = Objects(), path
    return made


def writer(tool: str, path: str) -> Any:
    if tool != "aioboto3":
        return FsspecWriter(path)
    made = FileSystemWriter("unused", sync_files=False)
    made.fs, made.path = Objects(), path
    return made


def main(tool: str, source: str, target: str) -> None:
    """Load everything, and save it."""
    import fsspec

    fsspec.filesystem("s3" if tool != "aioboto3" else "memory")
    start, used = time.perf_counter(), time.process_time()
    state: dict[str, Any] = {}
    if source.startswith("s3://"):
        _load_state_dict(state, reader(tool, source), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    else:
        state = torch.load(source, mmap=True, weights_only=True)
    if target.startswith("s3://"):
        dcp.save(state, storage_writer=writer(tool, target), no_dist=True)
    else:
        torch.save(state, target)
    print(time.perf_counter() - start, time.process_time() - used)


if __name__ == "__main__":
    main(*sys.argv[1:])
