"""kill -9 at random moments: no DST that looks complete and is not, and the next run succeeds; `-m long` does 100."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from support.faults import save_dcp, save_torch
from support.paths import ROOT
from support.weights_read import weights_in

# What is done: verb, keywords, name of DST, and whether it goes on from what a killed run has left.
JOBS: dict[str, tuple[str, dict[str, Any], str, bool]] = {
    "convert to dcp": ("convert", {"to": "dcp"}, "out", True),
    "convert to torch": ("convert", {"to": "torch"}, "out.pt", True),
    "convert to safetensors": ("convert", {"to": "safetensors"}, "out", True),
    "convert to fsdp1": ("convert", {"to": "fsdp1", "to_world": 2}, "out", True),
    "reshard": ("reshard", {"to_world": 4}, "out", True),
    "export": ("export", {"strict": False, "only": "model"}, "out", False),
}


LAYERS = 128


def state(layers: int) -> dict[str, torch.Tensor]:
    """Half a MiB a layer."""
    block = torch.arange(1 << 17, dtype=torch.float32).reshape(256, 512)
    return {f"layers.{i}.weight": block + i for i in range(layers)}


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DCP directory of 64 MiB: some of it is copied when the journal is written, every 20 ms."""
    return save_dcp(tmp_path_factory.mktemp("src") / "ckpt", {"model": state(LAYERS), "step": 3})


def kill(job: str, src: Path, folder: Path, rounds: int, *, older: bool = False) -> dict[str, Any]:
    """What `kill_at_random.py` tells of so many kills."""
    verb, keywords, dst, resumes = JOBS[job]
    (folder / "out").mkdir()
    if older:
        made = save_torch if keywords.get("to") == "torch" else save_dcp
        made(folder / "older", {"model": state(1)})
    said = {
        "verb": verb, "src": str(src), "out": str(folder / "out"), "dst": dst, "keywords": keywords,
        "rounds": rounds, "seed": f"{job} {older}", "resumes": resumes,
    }  # fmt: skip
    program = str(Path(__file__).with_name("kill_at_random.py"))
    done = subprocess.run(
        [sys.executable, program, json.dumps(said)],
        capture_output=True, text=True, cwd=ROOT, check=False, timeout=200 + 20 * rounds,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    told: dict[str, Any] = json.loads(done.stdout)
    print(f"{job}, {rounds} kills{', over an old one' if older else ''}: {told}")
    assert not told["wrong"], (told, done.stderr[-2000:])
    return told


def check_whole(path: Path, job: str) -> None:
    """What an undisturbed run makes, by the library that owns the format: the others are compared with it."""
    wanted = state(LAYERS)
    if job.endswith("torch"):
        found = torch.load(path, weights_only=True)["model"]
    elif job == "export":
        found = load_file(path / "model.safetensors")
    elif job.endswith("safetensors"):
        found = {k.removeprefix("model."): v for k, v in weights_in(path).items()}
    elif job.endswith("fsdp1"):
        return
    else:
        found = {name: torch.empty_like(value) for name, value in wanted.items()}
        dcp.load({"model": found}, checkpoint_id=path, no_dist=True)
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


# The others are killed a hundred times by `-m long`; into one file, over an old one, below.
@pytest.mark.parametrize("job", ["convert to dcp", "export"])
def test_kills(job: str, src: Path, memory: Path) -> None:
    told = kill(job, src, memory, 4)
    check_whole(memory / "whole", job)
    assert told["killed"], "no child was killed while it worked"


@pytest.mark.parametrize("job", ["convert to torch"])
def test_kills_while_an_old_one_is_replaced(job: str, src: Path, memory: Path) -> None:
    assert kill(job, src, memory, 4, older=True)["killed"]


@pytest.mark.long
@pytest.mark.parametrize("job", JOBS)
def test_many_kills(job: str, src: Path, memory: Path) -> None:
    told = kill(job, src, memory, 100)
    assert told["killed"] == 100 and told["left"] > 20, told
    assert told["resumed"] or not JOBS[job][3], told


@pytest.mark.long
@pytest.mark.parametrize("job", ["convert to dcp", "convert to torch"])
def test_many_kills_while_an_old_one_is_replaced(job: str, src: Path, memory: Path) -> None:
    told = kill(job, src, memory, 100, older=True)
    assert told["killed"] == 100 and told["left"] > 20, told
