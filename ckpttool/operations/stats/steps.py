"""The steps of a run whose statistics are wanted."""

from __future__ import annotations

from collections.abc import Sequence

from ckpttool.errors import UsageError
from ckpttool.producers import runs


def chosen_steps(path: str, steps: str | Sequence[int | str]) -> list[runs.RunCheckpoint]:
    """Return the complete checkpoints of the run at `path`, oldest first: `all`, or those of some steps, `500,1000`.

    Raises UsageError if there is no run, or none of a step.
    """
    complete = [checkpoint for checkpoint in runs.checkpoints(path) if checkpoint.complete]
    given = steps.split(",") if isinstance(steps, str) else steps
    names = [str(name).strip() for name in given]
    if not complete:
        hint = "name the directory that has the checkpoints of several steps"
        raise UsageError(
            f"`{path}` is no run with complete checkpoints, of which to take steps: {', '.join(names)}", hint=hint
        )
    if names == ["all"]:
        return complete
    by_step = {str(checkpoint.step): checkpoint for checkpoint in complete}
    absent = [name for name in names if name not in by_step]
    if absent:
        hint = f"the complete ones are {', '.join(by_step)}"
        raise UsageError(f"`{path}` has no complete checkpoint of step {absent[0]}", hint=hint)
    return [checkpoint for name, checkpoint in by_step.items() if name in names]
