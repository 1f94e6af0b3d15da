"""Measures what a name costs: processor time and memory for each tensor of a checkpoint of very many small ones.

Conversions of 100,000 tensors of 64 bytes, each beside what people run today; opening them, as torch wrote them, beside
torch; and `inspect` of a million, beside the safetensors library, which lists the names. Every run is a process of its
own, in turns. The time is that of the processor, of all threads. Of conversions, time and memory are those beyond what
one of one tensor takes; of opening, the time is that without the start of Python and what is imported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import subprocess
import sys
from pathlib import Path

from checkpoint import default_dir
from measure import MIB, Run, remove_output, run

HERE = Path(__file__).parent
OURS = (sys.executable, "-m", "ckpttool")
PEERS = (sys.executable, str(HERE / "peers.py"))
LIMITS = 80.0, 2.5  # microseconds and KiB, for each tensor
INSPECT = 12.0, 700  # seconds and MiB, of a million
OPEN = 1.0  # seconds
# What writes the state dict of a safetensors file as torch does: `python -c WRITE SRC PT DCP`.
WRITE = """
import sys, torch, torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
state = load_file(sys.argv[1])
torch.save(state, sys.argv[2])
dcp.save(state, checkpoint_id=sys.argv[3], no_dist=True)
"""
# How each is opened: what is imported, and what is timed.
OPENING = {
    "open dcp": ("torch-dcp", {
        "ckpttool": ("import ckpttool, ckpttool.producers.open", "ckpttool.open(path)"),
        "read_metadata": (
            "from torch.distributed.checkpoint import FileSystemReader", "FileSystemReader(path).read_metadata()",
        ),
    }),
    "open torch.save": ("torch.pt", {
        "ckpttool": ("import ckpttool, ckpttool.producers.open", "ckpttool.open(path)"),
        "torch.load": ("import torch", "torch.load(path, mmap=True, weights_only=True)"),
    }),
}  # fmt: skip
TIMED = "import sys, time; {}; path = sys.argv[1]; t = time.process_time(); kept = {}; print(time.process_time() - t)"
BYTES = 64


def make(path: Path, count: int, nbytes: int = BYTES) -> None:
    """Write a safetensors file of so many tensors, four of each module."""
    entries = (
        f'"model.layers.{i // 16}.block.{i // 4 % 4}.weight_{i % 4}":{{"dtype":"F32","shape":[{nbytes // 4}],'
        f'"data_offsets":[{i * nbytes},{(i + 1) * nbytes}]}}'
        for i in range(count)
    )
    header = f"{{{','.join(entries)}}}".encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(count * nbytes))


Member = tuple[str, Path, tuple[str, ...]]


def jobs(root: Path, few: Path, out: Path) -> dict[str, list[Member]]:
    """Each conversion by its name: of each tool its name, its source and its command, for many tensors and for one."""
    found: dict[str, list[Member]] = {}
    for name, source, target, peer in (
        ("safetensors -> dcp", "many.safetensors", "out-dcp", "safetensors_to_dcp"),
        ("torch -> safetensors", "many.pt", "out.safetensors", "torch_load_save_file"),
        ("dcp -> safetensors", "many-dcp", "out.safetensors", "dcp_load_save_file"),
    ):
        to = ("--to", "dcp") if target == "out-dcp" else ()
        found[name] = [
            member
            for folder, suffix in ((root, ""), (few, ", one"))
            for member in (
                (
                    f"ckpttool{suffix}",
                    folder / source,
                    (*OURS, "convert", str(folder / source), str(out / target), *to),
                ),
                (f"peer{suffix}", folder / source, (*PEERS, peer, str(folder / source), str(out / target))),
            )
        ]
    return found


def prepare(folder: Path, count: int) -> None:
    """Make the sources of the conversions, once."""
    if (folder / "many-dcp" / ".metadata").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "many.safetensors"
    make(source, count)
    for name, to in (("many.pt", "torch"), ("many-dcp", "dcp")):
        if not (folder / name).exists():
            subprocess.run([*OURS, "convert", str(source), str(folder / name), "--to", to, "-q"], check=True)


def prepare_opening(folder: Path) -> None:
    """Make what torch writes of the same tensors, once."""
    if not (folder / "torch-dcp" / ".metadata").exists():
        paths = (folder / name for name in ("many.safetensors", "torch.pt", "torch-dcp"))
        subprocess.run([sys.executable, "-c", WRITE, *map(str, paths)], check=True, stderr=subprocess.DEVNULL)


def opening(folder: Path, out: Path, rounds: int, figures: dict[str, dict[str, float]]) -> bool:
    """Open what torch wrote, with each tool in turns; return whether ours is as fast as it is to be."""
    good = True
    for job, (name, tools) in OPENING.items():
        source = folder / name
        runs: dict[str, list[Run]] = {tool: [] for tool in tools}
        for _ in range(rounds):
            for tool, (imports, act) in tools.items():
                runs[tool].append(run((sys.executable, "-c", TIMED.format(imports, act), str(source)), [source], out))
        for tool, of in runs.items():
            if errors := [one.error for one in of if one.error]:
                raise SystemExit(errors[0])
            seconds, mib = statistics.median(float(one.stdout) for one in of), peak(of) / MIB
            figures.setdefault(job, {}).update({f"{tool}, s": seconds, f"{tool}, MiB": mib})
            print(f"{job:22} {tool:13} {seconds:5.2f} s  {mib:6.0f} MiB", flush=True)
        is_met = figures[job]["ckpttool, s"] <= OPEN
        good &= is_met
        print(f"{'pass' if is_met else 'FAIL'}  {job}: at most {OPEN:g} s")
    return good


def processor(runs: list[Run]) -> float:
    return statistics.median(one.user_seconds + one.system_seconds for one in runs)


def peak(runs: list[Run]) -> float:
    return statistics.median(one.peak_rss for one in runs)


def main() -> int:
    """Make the sources, run everything in turns, and print what a tensor costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=default_dir(), help="work directory (default %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    root = options.dir / f"names-{options.tensors}"
    few, out = root / "one", root / "out"
    prepare(root, options.tensors)
    prepare(few, 1)
    figures: dict[str, dict[str, float]] = {}
    good = True
    for job, members in jobs(root, few, out).items():
        runs: dict[str, list[Run]] = {tool: [] for tool, *_ in members}
        for _ in range(options.rounds):
            for tool, source, command in members:
                runs[tool].append(run(command, [source], out))
        errors = [one.error for of in runs.values() for one in of if one.error]
        if errors:
            raise SystemExit(errors[0])
        for tool in ("ckpttool", "peer"):
            many, one = runs[tool], runs[f"{tool}, one"]
            micros = (processor(many) - processor(one)) / options.tensors * 1e6
            kib = (peak(many) - peak(one)) / options.tensors / 1024
            figures.setdefault(job, {}).update({f"{tool}, us": micros, f"{tool}, KiB": kib})
            print(f"{job:22} {tool:9} {micros:7.1f} us {kib:6.2f} KiB for each tensor", flush=True)
        is_met = figures[job]["ckpttool, us"] <= LIMITS[0] and figures[job]["ckpttool, KiB"] <= LIMITS[1]
        good &= is_met
        print(f"{'pass' if is_met else 'FAIL'}  {job}: at most {LIMITS[0]:g} us and {LIMITS[1]:g} KiB")
    prepare_opening(root)
    good &= opening(root, out, options.rounds, figures)
    million = root / "million.safetensors"
    if not million.exists():
        make(million, 1_000_000, 4)
    names = "import sys; from safetensors import safe_open; print(len(safe_open(sys.argv[1], 'numpy').keys()))"
    looks = {
        "inspect": (*OURS, "inspect", str(million)),
        "safe_open": (sys.executable, "-c", names, str(million)),
    }
    for tool, command in looks.items():
        runs_of = [run(command, [million], out) for _ in range(options.rounds)]
        seconds, mib = processor(runs_of), peak(runs_of) / MIB
        figures.setdefault("a million names", {}).update({f"{tool}, s": seconds, f"{tool}, MiB": mib})
        print(f"{'a million names':22} {tool:9} {seconds:7.1f} s  {mib:6.0f} MiB")
        if tool == "inspect":
            is_met = seconds <= INSPECT[0] and mib <= INSPECT[1]
            good &= is_met
            print(f"{'pass' if is_met else 'FAIL'}  inspect: at most {INSPECT[0]:g} s and {INSPECT[1]} MiB")
    remove_output(out)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
