"""A program of its own that runs a verb in a child, kills the child at a random moment and looks at what is left.

    python kill_at_random.py '{"verb": "convert", "src": ..., "out": ..., "keywords": {...}, "rounds": 8, "seed": 1}'

The child is forked, so that all of its time is the work and none of it the start of Python. After each kill DST must be
absent or what an undisturbed run makes of it, byte for byte (or, with `overwrite`, the old one, perhaps moved aside),
SRC untouched; and the next run must succeed and leave nothing else there: every other one with `resume`, where the verb
has that. After every third kill `clean` comes first: it removes what is left, and moves an old DST back. Prints what
happened as JSON; `wrong` is what must not have.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ckpttool

Marks = dict[str, str]


def marks(path: Path) -> Marks:
    """Every file below `path` with a hash of what it holds."""
    if not path.exists():
        return {}
    found = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return {str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest() for p in found}


def child(said: dict[str, Any], more: dict[str, Any], report: Path | None = None) -> int:
    """The verb in a process of its own; its number."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        done = getattr(ckpttool, said["verb"])(
            said["src"], str(Path(said["out"], said["dst"])), **said["keywords"], **more
        )
        if report is not None:
            report.write_text(json.dumps({"resumed_bytes": getattr(done, "resumed_bytes", 0), "notes": done.notes}))
        code = 0
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
    os._exit(code)


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def main(said: dict[str, Any]) -> dict[str, Any]:
    out, src, some = Path(said["out"]), Path(said["src"]), random.Random(said["seed"])
    dst, report, reference, older = (out / said["dst"], *(out.parent / name for name in ("report", "whole", "older")))
    before = marks(src)
    # Here first, so that no child has to import anything: it would be killed doing that.
    getattr(ckpttool, said["verb"])(said["src"], str(dst), **said["keywords"])
    times = []
    for _ in range(3):
        remove(dst)
        began = time.monotonic()
        assert os.waitpid(child(said, {}), 0)[1] == 0
        times.append(time.monotonic() - began)
    whole = marks(dst)
    remove(reference)
    dst.rename(reference)
    told: dict[str, Any] = {"killed": 0, "left": 0, "absent": 0, "moved": 0, "cleaned": 0, "resumed": 0, "wrong": []}
    old = marks(older)
    number = -1
    # One that was done before it could be killed does not count.
    while told["killed"] < said["rounds"] and number < 4 * said["rounds"]:
        number += 1
        more: dict[str, Any] = {}
        if old:
            more["overwrite"] = True
            shutil.copytree(older, dst) if older.is_dir() else shutil.copyfile(older, dst)
        pid = child(said, more)
        time.sleep(some.uniform(0, 1.05 * min(times)))
        os.kill(pid, signal.SIGKILL)
        told["killed"] += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        names = sorted(os.listdir(out))
        told["left"] += any(".partial-" in name for name in names)
        there = marks(dst)
        if not there:
            told["absent"] += 1
            aside = [marks(out / name) for name in names if ".old-" in name]
            told["moved"] += len(aside)
            if old and aside != [old]:
                told["wrong"].append([number, "the old one is gone", names])
        elif there not in (whole, old):
            told["wrong"].append([number, "looks complete and is not", names])
        if number % 3 == 2:
            told["cleaned"] += ckpttool.clean(out, yes=True).verdict == "removed"
            there = marks(dst)
            if there not in (whole, old) or os.listdir(out) != [said["dst"]] * bool(there):
                told["wrong"].append([number, "after clean", sorted(os.listdir(out))])
        if said["resumes"] and number % 2:
            more["resume"] = True
        if dst.exists() or old:
            more["overwrite"] = True
        status = os.waitpid(child(said, more, report), 0)[1]
        if status or marks(dst) != whole or os.listdir(out) != [said["dst"]]:
            told["wrong"].append([number, "the next run", status, sorted(os.listdir(out))])
            for name in os.listdir(out):
                remove(out / name)
        else:
            told["resumed"] += json.loads(report.read_text())["resumed_bytes"] > 0
        remove(dst)
    if marks(src) != before:
        told["wrong"].append("the source was touched")
    return told


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
