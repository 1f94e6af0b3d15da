"""Trials inside one launch of torchrun: one rank of many. Prints nothing; the reports go into a file.

save_on_ranks.py CASES.json FOUND.json      a case is {"kind": ..., "via": ..., "to_mesh": ..., "recipe": ...}, and has
                                            `apart` where rank 1 is to see another file system
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from support import warm_python

from ckpttool.resume import launch
from ckpttool.resume.trial import trial
from ckpttool.storage.stores import local_path

RECIPE = Path(__file__).with_name("recipe_kinds.py")


def tried(case: dict[str, Any]) -> dict[str, Any]:
    os.environ["KIND"] = case["kind"]
    is_apart = case.get("apart") and os.environ["RANK"] == "1"
    launch.local_path = (lambda _: local_path("/nowhere/trial")) if is_apart else local_path
    made = trial(
        case.get("recipe", RECIPE), via=case["via"], to_mesh=case.get("to_mesh"), steps=3, more=3, limit=240,
        gradients=False,
    )  # fmt: skip
    return made.as_dict()


if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text())
    found = []
    for case in cases:
        try:
            with warm_python.trials():
                found.append(tried(case))
        except Exception as error:
            found.append(
                {"verdict": "error", "message": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
            )
        if os.environ["RANK"] == "0":
            Path(sys.argv[2]).write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
