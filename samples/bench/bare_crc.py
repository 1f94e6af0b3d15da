"""The limit for `ckpttool verify`: every byte of some files through pread and crc32 on two threads, nothing else."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from zlib import crc32

BLOCK = 1 << 20
SHARE = 64 << 20


def main() -> None:
    """Read what the command line names, files or directories of files, and print the seconds that took; `--verify` is
    `ckpttool verify` instead, timed likewise without the start of Python."""
    words = sys.argv[1:]
    if words[0] == "--verify":
        from ckpttool.operations.verify import verify

        began = time.monotonic()
        if verify(words[1], threads=2).findings:
            sys.exit("not whole")
    else:
        began = time.monotonic()
        read_all(words)
    print(time.monotonic() - began)


def read_all(words: list[str]) -> None:
    """Two threads, each taking the next 64 MiB."""
    paths = [f for word in words for f in ([Path(word)] if Path(word).is_file() else sorted(Path(word).iterdir()))]
    work = [(path, at) for path in paths for at in range(0, path.stat().st_size, SHARE)]
    taking = threading.Lock()

    def read() -> None:
        buffer = memoryview(bytearray(BLOCK))
        while True:
            with taking:
                if not work:
                    return
                path, start = work.pop(0)
            fd, crc = os.open(path, os.O_RDONLY), 0
            for at in range(start, start + SHARE, BLOCK):
                n = os.preadv(fd, [buffer], at)
                crc = crc32(buffer[:n], crc)
                if n < BLOCK:
                    break
            os.close(fd)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
