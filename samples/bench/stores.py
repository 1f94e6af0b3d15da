"""Object stores: checkpoints to and from a bucket on a server of this machine, beside torch's FsspecWriter and
FsspecReader over s3fs, in turns.

    python samples/bench/stores.py --size 1GiB --rounds 3 --peers FOLDER    # as `make bench` does
    python samples/bench/stores.py --size 2GiB --memory                     # only the memory of ckpttool, all formats

Each run is a new process, and the server (`object_server.py`) another one, which counts requests and bytes. Seconds are
those of the whole process, the processor's with it, and without imports those that a peer prints. The verdict is on
those of the processor, which depend less on what else runs. On a loopback without latency what clients compute is all
that takes time: a network hides some of it, and rewards requests that overlap. `--peers` has what
`pip install --target FOLDER s3fs aioboto3` puts there: s3fs needs another botocore than the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import measure
from checkpoint import Checkpoint, default_dir, ensure, output_dir, parse_size
from jobs import ckpttool
from measure import MIB, Run
from object_server import place_of

OURS = "ckpttool"
MOST_MEMORY = 200
FASTER = 1.5
PEERS = ("FsspecReader, FsspecWriter", "aioboto3")
VARIABLES = {"AWS_ACCESS_KEY_ID": "AKIDOFBENCH", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
VARIABLES |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}


@dataclass(frozen=True)
class Server:
    """The server, and the folder in which it keeps objects."""

    url: str
    folder: Path

    def counts(self) -> dict[str, int]:
        """What was asked for since the last call."""
        with urllib.request.urlopen(f"{self.url}/counts") as answer:
            counts: dict[str, int] = json.load(answer)
        return counts

    def put(self, source: Path, key: str) -> str:
        """Make objects of a file or a folder, and return their address."""
        for path in [source] if source.is_file() else sorted(source.iterdir()):
            name = key if source.is_file() else f"{key}/{path.name}"
            target = place_of(self.folder, "bucket", name)
            if not target.exists():
                os.link(path, target)  # the server writes no file in place
        return f"s3://bucket/{key}"

    def remove(self, prefix: str) -> None:
        """All objects below a key."""
        for path in place_of(self.folder, "bucket", "").iterdir():
            if path.name.startswith(place_of(self.folder, "bucket", prefix).name):
                path.unlink()


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    measure.remove(folder)
    command = [sys.executable, Path(__file__).with_name("object_server.py"), folder]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield Server(process.stdout.readline().strip(), folder)
    finally:
        process.stdin.close()
        process.wait()
        measure.remove(folder)


@dataclass(frozen=True)
class Job:
    """One piece of work: source and destination, and what is written."""

    name: str
    source: str
    target: str
    to: str
    inputs: tuple[Path, ...] = ()

    def ours(self) -> list[str]:
        words = ["convert", self.source, self.target, "--to", self.to, "--quiet"]
        return ckpttool(*words)

    def peers(self, tool: str) -> list[str]:
        return [sys.executable, str(Path(__file__).with_name("store_peers.py")), tool, self.source, self.target]


def compared(state: Checkpoint, server: Server, out: Path) -> list[Job]:
    """What torch's classes do, too."""
    dcp = server.put(state.tensors, "tensors")
    return [
        Job("bucket -> file", dcp, str(out / "state.pt"), "torch"),
        Job("file -> bucket", str(state.tensors_pt), "s3://bucket/out", "dcp", (state.tensors_pt,)),
        Job("bucket -> bucket", dcp, "s3://bucket/out", "dcp"),
    ]


def of_memory(state: Checkpoint, server: Server, out: Path) -> list[Job]:
    """Each format, from and to each place."""
    paths = {"dcp": state.weights, "torch": state.tensors_pt, "safetensors": state.tensors_safetensors}
    jobs = []
    for to, suffix in (("dcp", ""), ("torch", ".pt"), ("safetensors", ".safetensors")):
        there = server.put(paths[to], f"in{suffix}")
        # Into another format, or a copy of bytes would do: of `weights` all can be one safetensors file.
        other, other_there = paths["dcp"], server.put(paths["dcp"], "in")
        if to == "dcp":
            other, other_there = paths["safetensors"], server.put(paths["safetensors"], "in.safetensors")
        jobs += [
            Job(f"{to}: written, local -> bucket", str(other), f"s3://bucket/out{suffix}", to, (other,)),
            Job(f"{to}: written, bucket -> bucket", other_there, f"s3://bucket/out{suffix}", to),
            Job(f"{to}: read, bucket -> local", there, str(out / "out"), "safetensors" if to == "dcp" else "dcp"),
            Job(f"{to}: the same again, bucket -> bucket", there, f"s3://bucket/out{suffix}", to),
        ]
    jobs.append(Job("safetensors: shards, bucket -> bucket", "s3://bucket/in", "s3://bucket/out", "safetensors"))
    return jobs


