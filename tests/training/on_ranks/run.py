"""Loads on all ranks of a world, case by case, and says of each whether it is `equal` to what torch gathered.

    python -m torch.distributed.run --nproc-per-node N run.py cases.json verdicts.json [accelerator [alone]]

A case is the name of a function of `load_cases.py`, and its arguments. Models are on the CPU, or each on an accelerator
of its own, with a process group for both kinds of tensors or, `alone`, for the accelerator's.
"""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parents[3] / "samples"))
sys.path.append(str(Path(__file__).resolve().parents[3] / "samples" / "generators"))

import load_cases
import training_scripts
from support import host_process_group

from ckpttool.training import devices


def verdict(case: list[str]) -> str:
    """The first rank's complaint, or `equal`."""
    try:
        mine = load_cases.CASES[case[0]](*case[1:])
    except BaseException as error:
        mine = "failed: " + "".join(traceback.format_exception(error))[-3000:]
    every: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    wrong = [f"rank {rank}: {one}" for rank, one in enumerate(every) if one != "equal"]
    return wrong[0] if wrong else "equal"


def main() -> None:
    """What has been found so far is on disk after each case."""
    told, verdicts = map(Path, sys.argv[1:3])
    if "accelerator" in sys.argv:
        host_process_group.register_if_needed()
        training_scripts.use(devices.kind())
        torch.use_deterministic_algorithms(True)  # losses are compared bit by bit
        torch.utils.deterministic.fill_uninitialized_memory = False  # which torch 2.13 cannot for 4-bit floats
    backends = devices.backends(training_scripts.HOME[0].type)
    backends = backends.removeprefix("cpu:gloo,") if "alone" in sys.argv else backends
    tempfile.tempdir = str(verdicts.resolve().parent)  # which whoever launched this removes
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(backends, timeout=datetime.timedelta(seconds=300))
    found: dict[str, str] = {}
    for case in json.loads(told.read_text()):
        found[" ".join(case)] = verdict(case)
        if dist.get_rank() == 0:
            verdicts.write_text(json.dumps(found, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
