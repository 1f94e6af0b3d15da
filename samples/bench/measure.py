"""How one run of one tool is measured.

* Every run is a fresh process. The clock starts just before it is spawned and stops when its output is on disk: the
  process has exited, then *this harness* calls ``fsync`` on every output file and directory, whatever the tool did
  about that itself. A tool that has synced already pays nothing twice.
* Before the clock starts the old output is removed, ``sync`` empties the machine's write queue, and every input is
  read once, so each tool finds the same warm page cache and an idle disk.
* Peak RSS is the kernel's own high-water mark, ``ru_maxrss`` from ``wait4``. Linux starts that mark at the size of
  the process that forked, so nothing here may import torch: the harness is the floor (about 20 MiB) of the column.
* Peak anonymous memory (``RssAnon``, what cannot be dropped like a page of a mapped file) is sampled every 20
  milliseconds from ``/proc``, summed over the process and its descendants. Short peaks between samples are missed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SAMPLE_SECONDS = 0.02  # more often, and a tool that works on every core would lose time to it
MIB = 1 << 20
# Installed tools have their bytecode; a checkout must be allowed to write its own, once.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Run:
    """What one run cost. `seconds` is `process_seconds` (spawn to exit) plus `sync_seconds`."""

    seconds: float
    process_seconds: float
    sync_seconds: float
    user_seconds: float
    system_seconds: float
    peak_rss: int
    peak_anon: int | None
    output_bytes: int
    stdout: str
    error: str | None


def files_under(paths: Sequence[Path]) -> Iterator[Path]:
    """Every regular file at or below `paths`."""
    for path in paths:
        if path.is_dir():
            yield from (file for file in sorted(path.rglob("*")) if file.is_file())
        elif path.exists():
            yield path


def warm(paths: Sequence[Path]) -> None:
    """Read every byte of the inputs, so that they are in the page cache."""
    block = bytearray(4 * MIB)
    for file in files_under(paths):
        with open(file, "rb", buffering=0) as stream:
            while stream.readinto(block):
                pass


def remove(path: Path) -> None:
    """Delete a file or a directory that may not exist."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def logs_of(output: Path) -> Path:
    """Where what the tools print goes: not among the outputs, whose sync is timed."""
    return output.with_name(output.name + "-logs")


def remove_output(output: Path) -> None:
    """Delete what the last run left."""
    remove(output)
    remove(logs_of(output))


def sync_tree(root: Path) -> int:
    """fsync every file and directory under `root`, and `root` itself; return the bytes of its files."""
    total = 0
    for folder, _, names in os.walk(root):
        for path in [*(os.path.join(folder, name) for name in names), folder]:
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            total += os.fstat(handle).st_size if path != folder else 0
            os.close(handle)
    return total


class Sampler(threading.Thread):
    """Follows the anonymous memory of a process and its descendants while it lives."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.peak: int | None = None
        self.done = threading.Event()

    def run(self) -> None:
        """Sample until told to stop."""
        while not self.done.wait(SAMPLE_SECONDS):
            total = sum(anonymous_bytes(pid) for pid in descendants(self.pid))
            if total:
                self.peak = max(self.peak or 0, total)


def descendants(pid: int) -> list[int]:
    """`pid` and the processes below it, as far as the kernel lists them."""
    found = [pid]
    for parent in found:
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children") as stream:
                    found.extend(int(child) for child in stream.read().split())
        except OSError:
            continue  # it has exited, or this system has no such list
    return found


def anonymous_bytes(pid: int) -> int:
    """RssAnon of one process; 0 if it has gone."""
    try:
        with open(f"/proc/{pid}/status") as stream:
            for line in stream:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def run(
    command: Sequence[str],
    inputs: Sequence[Path],
    output: Path,
    stdout: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Run:
    """Run `command` once and measure it; `environment` has variables that it gets beside ours.

    `output` is a directory that is emptied first and synced afterwards; the command writes inside it. `stdout` names a
    file in it for a command whose standard output is the result, as with `cat`.
    """
    remove(output)
    output.mkdir(parents=True)
    logs = logs_of(output)
    logs.mkdir(exist_ok=True)
    warm(inputs)
    os.sync()
    with open(stdout or logs / "stdout", "wb") as out, open(logs / "stderr", "wb") as err:
        start = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=REPOSITORY,
            env={**ENVIRONMENT, **(environment or {})},
        )
        sampler = Sampler(process.pid)
        sampler.start()
        _, status, usage = os.wait4(process.pid, 0)
        exited = time.perf_counter()
        output_bytes = sync_tree(output)
        end = time.perf_counter()
    process.returncode = os.waitstatus_to_exitcode(status)
    sampler.done.set()
    sampler.join()
    error = None
    if process.returncode:
        lines = (logs / "stderr").read_text(errors="replace").strip().splitlines()
        error = f"exit {process.returncode}: {lines[-1] if lines else 'nothing on stderr'}"
    return Run(
        seconds=end - start,
        process_seconds=exited - start,
        sync_seconds=end - exited,
        user_seconds=usage.ru_utime,
        system_seconds=usage.ru_stime,
        peak_rss=usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        peak_anon=sampler.peak,
        output_bytes=output_bytes,
        stdout="" if stdout else (logs / "stdout").read_text(errors="replace"),
        error=error,
    )