@dataclass(frozen=True)
class Row:
    """One run, and what the server counted."""

    job: str
    tool: str
    run: Run
    counts: dict[str, int]

    @property
    def processor(self) -> float:
        return self.run.user_seconds + self.run.system_seconds

    @property
    def requests(self) -> int:
        return sum(number for kind, number in self.counts.items() if not kind.startswith("bytes"))

    def __str__(self) -> str:
        if self.run.error:
            return f"{self.job:42} {self.tool:28} {self.run.error}"
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(self.counts.items()) if not kind.startswith("bytes"))
        in_, out = (self.counts.get(f"bytes {way}", 0) / MIB for way in ("in", "out"))
        return (
            f"{self.job:42} {self.tool:28} {self.run.process_seconds:7.2f} s {self.processor:7.2f} s of processor "
            f"{self.run.peak_rss / MIB:7.0f} MiB  {self.requests:5} requests ({kinds})  "
            f"{out:7.1f} MiB out {in_:7.1f} MiB in"
        )


def measured(job: Job, tool: str, server: Server, out: Path, peers: Path | None) -> Row:
    """One run of one tool."""
    server.remove("out")
    server.counts()
    command = job.ours() if tool == OURS else job.peers(tool)
    more = VARIABLES | {"AWS_ENDPOINT_URL": server.url}
    more |= {"TMPDIR": str(out.parent)} | ({} if tool == OURS else {"PYTHONPATH": str(peers)})
    run = measure.run(command, job.inputs, out, environment=more)
    row = Row(job.name, tool, run, server.counts())
    print(row, flush=True)
    return row


def ratios(rows: list[Row], jobs: list[Job], peer: str) -> Iterator[str]:
    """How much longer a peer takes, by medians."""
    for job in jobs:
        mine = [row for row in rows if (row.job, row.tool) == (job.name, OURS) and not row.run.error]
        other = [row for row in rows if (row.job, row.tool) == (job.name, peer) and not row.run.error]
        if not mine or not other:
            yield f"not run  {job.name}: {peer}"
            continue
        seconds = statistics.median(row.run.process_seconds for row in mine)
        work = statistics.median(row.processor for row in mine)
        whole = statistics.median(row.run.process_seconds for row in other) / seconds
        all_work = statistics.median(row.processor for row in other) / work
        bare, bare_work = (statistics.median(float(row.run.stdout.split()[i]) for row in other) for i in (-2, -1))
        verdict = "pass" if bare_work / work >= (FASTER if peer == PEERS[0] else 1) else "FAIL"
        yield (
            f"{verdict:8} {job.name}: {peer} takes {whole:.2f}x as long, {bare / seconds:.2f}x without its imports, "
            f"and {all_work:.2f}x the processor time, {bare_work / work:.2f}x without them"
        )


def main() -> int:
    """Parse, make, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="", help="bytes of the training state (default 1GiB)")
    parser.add_argument("--rounds", default="", help="how often everything runs (default 3)")
    parser.add_argument("--dir", type=Path, default=default_dir(), help="work directory (default %(default)s)")
    parser.add_argument("--peers", type=Path, help="folder of packages that only the peers need")
    parser.add_argument("--memory", action="store_true", help="only the memory, of all formats")
    parser.add_argument("--only", default="", help="only the jobs whose name contains this")
    options = parser.parse_args()
    state = ensure(options.dir, parse_size(options.size or "1GiB"), 4)
    out = output_dir(options.dir)
    failed = False
    with serving(options.dir / "objects") as server:
        jobs = [job for job in of_memory(state, server, out) if options.only in job.name] if options.memory else []
        rows = [measured(job, OURS, server, out, None) for job in jobs]
        for row in rows:
            good = not row.run.error and row.run.peak_rss < MOST_MEMORY * MIB
            failed |= not good
            print(f"{'pass' if good else 'FAIL':8} {row.job}: {row.run.peak_rss / MIB:.0f} MiB of {MOST_MEMORY}")
        if not options.memory:
            jobs = [job for job in compared(state, server, out) if options.only in job.name]
            tools = [OURS, *(PEERS if options.peers else ())]
            rows = [
                measured(job, tool, server, out, options.peers)
                for _ in range(int(options.rounds or 3))
                for job in jobs
                for tool in tools
            ]
            lines = [line for peer in tools[1:] for line in ratios(rows, jobs, peer)]
            print("\n".join(lines))
            failed |= any(line.startswith("FAIL") for line in lines)
    measure.remove_output(out)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
