"""One of the ranks that torchrun starts: reshard each case, and have rank 0 say what came of it."""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "samples"))

from support import host_process_group

import ckpttool
from ckpttool.errors import CkptError
from ckpttool.training.reshard_engine import engine


def main() -> None:
    """`engine_on_ranks.py CASES ANSWER`: the result of each case, or the error as text."""
    host_process_group.register_if_needed()
    cases, answer = map(Path, sys.argv[1:])
    said: dict[str, Any] = {}
    free = engine._free_memory
    for case in json.loads(cases.read_text()):
        engine._free_memory = lambda: free() if case.get("free") is None else case["free"]  # noqa: B023
        try:
            made = ckpttool.reshard(case["source"], case["out"], **case["flags"])
            said[case["name"]] = {f.name: getattr(made, f.name) for f in fields(made) if not f.name.startswith("_")}
        except CkptError as error:
            said[case["name"]] = f"{type(error).__name__}: {error.message} | {error.hint}"
        except Exception:
            said[case["name"]] = traceback.format_exc()
    if os.environ["RANK"] == "0":
        answer.write_text(json.dumps(said))


main()
