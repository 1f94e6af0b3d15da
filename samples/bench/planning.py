"""Times the planning of a reshard: 3,000 tensors of 64, 256 and 1,024 ranks onto half as many.

What is timed, in a fresh process with a warm page cache, is all that comes before the first byte is moved: read and
validate the index, lay the tensors out, lay the destination down (sparse, without values) and go through the whole
plan. The source is that of `metadata.py`: an index of torch's own classes, and sparse files in place of the data.

    python samples/bench/planning.py --tensors 62 --ranks 4096 8192 16384 --shares 1 2 64

With `--shares N` the plan is one share of N, as a process of torchrun goes through it; two of them run at once. What is
the same in all of them (the index, the layout) does not become less with more processes; the plan of a share does.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from checkpoint import default_dir
from measure import MIB, remove
from metadata import make

TENSORS = 3_000
LIMITS = {64: (10.0, 2048), 256: (10.0, 2048), 1024: (60.0, 8192)}  # seconds, MiB


def plan_only(root: Path, onto: int, share: tuple[int, int]) -> None:
    """Plan a share, and print how many chunks, jobs and pieces, the seconds, of them the processor's, those of them
    for the plan, and the peak RSS."""
    from ckpttool.catalogue.protocols import SinkOptions
    from ckpttool.catalogue.validation import validate
    from ckpttool.cli.app import collect_rarely
    from ckpttool.formats import FORMATS
    from ckpttool.layout import rechunk as chunking
    from ckpttool.layout import select as layout
    from ckpttool.layout.mesh import world_mesh
    from ckpttool.operations import write
    from ckpttool.storage.stores import local_path
    from ckpttool.transfer import plan

    collect_rarely()  # as the command does
    began, used = time.perf_counter(), time.process_time()
    with write.open_sources(str(root)) as have, tempfile.TemporaryDirectory(dir=root.parent) as scratch:
        validate(have.source.catalogue)
        laid = chunking.over_mesh(layout.start(have.source.catalogue), world_mesh(onto))
        create = FORMATS[0].create
        assert create is not None
        sink = create(local_path(scratch) / "out", laid, SinkOptions(world=onto))
        jobs, pieces, before = 0, 0, time.process_time()
        for job in plan.plan(sink.catalogue, share):
            jobs += 1
            pieces += len(job.pieces)
        chunks = sum(len(t.chunks) for t in have.source.catalogue.tensors)
        seconds, used, planned = time.perf_counter() - began, time.process_time() - used, time.process_time() - before
    print(chunks, jobs, pieces, seconds, used, planned, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def main() -> int:
    """Make each source once (in a process of its own, to keep torch out of the measurements), then plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=list(LIMITS))
    parser.add_argument("--tensors", type=int, default=TENSORS)
    parser.add_argument("--shares", type=int, nargs="*", default=[1], help="processes that divide the plan")
    parser.add_argument("--share", type=int, default=0, help="which share, for --plan")
    parser.add_argument("--dir", type=Path, default=default_dir(), help="work directory (default %(default)s)")
    parser.add_argument("--clean", action="store_true", help="remove the checkpoints afterwards")
    parser.add_argument("--make", type=Path, help="only write a checkpoint to this new directory, and exit")
    parser.add_argument("--plan", type=Path, help="only plan this one, and exit")
    options = parser.parse_args()
    if options.make:
        make(options.make, options.tensors * options.ranks[0], options.ranks[0])
        return 0
    if options.plan:
        plan_only(options.plan, options.ranks[0], (options.share, options.shares[0]))
        return 0
    failed = False
    for ranks in options.ranks:
        own = "" if options.tensors == TENSORS else f"-{options.tensors}tensors"
        root = options.dir / f"planning-{ranks}ranks{own}"
        sizes = ["--tensors", str(options.tensors), "--ranks"]
        if not (root / ".metadata").exists():
            remove(root)
            subprocess.run([sys.executable, __file__, "--make", root, *sizes, str(ranks)], check=True)
        for shares in options.shares:
            command = [sys.executable, __file__, "--plan", root, *sizes, str(ranks // 2), "--shares", str(shares)]
            running = [
                subprocess.Popen([*command, "--share", str(share)], stdout=subprocess.PIPE, text=True)
                for share in range(min(2, shares))
            ]
            said = [process.communicate()[0].split() for process in running]
            chunks = int(said[0][0])
            jobs, pieces = (sum(int(one[at]) for one in said) for at in (1, 2))
            seconds, used, planned, peak = (max(float(one[at]) for one in said) for at in (3, 4, 5, 6))
            limit, most = LIMITS.get(ranks, (60.0, 8192))
            good = used < limit and peak < most * MIB  # other work on the machine takes none of the processor time
            failed |= not good
            print(
                f"{'pass' if good else 'FAIL'}  {ranks:6,} ranks onto {ranks // 2:5,}  {chunks:9,} chunks into "
                f"{jobs:9,} ({pieces:9,} pieces)  {len(said)} of {shares:2} shares  {seconds:6.2f} s  ({used:.2f} s of "
                f"the processor, {1e6 * used / chunks:.1f} us a chunk; the plan {planned:.2f} s)  "
                f"{peak / MIB:6,.0f} MiB, {peak / chunks:,.0f} bytes a chunk  "
                f"(under {limit:.0f} s of the processor, {most} MiB)",
                flush=True,
            )
        if options.clean:
            remove(root)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
