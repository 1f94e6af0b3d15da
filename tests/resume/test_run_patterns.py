"""Where a run has its checkpoints, as it follows from what it writes."""

from __future__ import annotations

import pytest

from ckpttool.resume.run_patterns import Versions, infer


def once(*names: str) -> Versions:
    """Files that are written one after the other."""
    return {name: {name: save} for save, name in enumerate(names)}


def again(**versions: list[int]) -> Versions:
    """Files that are written again and again, with the step that each version says; 0 for none."""
    return {f"{name}.pt": {f"{name}{at}@{n}": at for at, n in enumerate(steps)} for name, steps in versions.items()}


def step_of(path: str) -> int | None:
    return int(path.partition("@")[2] or 0) or None


@pytest.mark.parametrize(
    ("versions", "pattern"),
    [
        (once("agent_2.pt", "agent_4.pt"), "agent_{step}.pt"),
        (once("s2/ckpt.pt", "s4/ckpt.pt"), "s{step}"),
        (once("e=0-step=2.ckpt", "e=0-step=4.ckpt", "e=1-step=6.ckpt"), "e=*-step={step}.ckpt"),
        (once("ckpt_1_100.pt", "ckpt_2_200.pt"), "ckpt_*_{step}.pt"),
        (once("logs/version_0/checkpoints/2.ckpt", "logs/version_0/checkpoints/4.ckpt"), "logs/version_*/checkpoints/"
         "{step}.ckpt"),
        (once("2026-01-02_03-04-05/ckpt-2.pt", "2026-01-02_03-04-05/ckpt-4.pt"), "*/ckpt-{step}.pt"),
        (once("m-2.pt", "m-4.pt", "m-6.pt", "best-4.pt"), "m-{step}.pt"),
        # One number grows, and of the other each save has all.
        ({f"{n}/rank_{r}.pt": {f"{n}{r}": n} for n in (2, 4) for r in (0, 1)}, "{step}"),
        (again(last=[2, 4, 6], best=[2, 4]), "last.pt"),
        # Both are written at each save, and neither is whole.
        (again(model=[0, 0, 0], optimizer=[2, 4, 6]), "."),
        (again(slot_0=[2, 6], slot_1=[4, 8]), "slot_*.pt"),
        ({f"at-20260102-03040{n}.pt": {f"x@{n}": n} for n in (2, 4)}, "at-*.pt"),
        (once("model.pt"), None),
        (again(weights=[0, 0, 0]), None),
        (once("model-2.pt", "optimizer-2.pt", "model-4.pt", "optimizer-4.pt"), None),
    ],
)  # fmt: skip
def test_a_pattern_follows_from_what_was_written(versions: Versions, pattern: str | None) -> None:
    assert infer(versions, step_of, lambda path: path.startswith(("last", "best", "slot", "x@"))) == pattern
