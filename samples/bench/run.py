"""The benchmark behind `make bench`: our tool, the tools people use today and `cat`, in one run on one machine.

Every contender runs in its own process and is timed from spawn to output on disk; the rounds are interleaved (A B C,
A B C, ...), so that whatever else the machine does falls on all of them. How one run is measured: `measure`. What is
converted: `make_checkpoint`. Who takes part: `jobs`. A result that is not right (`check`) counts as a failure.

Ratios are of medians over the rounds. MB/s counts the tensors' bytes, 10^6 to the MB. "in-process" is the peer's own
job without its imports and without the sync; it is shown, never compared.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import measure
from checkpoint import Checkpoint, clean, default_dir, ensure, output_dir, parse_size
from jobs import ENGINES, IMPORTS, LAUNCHED, OURS, PEER, SURE, TRAINING, VERIFIED, Contender, contenders
from measure import MIB, Run, files_under

Key = tuple[str, str]
WRITES_CRC = (
    "dcp -> torch", "safetensors -> torch", "torch -> dcp", "safetensors -> dcp", "dcp -> dcp, 2 ranks",
    "rank files -> dcp", "dcp -> rank files",
)  # fmt: skip
# How many times as long as `cat` an export with operations on each tensor may take.
OPERATIONS = {
    "transpose": 1.6, "rows": 1.4, "rows back": 1.4, "interleave": 1.4,
    "split": 1.4, "unstack": 1.4, "stack": 1.6, "stack twice": 1.6,
}  # fmt: skip
THREE_TIMES = ("dcp -> torch", "torch -> dcp", "accelerate -> model", "rank files -> model", "reshard onto 8", "export")


class Results:
    """The rounds of every contender, and the figures made of them."""

    def __init__(self, members: Sequence[Contender], facts: dict[str, int]) -> None:
        self.members = members
        whole = facts["bytes"]
        self.nbytes = {"all": whole, "bfloat16": whole, "float32": whole, "model": facts["model_bytes"], "none": 0}
        self.nbytes["experts"] = facts["expert_bytes"]
        self.runs: dict[Key, list[Run]] = {(member.job, member.tool): [] for member in members}
        self.errors: dict[Key, str] = {}

    def median(self, job: str, tool: str) -> float | None:
        """Median seconds, or None for who failed or did not run."""
        runs = self.runs.get((job, tool))
        return statistics.median(run.seconds for run in runs) if runs and (job, tool) not in self.errors else None

    def processor(self, job: str, tool: str) -> float | None:
        """Median seconds of processor time, of the process and all that it has started."""
        if self.median(job, tool) is None:
            return None
        return statistics.median(run.user_seconds + run.system_seconds for run in self.runs[job, tool])

    def memory(self, job: str, tool: str) -> float | None:
        """Most bytes of one process, of it and all that it has started."""
        if self.median(job, tool) is None:
            return None
        return max(run.peak_rss for run in self.runs[job, tool])

    def inside(self, job: str, tool: str) -> float | None:
        """Median of the seconds that a script of ours has measured itself, and printed."""
        scripts = [
            any(word.endswith(("peers.py", "bare_crc.py")) for word in m.command)
            for m in self.members
            if (m.job, m.tool) == (job, tool)
        ]
        runs = self.runs.get((job, tool))
        if not runs or not any(scripts) or (job, tool) in self.errors:
            return None
        return statistics.median(float(run.stdout) for run in runs)

    def over_cat(self, member: Contender) -> float | None:
        """How many times as long as `cat` of the same bytes."""
        return ratio(self.median(member.job, member.tool), self.median(f"cat {member.part}", "cat"))

    def over_peer(self, job: str) -> float | None:
        """How many times as fast as the peer on this job we are."""
        peers = [member.tool for member in self.members if member.job == job and member.tool != OURS]
        return ratio(self.median(job, peers[0]), self.median(job, OURS)) if peers else None


def ratio(above: float | None, below: float | None) -> float | None:
    """above / below, if there are both."""
    return above / below if above is not None and below is not None else None


def run_rounds(state: Checkpoint, out: Path, rounds: int, only: str, checked: bool) -> Results:
    """All rounds. Who fails, or is wrong in the first round, is not run again."""
    members = [member for member in contenders(state, out) if only in member.job or member.tool == "cat"]
    experts = sum(file.stat().st_size for file in files_under([state.experts]) if file.suffix == ".distcp")
    results = Results(members, state.facts | {"expert_bytes": experts})
    for number in range(1, rounds + 1):
        for member in members:
            key = (member.job, member.tool)
            if key in results.errors:
                continue
            run = measure.run(member.command, member.inputs, out, member.stdout)
            results.runs[key].append(run)
            error = run.error
            if error is None and checked and member.check and number == 1:
                error = check(state, member)
            if error is not None:
                results.errors[key] = error
            note = f"failed: {error}" if error else f"{run.seconds:.2f} s"
            print(f"round {number}/{rounds}  {member.job:21} {member.tool:21} {note}", file=sys.stderr, flush=True)
    measure.remove_output(out)
    return results


def check(state: Checkpoint, member: Contender) -> str | None:
    """What is wrong with the result that lies there now."""
    script = Path(__file__).with_name("check.py")
    command = [
        sys.executable,
        str(script),
        str(state.tensors_safetensors),
        str(member.result),
        member.part,
        member.dtype,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    return f"wrong result: {done.stderr.strip().splitlines()[-1]}" if done.returncode else None


def table(results: Results) -> str:
    """One row per contender."""
    head = ("job", "tool", "median s", "min s", "in-process s", "MB/s", "x cat", "peer/ours", "RSS MiB", "anon MiB")
    rows: list[tuple[str, ...]] = [head]
    failures = []
    for member in results.members:
        key = (member.job, member.tool)
        median = results.median(*key)
        if median is None:
            rows.append((*key, "failed", *[""] * (len(head) - 3)))
            failures.append(f"failed: {member.job}, {member.tool}: {results.errors.get(key, 'not run')}")
            continue
        runs = results.runs[key]
        inside = results.inside(*key)
        cells = (
            f"{median:.2f}",
            f"{min(run.seconds for run in runs):.2f}",
            number(inside, ".2f"),
            number(results.nbytes[member.part] / median / 1e6 if member.moves else None, ".0f"),
            number(results.over_cat(member), ".2f"),
            number(results.over_peer(member.job) if member.tool == OURS else None, ".1f"),
            f"{max(run.peak_rss for run in runs) / MIB:.0f}",
            number(max((run.peak_anon or 0) / MIB for run in runs) or None, ".0f"),
        )
        rows.append((*key, *cells))
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join([*map(str.ljust, row[:2], widths[:2]), *map(str.rjust, row[2:], widths[2:])]).rstrip() for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], *failures])


def number(value: float | None, form: str) -> str:
    """A cell."""
    return "-" if value is None else format(value, form)


def targets(results: Results) -> list[str]:
    """What we promise, each with pass, FAIL or `not run`."""
    mine = [member for member in results.members if member.tool == OURS]
    by_job = {member.job: member for member in mine}
    lines = []

    def judge(promise: str, value: float | None, unit: str, least: float = 0, most: float = math.inf) -> None:
        verdict = "not run" if value is None else "pass" if least <= value <= most else "FAIL"
        lines.append(f"{verdict:8} {promise}" + (f": {value:.2f}{unit}" if value is not None else ""))

    for job in THREE_TIMES:
        judge(f"{job}: at least 3x as fast as the peer", results.over_peer(job), "x", least=3)
    ours, bare = (results.inside("verify dcp", tool) for tool in (f"{OURS}, timed inside", "pread and crc32"))
    judge(
        "verify: at least 0.8x as fast as pread and crc32 alone, both without the start",
        ratio(bare, ours),
        "x",
        least=0.8,
    )
    equal = "diff dcp, safetensors"
    judge(f"{equal}: at least 0.5x as fast as cmp", results.over_peer(equal), "x", least=0.5)
    for dtype, share in (("bfloat16", 0.7), ("float32", 0.5)):
        read, looked = results.median(f"cat {dtype}", "cat"), results.median(f"stats {dtype}", OURS)
        judge(f"stats {dtype}: at least {share}x as fast as cat, on one core", ratio(read, looked), "x", least=share)
    for job, limit in [
        ("dcp -> safetensors", 1.3),
        ("export", 1.3),
        *((job, 1.6) for job in WRITES_CRC),
        *((f"export, {name}", limit) for name, limit in OPERATIONS.items()),
    ]:
        value = results.over_cat(by_job[job]) if job in by_job else None
        judge(f"{job}: at most {limit}x of cat and sync", value, "x", most=limit)
    for member in mine:
        ran = results.median(member.job, OURS) is not None
        rss = max(run.peak_rss for run in results.runs[member.job, OURS]) / MIB if ran else None
        judge(f"{member.job}: peak RSS under 150 MiB", rss, " MiB", most=150)
    for job in ("dcp -> torch", "dcp -> dcp"):
        for flag, limit in SURE.items():
            value = ratio(results.processor(f"{job}, {flag}", OURS), results.processor(job, OURS))
            judge(f"{job}: {flag} at most {limit}x of the processor time without", value, "x", most=limit)
    for dtype in ("bfloat16", "float32"):
        spent, gib = results.processor(f"stats {dtype}", OURS), results.nbytes[dtype] / (1 << 30)
        judge(f"stats {dtype}: at most 2.5 s a GiB and core", spent and spent / gib, " s", most=2.5)
    for job in (f"torchrun, onto {ranks}" for ranks in LAUNCHED):
        rank, alone = results.memory(job, ENGINES[0]), results.memory(IMPORTS, "torch")
        beyond = (rank - alone) / MIB if rank is not None and alone is not None else None
        judge(f"{job}, {ENGINES[0]}: at most 150 MiB a rank beyond import torch", beyond, " MiB", most=150)
    for job, engine in [(f"torchrun, onto {ranks}", engine) for ranks in LAUNCHED for engine in ENGINES]:
        for what, figure in (("", results.median), (" in processor time", results.processor)):
            value = ratio(figure(job, PEER), figure(job, engine))
            judge(f"{job}, {engine}: at least 2x as fast as {PEER}{what}", value, "x", least=2)
    alone, hooked, verified = (results.processor(TRAINING, tool) for tool in ("alone", "hook", VERIFIED))
    promise = "verify-resume run, a PASS: at most 2.2x of the training alone, in processor time"
    judge(promise, ratio(verified, alone), "x", most=2.2)
    promise = "hook of verify-resume run: at most 1.25x of the training alone, in processor time"
    judge(promise, ratio(hooked, alone), "x", most=1.25)
    judge("inspect dcp: under 0.3 s", results.median("inspect dcp", OURS), " s", most=0.3)
    return lines


def machine(directory: Path) -> dict[str, object]:
    """The facts without which a figure means nothing."""
    packages: dict[str, str | None] = {}
    for name in ("torch", "safetensors", "accelerate", "numpy"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    meminfo = Path("/proc/meminfo")
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_kib": int(meminfo.read_text().split()[1]) if meminfo.exists() else None,
        "load_before": os.getloadavg(),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "filesystem": filesystem(directory),
        "python": platform.python_version(),
        **packages,
    }


def filesystem(directory: Path) -> str | None:
    """The type of the file system that holds `directory`."""
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return None
    entries = [line.split()[1:3] for line in mounts.read_text().splitlines()]
    holding = [(len(point), kind) for point, kind in entries if directory.resolve().is_relative_to(point)]
    return max(holding)[1] if holding else None


def main() -> int:
    """Parse, make, run, print. An empty option counts as absent, so that make can pass what it does not have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="", help="bytes of the training state: 512MiB, 10GiB (default 1GiB)")
    parser.add_argument("--rounds", default="", help="how often everything runs (default 5)")
    parser.add_argument("--world", type=int, default=4, help="ranks that write the checkpoint (default 4)")
    parser.add_argument("--dir", type=Path, default=default_dir(), help="work directory (default %(default)s)")
    parser.add_argument("--json", type=Path, help="also write every round and the machine's facts to this file")
    parser.add_argument("--only", default="", help="only the jobs whose name contains this")
    parser.add_argument("--no-check", action="store_true", help="do not compare the first round's results")
    parser.add_argument("--strict", action="store_true", help="exit 1 unless every target is met")
    parser.add_argument("--clean", action="store_true", help="remove what was made in the work directory, and exit")
    options = parser.parse_args()
    if options.clean:
        clean(options.dir)
        return 0
    try:
        size, rounds = parse_size(options.size or "1GiB"), int(options.rounds or 5)
    except ValueError as error:
        parser.error(str(error))
    state = ensure(options.dir, size, options.world)
    facts = machine(options.dir)
    results = run_rounds(state, output_dir(options.dir), rounds, options.only, not options.no_check)
    print(" ".join(f"{name}={value}" for name, value in (facts | state.facts).items() if value is not None))
    print(f"rounds={rounds}, warm cache; seconds from spawn to exit plus fsync of the output by the harness\n")
    print(table(results))
    lines = targets(results)
    print("\n" + "\n".join(lines))
    if options.json:
        rows = [
            {
                "job": member.job,
                "tool": member.tool,
                "command": member.command,
                "bytes": results.nbytes[member.part],
                "error": results.errors.get((member.job, member.tool)),
                "rounds": [asdict(run) for run in results.runs[member.job, member.tool]],
            }
            for member in results.members
        ]
        report = {"machine": facts, "checkpoint": state.facts, "contenders": rows, "targets": lines}
        options.json.write_text(json.dumps(report, indent=1))
    return int(options.strict and any(not line.startswith("pass") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
