"""The training scripts of `samples/`: from weights of a bare model, then on another kind and number of ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import warm_python
from support.paths import SAMPLES
from support.torchrun import LAUNCH, forked, forked_launcher, torchrun
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
        f"error: `{path_of('torch/model')}` has no optimizer, and one is needed",
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
    done = subprocess.run([*forked_launcher(), "2", script], capture_output=True, text=True, timeout=LAUNCH)
    assert "error: rank 1: no \\x1b[31m luck\nhint: try another\n" in done.stderr
    assert done.returncode == 70, done.stderr


# Forked, as importing torch is what takes long. Each rank writes to a file of its own, and the exit codes are printed.
KILLED = """
import os, sys, torch, torch.distributed as dist, torch.distributed.fsdp, ckpttool
from ckpttool.training import fill, fsdp1
def load(strategy, kind, rank):
    store = dist.FileStore(f"{sys.argv[1]}/{strategy} {kind}", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = torch.nn.Linear(3, 2)
    if kind == "fsdp1":
        model = torch.distributed.fsdp.FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    if rank == 1:
        fill.fill = lambda *_: os._exit(9)
        fsdp1.sharded = lambda *_: os._exit(9)
    with ckpttool.exit_on_error():
        ckpttool.load(f"{sys.argv[1]}/a.pt", model, strategy=strategy)
started = []
for case in sys.argv[2:]:
    for rank in range(2):
        if not (pid := os.fork()):
            said = os.open(f"{sys.argv[1]}/{case} {rank}", os.O_CREAT | os.O_WRONLY)
            os.dup2(said, 1), os.dup2(said, 2)
            sys.exit(load(*case.split(), rank))
        started.append(pid)
print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started))
"""


def test_a_rank_that_was_killed_is_one_message(tmp_path: Path) -> None:
    """What gloo raises on the others is an error of ours, at once, whichever rank reads."""
    torch.save(torch.nn.Linear(3, 2).state_dict(), tmp_path / "a.pt")
    cases = ("parallel plain", "broadcast plain", "parallel fsdp1")
    done = subprocess.run(
        [*warm_python.python(), "-c", KILLED, tmp_path, *cases], capture_output=True, text=True, timeout=120
    )
    said = {case: (tmp_path / f"{case} 0").read_text() for case in cases}
    assert done.stdout.split() == ["70", "9"] * 3, (said, done.stderr)
    for one in said.values():
        assert "Traceback" not in one
        errors = [line for line in one.splitlines() if line.startswith(("error:", "hint:"))]
        assert len(errors) == 2 and "error: rank 0 lost its connection to another rank: " in errors[0], one


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
