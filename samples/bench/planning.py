"""Times the planning of a reshard: 3,000 tensors of 64, 256 and 1,024 ranks onto half as many.

What is timed, in a fresh process with a warm page cache, is all that comes before the first byte is moved: read and
validate the index, lay the tensors out, lay the destination down (sparse, without values) and go through the whole
plan. The source is that of `metadata.py`: an index of torch's own classes, and sparse files in place of the data.
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


def plan_only(root: Path, onto: int) -> None:
    """Plan, and print how many chunks, jobs and pieces, the seconds, of them the processor's, and the peak RSS."""
    from ckpttool.catalogue.protocols import SinkOptions
    from ckpttool.catalogue.validation import validate
    from ckpttool.cli.app import collect_rarely
    from ckpttool.formats import FORMATS
    from ckpttool.layout import rechunk as chunking
    from ckpttool.layout import select as layout
    from ckpttool.layout.mesh import world_mesh
    from ckpttool.operations import write
    from ckpttool.transfer import plan

    collect_rarely()  # as the command does
    began, used = time.perf_counter(), time.process_time()
    with write.open_sources(str(root)) as have, tempfile.TemporaryDirectory(dir=root.parent) as scratch:
        validate(have.source.catalogue)
        laid = chunking.over_mesh(layout.start(have.source.catalogue), world_mesh(onto))
        create = FORMATS[0].create
        assert create is not None
        sink = create(str(Path(scratch, "out")), laid, SinkOptions(world=onto))
        jobs = pieces = 0
        for job in plan.plan(sink.catalogue):
            jobs += 1
            pieces += len(job.pieces)
        chunks = sum(len(t.chunks) for t in have.source.catalogue.tensors)
        seconds, used = time.perf_counter() - began, time.process_time() - used
    print(chunks, jobs, pieces, seconds, used, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def main() -> int:
    """Make each source once (in a process of its own, to keep torch out of the measurements), then plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=list(LIMITS))
    parser.add_argument("--dir", type=Path, default=default_dir(), help="work directory (default %(default)s)")
    parser.add_argument("--clean", action="store_true", help="remove the checkpoints afterwards")
    parser.add_argument("--make", type=Path, help="only write a checkpoint to this new directory, and exit")
    parser.add_argument("--plan", type=Path, help="only plan this one, and exit")
    options = parser.parse_args()
    if options.make:
        make(options.make, TENSORS * options.ranks[0], options.ranks[0])
        return 0
    if options.plan:
        plan_only(options.plan, options.ranks[0])
        return 0
    failed = False
    for ranks in options.ranks:
        root = options.dir / f"planning-{ranks}ranks"
        if not (root / ".metadata").exists():
            remove(root)
            subprocess.run([sys.executable, __file__, "--make", root, "--ranks", str(ranks)], check=True)
        command = [sys.executable, __file__, "--plan", root, "--ranks", str(ranks // 2)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        chunks, jobs, pieces, seconds, used, peak = *map(int, said[:3]), *map(float, said[3:5]), int(said[5])
        limit, most = LIMITS.get(ranks, (60.0, 8192))
        good = seconds < limit and peak < most * MIB
        failed |= not good
        print(
            f"{'pass' if good else 'FAIL'}  {ranks:5,} ranks onto {ranks // 2:5,}  {chunks:9,} chunks into {jobs:9,} "
            f"({pieces:9,} pieces)  {seconds:6.2f} s  ({used:.2f} s of the processor, "
            f"{1e6 * used / chunks:.1f} us a chunk)  {peak / MIB:6,.0f} MiB  "
            f"(under {limit:.0f} s, {most} MiB)",
            flush=True,
        )
        if options.clean:
            remove(root)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
