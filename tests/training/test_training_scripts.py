"""The training scripts of `samples/`: from weights of a bare model, then on another kind and number of ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.paths import SAMPLES
from support.torchrun import forked, torchrun
from support.upstream_readers import path_of

LOSS = re.compile(r"step (\d+) loss ([\d.]+)")


def train(script: str, world: int, *options: object) -> dict[int, float]:
    """The loss of each step."""
    said = forked(world, SAMPLES / script, *options)
    found = {int(step): float(loss) for step, loss in LOSS.findall(said)}
    assert len(found) >= 4, said
    return found


@pytest.fixture(scope="module")
def straight() -> dict[int, float]:
    """Eight steps at one go."""
    return train("train_fsdp2.py", 2, "--weights", path_of("torch/model"), "--steps", 8)


def test_from_fsdp1_to_fsdp2_on_more_ranks(straight: dict[int, float], tmp_path: Path) -> None:
    saved = tmp_path / "full.pt"
    first = train("train_fsdp1.py", 2, "--weights", path_of("torch/model"), "--save", saved, "--format", "torch")
    then = train("train_fsdp2.py", 3, "--resume", saved)
    assert first | then == pytest.approx(straight, rel=1e-5)


def test_one_rank_says_what_is_wrong() -> None:
    said = torchrun(2, SAMPLES / "train_fsdp2.py", "--resume", path_of("torch/model"))
    assert re.findall("^(?:error|hint): .*", said, re.MULTILINE) == [
        f"error: `{path_of('torch/model')}` has no optimizers, and one is needed",
        "hint: `ckpttool inspect` shows what is in it",
    ]
    assert "loader.py" not in said, "a rank's traceback"
    assert set(re.findall(r"exitcode +: (\d+)", said)) == {"2"}


def test_a_rank_that_is_alone_with_an_error_says_it(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text(
        "import time, ckpttool, ckpttool.training.exit_on_error as ending, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "ending._WAIT = 1\n"
        "with ckpttool.exit_on_error():\n"
        "    if dist.get_rank() == 1:\n"
        "        raise ckpttool.CkptError('no \\x1b[31m luck', hint='try another')\n"
        "time.sleep(300)\n"
    )
    said = torchrun(2, script)
    assert "error: rank 1: no \\x1b[31m luck\nhint: try another\n" in said
    assert re.findall(r"rank +: 1 .*\n +exitcode +: 70", said), said


KILLED = """
import os, sys, torch, torch.distributed as dist, torch.distributed.fsdp, ckpttool
from ckpttool.training import fill, fsdp1
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=int(sys.argv[4]), world_size=2)
model = torch.nn.Linear(3, 2)
if len(sys.argv) > 5:
    model = torch.distributed.fsdp.FullyShardedDataParallel(model, device_id=torch.device("cpu"))
if dist.get_rank() == 1:
    fill.fill = lambda *_: os._exit(9)
    fsdp1.sharded = lambda *_: os._exit(9)
with ckpttool.exit_on_error():
    ckpttool.load(sys.argv[1], model, strategy=sys.argv[3])
"""


def test_a_rank_that_was_killed_is_one_message(tmp_path: Path) -> None:
    """What gloo raises on the others is an error of ours, at once, whichever rank reads."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    torch.save(torch.nn.Linear(3, 2).state_dict(), tmp_path / "a.pt")
    started = []
    for strategy, *fsdp1 in (["parallel"], ["broadcast"], ["parallel", "fsdp1"]):
        store = tmp_path / "".join([strategy, *fsdp1])
        for rank in "01":
            command = [sys.executable, str(script), str(tmp_path / "a.pt"), str(store), strategy, rank, *fsdp1]
            options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            started.append(subprocess.Popen(command, **options))
    for i, process in enumerate(started):
        said, _ = process.communicate(timeout=120)
        assert process.returncode == (9 if i % 2 else 70), said
        if i % 2 == 0:
            assert "Traceback" not in said
            errors = [line for line in said.splitlines() if line.startswith(("error:", "hint:"))]
            assert len(errors) == 2 and "error: rank 0 lost its connection to another rank: " in errors[0], said


ABORTING = """
import atexit, os, torch.distributed as dist, ckpttool
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
class Teardown:
    def __del__(self, kill=os.kill, pid=os.getpid()): kill(pid, 6)
teardown = Teardown()
atexit.register(print, "closed")
with ckpttool.exit_on_error():
    raise ckpttool.CkptError("no luck")
"""


def test_threads_of_gloo_do_not_change_the_exit_code(tmp_path: Path) -> None:
    """Tearing the interpreter down aborts it now and then: here it always does. What others registered is called."""
    script = tmp_path / "aborting.py"
    script.write_text(ABORTING)
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (70, "closed\n", "error: no luck\n")


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["parallel", "broadcast"])
def test_from_fsdp2_to_fsdp1_and_on(straight: dict[int, float], tmp_path: Path, strategy: str) -> None:
    first = train("train_fsdp2.py", 3, "--weights", path_of("torch/model"), "--save", tmp_path / "dcp", "--steps", 4)
    options = ("--strategy", strategy, "--format", "fsdp1")
    then = train("train_fsdp1.py", 2, "--resume", tmp_path / "dcp", "--save", tmp_path / "ranks", *options)
    assert first | then == pytest.approx(straight, rel=1e-5)
    last = train("train_fsdp1.py", 1, "--resume", tmp_path / "ranks")
    assert last == pytest.approx(train("train_fsdp2.py", 3, "--resume", tmp_path / "ranks"), rel=1e-5)
