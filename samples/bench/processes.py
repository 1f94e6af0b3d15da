"""Times `reshard` alone and in two processes of torchrun on a checkpoint of very many small chunks.

For large chunks the disk is the limit, and one process reaches it. For small ones the work between two chunks is:
that is what processes share. Both start from a warm page cache and end with everything on disk.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from checkpoint import default_dir
from measure import remove, sync_tree

COMMANDS = {
    "1 process": (sys.executable, "-m", "ckpttool"),
    "2 processes": (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "ckpttool"),
}


def make(root: Path, tensors: int, ranks: int) -> None:
    """Tensors of 256 KiB, in a checkpoint of so many ranks: a KiB for each of 256."""
    import torch

    whole = root.with_suffix(".pt")
    state = {f"layers.{i}.weight": torch.randn(512, 128) for i in range(tensors)}
    torch.save({"model": state}, whole)
    words = ("reshard", whole, root, "--to", "dcp", "--to-world", str(ranks), "-q")
    subprocess.run([*COMMANDS["1 process"], *map(str, words)], check=True)
    whole.unlink()


def main() -> int:
    """Make the source once, then each command in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--onto", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=default_dir(), help="work directory (default %(default)s)")
    parser.add_argument("--clean", action="store_true", help="remove the checkpoint afterwards")
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    root, out = options.dir / f"small-{options.tensors}-{options.ranks}ranks", options.dir / "small-out"
    if not (root / ".metadata").exists():
        remove(root)
        make(root, options.tensors, options.ranks)
    took: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(options.rounds):
        for name, command in COMMANDS.items():
            remove(out)
            began = time.perf_counter()
            words = ("reshard", root, out, "--engine", "bytes", "--to-world", str(options.onto), "-q")
            subprocess.run([*command, *map(str, words)], check=True, capture_output=True)
            sync_tree(out)
            took[name].append(time.perf_counter() - began)
    remove(out)
    one, two = (statistics.median(times) for times in took.values())
    for name, times in took.items():
        print(f"{name:12} {statistics.median(times):7.2f} s  ({', '.join(f'{seconds:.2f}' for seconds in times)})")
    good = two < one
    chunks = options.tensors * options.ranks
    print(f"{'pass' if good else 'FAIL'}  {chunks:,} chunks onto {options.onto} ranks: 2 are {one / two:.2f}x as fast")
    if options.clean:
        remove(root)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
