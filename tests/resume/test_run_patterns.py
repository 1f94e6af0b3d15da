"""Where a run has its checkpoints, as it follows from what it writes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support import forked_command

from ckpttool.fleet.run_patterns import Versions, infer
from ckpttool.resume.runs import run


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


TRAIN = """
import io, os, sys, tarfile, zipfile, torch
out, kind, resume = sys.argv[1], sys.argv[2], sys.argv[3:]
torch.manual_seed(0)
model, step = torch.nn.Linear(2, 1), 0
optimizer = torch.optim.Adam(model.parameters())

def packed(state):
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()

def save(path, files):
    if kind == "zip":  # as Stable-Baselines3 does
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return
    with tarfile.open(path, "w") as archive:  # as NeMo does
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))

def load(path, name):
    if kind == "zip":
        return torch.load(io.BytesIO(zipfile.ZipFile(path).read(name)))
    return torch.load(io.BytesIO(tarfile.open(path).extractfile(name).read()))

if resume:
    model.load_state_dict(load(resume[0], "policy.pth"))
    optimizer.load_state_dict(load(resume[0], "optimizer.pth"))
    step = load(resume[0], "data.pth")["num_timesteps"]
while step < 8:
    loss = model(torch.ones(3, 2) * step).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    with zipfile.ZipFile(f"{{out}}/samples_{{step}}.zip", "w") as archive:
        archive.writestr("a picture", b"\\x89PNG")
    torch.save({{"x": torch.ones(3) * step}}, f"{{out}}/sample_{{step}}.img")
    if step % 2 == 0:
        files = {{"policy.pth": model.state_dict(), "optimizer.pth": optimizer.state_dict()}}
        files["data.pth"] = {{"num_timesteps": step}}
        save(f"{{out}}/rl_model_{{step}}_steps.{{kind}}", {{name: packed(one) for name, one in files.items()}})
"""


@pytest.mark.parametrize("kind", ["zip", "nemo"])
def test_archives_with_weights_are_found_among_others(kind: str, tmp_path: Path) -> None:
    """By what they hold: those of pictures are more, and called alike, and a sample has a tensor."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN.format())
    with forked_command.forked(str(tmp_path)):
        report = run([sys.executable, str(script), "OUT", kind], at=4, until=8, resume_with="... {checkpoint}")
    assert report.verdict == "same", report.message
    assert [*report.runs[0].paths] == [2, 4, 6, 8]
