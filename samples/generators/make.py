"""Make small real checkpoints of every format, by running the libraries that write them.

    python samples/generators/make.py [--out DIR] [--list] [--readme] [NAME ...]

Each sample is built in a scratch directory, read back with the upstream library, compared with what was saved, and
only then put in place.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.append(str(Path(__file__).resolve().parents[1]))

import dcp
import dcpitems
import dcpmeta
import hf
import legacy
import objects
import rank_fsdp1
import rank_fsdp2
import rank_local
import rank_old
import rank_optim
import runs_accelerate
import runs_backend
import runs_dcp
import runs_ranks
import runs_trainer
import tensors
import torchsave
from same import assert_same
from sample import SAMPLES, Sample

HERE = Path(__file__).resolve().parents[1]
TABLES = "<!-- The tables below are written by `make.py --readme`. -->"
FAMILIES = {
    "torch.save": (torchsave, tensors, objects, legacy),
    "torch.distributed.checkpoint": (dcp, dcpitems, dcpmeta),
    "one torch.save file for each rank": (rank_fsdp1, rank_optim, rank_local, rank_fsdp2, rank_old),
    "safetensors and Hugging Face": (hf,),
    "run directories of frameworks": (runs_accelerate, runs_backend, runs_dcp, runs_ranks, runs_trainer),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the answer is the exit code."""
    parser = argparse.ArgumentParser(description="Make small real checkpoints of every format.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="samples to make (all of them)")
    parser.add_argument("--out", type=Path, default=HERE / "checkpoints", help="where to put them (%(default)s)")
    parser.add_argument("--list", action="store_true", help="list the samples and stop")
    parser.add_argument("--readme", action="store_true", help="write the tables of README.md and stop")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in SAMPLES]
    if unknown:
        parser.error(f"no such sample: {', '.join(unknown)}")
    wanted = [SAMPLES[name] for name in options.names or SAMPLES]
    if options.list:
        for one in wanted:
            print(f"{one.name:24} {one.what}")
    elif options.readme:
        readme = HERE / "README.md"
        head, _, _ = readme.read_text(encoding="utf-8").partition(TABLES)
        readme.write_text(head + TABLES + "\n\n" + table() + "\n", encoding="utf-8")
    else:
        absent = [one for one in wanted if one.needs and importlib.util.find_spec(one.needs) is None]
        for one in absent if not options.names else []:
            print(f"{one.name:24} left out: needs {one.needs}")
            wanted.remove(one)
        make(wanted, options.out.resolve())
    return 0


def make(samples: Sequence[Sample], out: Path) -> None:
    """Build, check and put in place the given samples: one set of processes for each world size."""
    out.mkdir(parents=True, exist_ok=True)
    home = Path.cwd()
    scratch = Path(tempfile.mkdtemp(prefix="samples-"))
    os.chdir(scratch)  # the writers record the path they are given: let it be a short relative one
    try:
        for world in sorted({one.world for one in samples}):
            names = [one.name for one in samples if one.world == world]
            if world == 1:
                build(names)
            else:
                mp.spawn(build_on_rank, args=(world, scratch, names), nprocs=world)
        for one in samples:
            check(one, Path(one.name))
            refuse_leaks(Path(one.name), (str(HERE), str(Path.home()), str(scratch), sys.prefix))
            target = out / one.name
            if target.exists():
                shutil.rmtree(target)
            shutil.copytree(one.name, target, copy_function=shutil.copyfile)
            print(f"{one.name:24} {size_of(target):8,} bytes")
    finally:
        os.chdir(home)
        shutil.rmtree(scratch)


def build_on_rank(rank: int, world: int, scratch: Path, names: Sequence[str]) -> None:
    """Build the given samples as one rank of a gloo process group."""
    os.chdir(scratch)
    store = dist.FileStore(str(scratch / f"store-{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        build(names)
    finally:
        dist.destroy_process_group()


def build(names: Sequence[str]) -> None:
    """Build the given samples below the current directory; rank 0 writes the references."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in names:
        folder = Path(name)
        folder.mkdir(exist_ok=True, parents=True)
        expected = SAMPLES[name].build(folder)
        if not dist.is_initialized() or dist.get_rank() == 0:
            torch.save(expected, folder / "reference.pt")


def check(one: Sample, folder: Path) -> None:
    """Read the sample back with the upstream library and compare it with what was saved."""
    warnings.simplefilter("ignore")
    reference = folder / "reference.pt"
    if one.load is not None:
        expected: Any = torch.load(reference, weights_only=False)
        try:
            assert_same(one.load(folder), expected, strides=one.strides)
        except AssertionError as error:
            raise AssertionError(f"{one.name}: {error}") from error
    if not one.reference:
        reference.unlink()


def refuse_leaks(folder: Path, private: Sequence[str]) -> None:
    """Fail when a file, or a compressed record of one, holds a path of the machine that made it."""
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        pieces = [path.read_bytes()]
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                pieces += [
                    archive.read(info) for info in archive.infolist() if info.compress_type != zipfile.ZIP_STORED
                ]
        for text in private:
            if any(text.encode() in piece for piece in pieces):
                raise AssertionError(f"{path} holds the path {text}")


def table() -> str:
    """The tables of README.md, one for each family."""
    lines: list[str] = []
    for title, modules in FAMILIES.items():
        lines += ["", f"## {title}", "", "| sample | what it is | what it is for | written by |", "|---|---|---|---|"]
        names = [module.__name__ for module in modules]
        members = [one for one in SAMPLES.values() if one.build.__module__ in names]
        for one in sorted(members, key=lambda one: names.index(one.build.__module__)):
            lines.append(f"| `{one.name}` | {one.what} | {one.trap} | {one.writer} |")
    return "\n".join(lines).strip()


def size_of(folder: Path) -> int:
    """Bytes of all files below a directory."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    raise SystemExit(main())
