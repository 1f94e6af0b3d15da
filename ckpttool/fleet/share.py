"""The share of a batch that this process does without speaking to others: `2/8`, or what a scheduler says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ckpttool.errors import UsageError


@dataclass(frozen=True, slots=True)
class Share:
    """Part `index` of `count`, from 0 on."""

    index: int
    count: int


def share_of(text: str | None, environment: Mapping[str, str] = os.environ) -> Share:
    """Return the share in a text, `2/8`, else that of a Slurm array or a Kubernetes indexed Job, else all. Raises
    UsageError."""
    if text is not None:
        index, _, count = text.partition("/")
        return _checked(index, count, f"--shard {text}")
    if "SLURM_ARRAY_TASK_ID" in environment:
        given = {name: environment.get(f"SLURM_ARRAY_TASK_{name}", "") for name in ("ID", "COUNT", "MIN", "STEP")}
        try:
            at = (int(given["ID"]) - int(given["MIN"] or 0)) // int(given["STEP"] or 1)
        except (ValueError, ZeroDivisionError):
            at = -1
        return _checked(str(at), given["COUNT"], "SLURM_ARRAY_TASK_ID")
    if "JOB_COMPLETION_INDEX" in environment:
        index, count = environment["JOB_COMPLETION_INDEX"], environment.get("JOB_COMPLETIONS", "")
        return _checked(index, count, "JOB_COMPLETION_INDEX")
    return Share(0, 1)


def _checked(index: str, count: str, origin: str) -> Share:
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        found = (
            f"`{origin}` is not a share" if origin.startswith("--") else f"`{origin}` says {index} of {count or '?'}"
        )
        hint = "write `--shard I/N` with I from 0 to N-1; `--shard 0/1` is everything"
        raise UsageError(found, hint=hint)
    return Share(int(index), int(count))
