"""Trials inside one launch of torchrun: one rank of many. Prints nothing; the reports go into a file.

save_on_ranks.py CASES.json FOUND.json      a case is {"kind": ..., "via": ..., "to_mesh": ..., "repeat": 1}
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ckpttool.resume.trial import trial

HERE = Path(__file__).resolve().parent


def tried(case: dict[str, Any]) -> dict[str, Any]:
    os.environ["KIND"] = case["kind"]
    made = trial(
        HERE / "recipe_kinds.py", via=case["via"], to_mesh=case.get("to_mesh"), steps=3, more=3, limit=240
    )  # fmt: skip
    return made.as_dict()


if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text())
    found = []
    for case in cases:
        try:
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
