"""A batch that ranks divide: every checkpoint once, and with ranks that are killed at random moments, too."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.batch_logs import lines_of
from support.faults import save_dcp
from support.folders import contents
from support.paths import CHECKPOINTS, ROOT
from support.torchrun import forked

import ckpttool

STEPS = 300
RANKS = 4
RESTARTS = 25  # of one torchrun
SMALL = {"to": "safetensors", "only": ["model"]}


def lines(folder: Path) -> list[dict[str, Any]]:
    """What all ranks have written down."""
    return [line for log in sorted(folder.glob("batch*.jsonl")) for line in lines_of(log)]


def test_ranks_divide_a_batch(tmp_path: Path) -> None:
    steps = [5, 10, 100, 200]
    for step in steps:
        shutil.copytree(CHECKPOINTS / "dcp/hsdp_w4/ckpt", tmp_path / f"run7/step-{step}")
    printed = forked(2, Path(__file__).with_name("batch_on_ranks.py"), tmp_path / "run7", tmp_path)
    said = [json.loads((tmp_path / f"said-{rank}.json").read_text()) for rank in range(2)]
    for refused, done, again in said:
        assert "rank 1 was started with `--to torch`, and rank 0 with `--to dcp`" in refused, printed
        assert done == [[step, "done"] for step in steps]
        assert again == [[step, "kept"] for step in steps]
    assert not (tmp_path / "no").exists()
    states = Counter((line["step"], line["state"]) for line in lines(tmp_path / "out"))
    assert states == {(step, state): 1 for step in steps for state in ("begun", "done")}


def save_run(folder: Path) -> None:
    for step in range(1, STEPS + 1):
        weights = {f"layers.{i}.weight": torch.arange(step, step + 64, dtype=torch.float32) * i for i in range(4)}
        save_dcp(folder / f"run7/step-{step}", {"model": weights, "step": step})


def ranks_of(launcher: int) -> list[int]:
    """The processes of the ranks that torchrun has started."""
    path = Path(f"/proc/{launcher}/task/{launcher}/children")
    return [int(number) for number in path.read_text().split()] if path.exists() else []


@pytest.mark.long
def test_ranks_that_are_killed_at_random(memory: Path) -> None:
    """Every item is what a single command makes of it, byte for byte, and none is published twice."""
    save_run(memory)
    some, inodes, kills, starts, code = random.Random(7), dict[str, int](), 0, 0, None
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    command += ["--max-restarts", str(RESTARTS), "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += ["--monitor-interval", "0.1", "-m", "ckpttool"]
    command += ["batch", "convert", "run7", "out/{step}", "--to", "safetensors", "--only", "model"]
    until = time.monotonic() + 1500
    while code != 0:
        assert time.monotonic() < until, (kills, starts)
        starts += 1
        with (memory / f"{starts}.txt").open("w") as output:
            launcher = subprocess.Popen(
                command, cwd=memory, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=output, stderr=output
            )
            goal = some.randint(1, 15)
            while launcher.poll() is None:
                time.sleep(some.uniform(0.01, 0.2))
                for path in (memory / "out").glob("[0-9]*"):
                    # Published once, and by one rank.
                    assert inodes.setdefault(path.name, path.stat().st_ino) == path.stat().st_ino
                # After so many more, and not after so much time, which ranks may need to begin.
                ranks = ranks_of(launcher.pid)
                if ranks and len(inodes) >= goal:
                    os.kill(launcher.pid if kills % 10 == 9 else some.choice(ranks), signal.SIGKILL)
                    kills, goal = kills + 1, len(inodes) + some.randint(1, 15)
        code = launcher.wait()
    states = Counter((line["step"], line["state"]) for line in lines(memory / "out"))
    failed = Counter(line["message"] for line in lines(memory / "out") if line["state"] == "failed")
    print(f"{kills} kills in {starts} starts: {Counter(line['state'] for line in lines(memory / 'out'))}, {failed}")
    assert kills >= 20
    ckpttool.clean(memory / "out", yes=True)
    there = {path.name for path in (memory / "out").iterdir() if not path.name.endswith(".jsonl")}
    assert there == {str(step) for step in range(1, STEPS + 1)}
    for step in range(1, STEPS + 1):
        assert states[(step, "done")] + states[(step, "kept")] == 1
        ckpttool.convert(memory / f"run7/step-{step}", memory / f"single/{step}", **SMALL)
        assert contents(memory / f"out/{step}") == contents(memory / f"single/{step}")
        assert inodes.get(str(step), 0) in (0, (memory / f"out/{step}").stat().st_ino)
