"""Measures `ckpttool.load` against `dcp.load` on the ranks of one run: time, bytes read, and rank 0's memory.

    python -m torch.distributed.run --nproc-per-node 2 tests/bench/loading.py --width 1024 --layers 8 --rounds 5

An FSDP2 model and AdamW are saved by `dcp.save`, and loaded by turns, each time into a fresh model and an optimizer
that has not stepped. Of torch's way two times are taken: `dcp.load` alone, and with `get_state_dict` before it (which
gives the optimizer its state) and `set_state_dict` after it, which a script needs as well. Memory is the peak of
anonymous memory during the load, sampled every 2 ms, beyond what there was before: the moments are in it, the
parameters are not.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
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


class Peak:
    """The most anonymous memory during a block, beyond what there was before it; and the seconds."""

    def __enter__(self) -> Self:
        gc.collect()
        self.before = self.most = anonymous()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        dist.barrier()
        self.began = time.perf_counter()
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.most = max(self.most, anonymous())

    def __exit__(self, *_: object) -> None:
        dist.barrier()
        self.seconds = time.perf_counter() - self.began
        self.most = max(self.most, anonymous())
        self._done.set()
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
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # What is freed goes back to the system at once, or a later load would find it there and seem to need nothing.
    ctypes.CDLL(None).mallopt(-3, 1 << 16)
    dist.init_process_group("gloo")
    told = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(told, src=0)
    place = f"{told[0]}/dcp"
    model, optimizer = fresh(options.width, options.layers)
    saved = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    torch_dcp.save(saved, checkpoint_id=place)
    del saved, model, optimizer
    seconds, memory, read, share = defaultdict(list), defaultdict(list), 0, 0
    for _ in range(options.rounds):
        for way in ("torch", "parallel", "broadcast"):
            model, optimizer = fresh(options.width, options.layers)
            with Peak() as peak:
                if way == "torch":
                    seconds["dcp.load"].append(by_torch(place, model, optimizer))
                else:
                    loaded = ckpttool.load(place, model, optimizer, strategy=way)
            seconds[way].append(peak.seconds)
            memory[way].append(peak.nbytes)
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
            print(f"{way:10s} {statistics.median(times):6.2f} s  ({min(times):.2f}..{max(times):.2f})  {peak_of}")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(told[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
