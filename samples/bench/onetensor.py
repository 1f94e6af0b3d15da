"""Peak memory of `convert` on a checkpoint that is ONE tensor of several GiB.

A converter that moves tensor by tensor is bounded by the largest tensor; ours is to be bounded by a constant. The
checkpoints are made in little memory: the tensor is a mapped file of random blocks, and torch.save and DCP stream it
out. What is measured is the peak RSS of the whole process (and its anonymous part, and the time), once per conversion.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import measure
from checkpoint import default_dir, output_dir, parse_size
from jobs import ckpttool
from measure import MIB, remove

LIMIT_MIB = 150


def make(root: Path, size: int) -> None:
    """Write `state.pt` and `dcp/` of one float32 tensor of `size` bytes."""
    import torch
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

    rows = size // (4 * 4096)
    root.mkdir(parents=True)
    backing = root / "backing"
    with open(backing, "wb") as stream:
        for start in range(0, rows, 1024):
            stream.write(torch.randn(min(1024, rows - start), 4096).numpy().data)
    tensor = torch.from_file(str(backing), shared=False, size=rows * 4096).view(rows, 4096)
    state = {"model": {"weight": tensor}}
    torch.save(state, root / "state.pt")
    _save_state_dict(state, storage_writer=FileSystemWriter(root / "dcp"), no_dist=True)
    del tensor, state
    backing.unlink()  # last: its absence marks the directory as complete


def main() -> int:
    """Make them once (in a process of its own, to keep torch out of the measurements), then convert each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="", help="bytes of the tensor (default 5GiB)")
    parser.add_argument("--dir", type=Path, default=default_dir(), help="work directory (default %(default)s)")
    parser.add_argument("--make", type=Path, help="only write the checkpoints to this new directory, and exit")
    parser.add_argument("--clean", action="store_true", help="remove the checkpoints afterwards")
    options = parser.parse_args()
    size = parse_size(options.size or "5GiB")
    if options.make:
        make(options.make, size)
        return 0
    root = options.dir / f"onetensor-{size}"
    if not (root / "dcp" / ".metadata").exists() or (root / "backing").exists():
        remove(root)
        subprocess.run([sys.executable, __file__, "--make", root, f"--size={size}"], check=True)
    out = output_dir(options.dir)
    dcp, file = root / "dcp", root / "state.pt"
    conversions = [
        ("dcp -> safetensors", ckpttool("convert", dcp, out / "all.safetensors", "--to", "safetensors")),
        ("dcp -> torch", ckpttool("convert", dcp, out / "all.pt", "--to", "torch")),
        ("torch -> dcp, 4 ranks", ckpttool("convert", file, out / "dcp", "--to", "dcp", "--to-world", "4")),
        ("torch -> safetensors", ckpttool("convert", file, out / "all.safetensors", "--to", "safetensors")),
    ]
    print(f"one float32 tensor of {size / MIB:.0f} MiB; target: peak RSS under {LIMIT_MIB} MiB")
    failed = False
    for name, command in conversions:
        run = measure.run(command, [], out)
        rss, anon = run.peak_rss / MIB, (run.peak_anon or 0) / MIB
        short = run.error is None and run.output_bytes < size
        failed |= run.error is not None or short or rss >= LIMIT_MIB
        verdict = "FAIL" if short or rss >= LIMIT_MIB else "pass"
        figures = f"peak RSS {rss:.0f} MiB, anonymous {anon:.0f} MiB, {run.seconds:.1f} s"
        note = f"; only {run.output_bytes / MIB:.0f} MiB written" if short else ""
        print(f"failed   {name}: {run.error}" if run.error else f"{verdict:8} {name}: {figures}{note}")
    measure.remove_output(out)
    if options.clean:
        remove(root)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
