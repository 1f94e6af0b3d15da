"""Times `inspect` and `verify-resume audit` on an index as large as a large run writes.

750,000 chunks, 256 ranks x 2,930 tensors. The index is made of torch's own classes and pickled as DCP pickles it. As in
a gathered plan, every rank's items bring their own copies of the names, so nothing is shared that a real file would not
share. The data files are sparse: of the right length, without content, because an index is all that `inspect` should
need. An audit also reads the param groups and a `step` of each parameter; these are real, in a file of their own. The
time is wall time from spawn to exit of a fresh process with a warm page cache, the memory its peak RSS.

`--spellings` writes the same index in other ways (another order, shared objects, other protocols, other fields) and
compares `inspect` of each with CPython's unpickler in a process of its own, which makes an empty object of everything,
with garbage collection off: less than any reader of the index has to do.
"""

from __future__ import annotations

import argparse
import gc
import pickle
import random
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import measure
from checkpoint import default_dir, output_dir
from jobs import ckpttool
from measure import MIB, remove

RATIO = 1.5  # of the time of the bare unpickler
SECONDS = {"inspect": 3.0, "audit": 10.0}
COMMANDS = {"inspect": ("inspect",), "audit": ("verify-resume", "audit")}
PARAMETERS = ("wq", "wk", "wv", "wo", "w1", "w2", "w3", "attn_norm", "ffn_norm")
ITEM_OVERHEAD = 1_400  # what torch.save adds to a small tensor: zip headers and a pickle


class Spelling(NamedTuple):
    """How an index differs from what torch's collective save makes of it."""

    protocol: int = 4
    order: str = "rank"  # of the items: by rank, by tensor, or at random
    shared: tuple[str, ...] = ()  # what items and tensors share in the memo: their names, their offsets
    fields: str = "as now"  # or those of torch 2.6, or more


SPELLINGS = {
    "torch's own": Spelling(),
    "ordered by tensor": Spelling(order="tensor"),
    "ordered by tensor, names shared": Spelling(order="tensor", shared=("names",)),
    "names shared, ordered at random": Spelling(order="random", shared=("names",)),
    "names and offsets shared": Spelling(shared=("names", "offsets")),
    "fields of torch 2.6": Spelling(fields="of torch 2.6"),
    "more fields": Spelling(fields="more"),
    "protocol 2": Spelling(protocol=2),
    "protocol 2, names shared": Spelling(protocol=2, order="tensor", shared=("names",)),
    "protocol 5": Spelling(protocol=5),
}


