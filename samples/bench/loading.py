"""Measures `ckpttool.load` against `dcp.load` on the ranks of one run: time, bytes read, and rank 0's memory.

    python -m torch.distributed.run --nproc-per-node 2 samples/bench/loading.py --width 1024 --layers 8 --rounds 5

An FSDP2 model and AdamW are saved by `dcp.save`, and loaded by turns, each time into a fresh model and an optimizer
that has not stepped; `unchecked` is `parallel` with `check=False`. Of torch's way two times are taken: `dcp.load`
alone, and with `get_state_dict` before it (which gives the optimizer its state) and `set_state_dict` after it, which a
script needs as well. Beside each median is that of rank 0's processor time, which other work on the machine changes
less. `checks` is `parallel` beside `unchecked`, of medians and of the fastest turns.

With `--first` each load gets memory that the process has not had before, page by page, as the first load of a training
script does; else what an earlier load has freed, which makes all ways faster by the same time.

Memory is measured in rounds of its own, in which what is freed goes back to the system at once, or a later load would
find it there and seem to need nothing; that takes time, so no time is taken then, and malloc is as it usually becomes
in the others. Memory is the peak of what is anonymous during the load, sampled every 2 ms, beyond what there was
before: the moments are in it, the parameters are not.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import random
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from typing_extensions import Self

import ckpttool

MIB = 1 << 20
WAYS = ("torch", "parallel", "unchecked", "broadcast")
_OF_MEMORY = 2
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # what `mallopt` calls them


class Block(nn.Module):
    """Twelve squares of parameters, as a transformer's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


def fresh(width: int, layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Sharded, and not stepped."""
    model = nn.Sequential(*(Block(width) for _ in range(layers)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters())


def anonymous() -> int:
    """Bytes of this process that are in no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def keep_freed_memory(below: int) -> None:
    """Have malloc give back to the system what is freed in pieces of so many bytes, or at the end of its heap."""
    malloc = ctypes.CDLL(None)
    malloc.mallopt(_MMAP_THRESHOLD, below)
    malloc.mallopt(_TRIM_THRESHOLD, 2 * below)


class Peak:
    """The seconds that a block takes; with `of_memory`, the most anonymous memory during it, beyond what there was."""

    def __init__(self, of_memory: bool) -> None:
        self._of_memory = of_memory

    def __enter__(self) -> Self:
        gc.collect()
        self.before = self.most = anonymous()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        dist.barrier()
        self.began, self.cpu = time.perf_counter(), time.process_time()
        if self._of_memory:
            self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.most = max(self.most, anonymous())

    def __exit__(self, *_: object) -> None:
        self.cpu = time.process_time() - self.cpu
        dist.barrier()
        self.seconds = time.perf_counter() - self.began
        self.most = max(self.most, anonymous())
        self._done.set()
        if self._of_memory:
            self._thread.join()

    @property
    def nbytes(self) -> int:
        return self.most - self.before


def by_torch(place: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Seconds of `dcp.load` alone."""
    state: dict[str, Any] = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dist.barrier()
    began = time.perf_counter()
    torch_dcp.load(state, checkpoint_id=place)
    dist.barrier()
    seconds = time.perf_counter() - began
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return seconds


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of this rank's shards."""
    moments = [v for state in optimizer.state.values() for v in state.values()]
    tensors = [v.to_local() if isinstance(v, DTensor) else v for v in [*model.parameters(), *moments]]
    return sum(tensor.nbytes for tensor in tensors)


def main() -> None:
    """Save once, load by turns, print medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--first", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    keep_freed_memory(1 << 16)
    dist.init_process_group("gloo")
    told = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(told, src=0)
    place = f"{told[0]}/dcp"
    model, optimizer = fresh(options.width, options.layers)
    saved = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    torch_dcp.save(saved, checkpoint_id=place)
    del saved, model, optimizer
    seconds, cpu, memory, read, share = defaultdict(list), defaultdict(list), defaultdict(list), 0, 0
    for turn in range(_OF_MEMORY + options.rounds):
        of_memory = turn < _OF_MEMORY
        if not of_memory and not options.first:
            keep_freed_memory(32 << 20)  # the most that glibc raises it to by itself
        # One leaves memory behind that the next finds.
        for way in random.Random(turn).sample(options.ways, len(options.ways)):
            model, optimizer = fresh(options.width, options.layers)
            with Peak(of_memory) as peak:
                if way == "torch":
                    alone = by_torch(place, model, optimizer)
                else:
                    strategy = "broadcast" if way == "broadcast" else "parallel"
                    loaded = ckpttool.load(place, model, optimizer, strategy=strategy, check=way != "unchecked")
            if of_memory:
                memory[way].append(peak.nbytes)
            else:
                seconds[way].append(peak.seconds)
                cpu[way].append(peak.cpu)
                if way == "torch":
                    seconds["dcp.load"].append(alone)
            share = held(model, optimizer)
            read = loaded.bytes_read if way == "parallel" else read
            del model, optimizer
    if dist.get_rank() == 0:
        whole = sum(path.stat().st_size for path in Path(place).iterdir())
        module = 4 * options.width * options.width * 4
        print(f"checkpoint {whole / MIB:.0f} MiB, {dist.get_world_size()} ranks, shards of one {share / MIB:.0f} MiB,")
        print(f"largest module {module / MIB:.0f} MiB; `parallel` read {read / share:.4f} of the shards")
        for way, times in seconds.items():
            peak_of = f"{statistics.median(memory[way]) / MIB:6.0f} MiB" if memory[way] else ""
            of_cpu = f"{statistics.median(cpu[way]):6.2f} s" if cpu[way] else " " * 8
            times_of = f"{statistics.median(times):6.2f} s  ({min(times):.2f}..{max(times):.2f})"
            print(f"{way:10s} {times_of} {of_cpu} {peak_of}")
        for what, times_by in (("time", seconds), ("processor time", cpu)):
            if "parallel" in times_by and "unchecked" in times_by:
                checked, unchecked = times_by["parallel"], times_by["unchecked"]
                medians = statistics.median(checked) / statistics.median(unchecked)
                print(f"checks: {medians:.3f} of the {what} without, {min(checked) / min(unchecked):.3f} at best")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(told[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