def names(count: int) -> list[str]:
    """At least `count` names of a model's parameters and their moments; no parameter is without one of these."""
    found: list[str] = []
    layer = 0
    while len(found) < count:
        for parameter in PARAMETERS:
            name = f"layers.{layer}.{parameter}.weight"
            found += [f"model.{name}", *(f"optim.state.{name}.{moment}" for moment in ("exp_avg", "exp_avg_sq"))]
        layer += 1
    return found[: -(-count // 3) * 3]


def path_of(name: str) -> tuple[str, ...]:
    """Where the name is in the nested state dict."""
    if name.startswith("model."):
        return ("model", name.removeprefix("model."))
    fqn, moment = name.removeprefix("optim.state.").rsplit(".", 1)
    return ("optim", "state", fqn, moment)


def make(root: Path, chunks: int, world: int, spelling: Spelling = Spelling()) -> None:  # noqa: B008
    """Write the index and the sparse files of a checkpoint with at least `chunks` chunks."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    rows, columns = 16, 4096
    nbytes = rows * columns * 4
    all_names = names(-(-chunks // world))
    tensors: dict[str, Any] = {
        name: TensorStorageMetadata(
            TensorProperties(torch.float32),
            torch.Size([rows * world, columns]),
            [ChunkStorageMetadata(torch.Size([rows * r, 0]), torch.Size([rows, columns])) for r in range(world)],
        )
        for name in all_names
    }
    storage = {}
    places = [(rank, at) for rank in range(world) for at in range(len(all_names))]
    if spelling.order == "tensor":
        places.sort(key=lambda place: place[1])
    elif spelling.order == "random":
        random.Random(0).shuffle(places)
    files = [f"__{rank}_0.distcp" for rank in range(world)]
    for rank, at in places:
        name = all_names[at]
        # As unpickled from another rank: a new object.
        own_name = name if "names" in spelling.shared else name.encode().decode()
        index = MetadataIndex(own_name, torch.Size([rows * rank, 0]), rank)
        info = _StorageInfo(files[rank], at * (nbytes + ITEM_OVERHEAD), nbytes + ITEM_OVERHEAD)
        if "offsets" in spelling.shared:
            vars(index)["offset"] = tensors[name].chunks[rank].offsets
        if spelling.fields == "of torch 2.6":
            del vars(info)["transform_descriptors"]
        elif spelling.fields == "more":
            vars(index)["rank"] = rank
            vars(info)["checksum"] = None
        storage[index] = info
    paths: dict[str, tuple[object, ...]] = {name: path_of(name) for name in all_names}
    root.mkdir(parents=True)
    parameters = [n.removeprefix("model.") for n in all_names if n.startswith("model.")]
    small: dict[tuple[object, ...], object] = {
        ("optim", "state", parameter, "step"): torch.tensor(1000.0) for parameter in parameters
    }
    group = {"params": parameters, "lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    small |= {("optim", "param_groups", 0, key): value for key, value in group.items()} | {("step",): 1000}
    at = 0
    with open(root / "__0_1.distcp", "wb") as stream:
        for path, value in small.items():
            name = ".".join(map(str, path))
            torch.save(value, stream)
            paths[name] = path
            if isinstance(value, torch.Tensor):
                chunk = ChunkStorageMetadata(torch.Size([]), torch.Size([]))
                tensors[name] = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([]), [chunk])
                index = MetadataIndex(name, torch.Size([]), 0)
            else:
                tensors[name] = BytesStorageMetadata()
                index = MetadataIndex(name)
            storage[index] = _StorageInfo("__0_1.distcp", at, stream.tell() - at)
            at = stream.tell()
    metadata = Metadata(tensors, paths, storage, StorageMeta(checkpoint_id=str(root)), version="1.0.0")
    for rank in range(world):
        with open(root / f"__{rank}_0.distcp", "wb") as stream:
            stream.truncate(len(all_names) * (nbytes + ITEM_OVERHEAD))
    with open(root / "partial", "wb") as stream:
        pickle.dump(metadata, stream, spelling.protocol)
    (root / "partial").rename(root / ".metadata")


def unpickle(index: Path) -> None:
    """Read an index into objects without anything in them."""

    class Empty:
        def __init__(self, *_: object) -> None:
            pass

    class Properties:
        def __setstate__(self, state: object) -> None:
            pass

    known = {"Size": tuple, "TensorProperties": Properties}

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return known.get(name) or type(name, (Empty,), {})

    gc.disable()
    with open(index, "rb") as stream:
        Unpickler(stream).load()


def main() -> int:
    """Make it once (in a process of its own, to keep torch out of the measurements), then time the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=750_000)
    parser.add_argument("--world", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=default_dir(), help="work directory (default %(default)s)")
    parser.add_argument("--make", type=Path, help="only write the checkpoint to this new directory, and exit")
    parser.add_argument("--clean", action="store_true", help="remove the checkpoint afterwards")
    parser.add_argument("--spellings", action="store_true", help="compare with the unpickler instead, in any spelling")
    parser.add_argument("--spelling", choices=SPELLINGS, default="torch's own", help="how --make writes the index")
    parser.add_argument("--unpickle", type=Path, help="only unpickle this index, and exit")
    options = parser.parse_args()
    if options.make:
        make(options.make, options.chunks, options.world, SPELLINGS[options.spelling])
        return 0
    if options.unpickle:
        unpickle(options.unpickle)
        return 0
    if options.spellings:
        passed = [compared(spelling, options) for spelling in SPELLINGS]
    else:
        root = made(options, "torch's own")
        passed = [timed(name, root, options) for name in COMMANDS]
        if options.clean:
            remove(root)
    return 0 if all(passed) else 1


def made(options: argparse.Namespace, spelling: str) -> Path:
    """The checkpoint whose index is spelt so, made if it is not there."""
    own = "" if SPELLINGS[spelling] == Spelling() else "-" + re.sub(r"\W+", "-", spelling)
    root: Path = options.dir / f"metadata-{options.chunks}-{options.world}ranks-steps{own}"
    if not (root / ".metadata").exists():
        remove(root)
        again = [sys.executable, __file__, "--make", root, "--spelling", spelling]
        subprocess.run([*again, f"--chunks={options.chunks}", f"--world={options.world}"], check=True)
    return root


def compared(spelling: str, options: argparse.Namespace) -> bool:
    """Run `inspect` and the bare unpickler in turn; whether `inspect` is as fast as it should be."""
    root, out = made(options, spelling), output_dir(options.dir)
    index = root / ".metadata"
    runs: list[list[measure.Run]] = [[], []]
    for _ in range(options.rounds):
        runs[0].append(measure.run(ckpttool("inspect", root), [index], out))
        runs[1].append(measure.run([sys.executable, __file__, "--unpickle", str(index)], [index], out))
    measure.remove_output(out)
    if options.clean:
        remove(root)
    for error in (run.error for both in runs for run in both if run.error):
        print(f"failed     {spelling}: {error}")
        return False
    # Of the processor: both have one thread.
    seconds, bare = (statistics.median(run.user_seconds + run.system_seconds for run in both) for both in runs)
    memory, bare_memory = (max(run.peak_rss for run in both) / MIB for both in runs)
    passed = seconds < RATIO * bare and memory <= bare_memory
    print(
        f"{'pass' if passed else 'FAIL'}  {seconds / bare:5.2f}  {seconds:5.2f} s {memory:5.0f} MiB  "
        f"unpickler {bare:5.2f} s {bare_memory:5.0f} MiB  {spelling}",
        flush=True,
    )
    return passed


def timed(name: str, root: Path, options: argparse.Namespace) -> bool:
    """Run one of the commands in fresh processes; whether it was fast enough."""
    index, out, runs = root / ".metadata", output_dir(options.dir), []
    for _ in range(options.rounds):
        runs.append(measure.run(ckpttool(*COMMANDS[name], root), [index], out))
        if runs[-1].error:
            break
    measure.remove_output(out)
    print(f"{name} of {options.chunks} chunks, .metadata of {index.stat().st_size / MIB:.0f} MiB")
    if runs[-1].error:
        print(f"failed: {runs[-1].error}")
        return False
    seconds = statistics.median(run.process_seconds for run in runs)
    print(f"median {seconds:.2f} s, min {min(run.process_seconds for run in runs):.2f} s")
    print(f"peak RSS {max(run.peak_rss for run in runs) / MIB:.0f} MiB")
    print(f"{'pass' if seconds < SECONDS[name] else 'FAIL'}     {name}: under {SECONDS[name]:.0f} s")
    return seconds < SECONDS[name]


if __name__ == "__main__":
    sys.exit(main())
