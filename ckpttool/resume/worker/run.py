"""The processes of ranks, and what each does from its start to its end: one imports torch, and those of each run are
forked from it. A rank has phases with a time limit, and says where it was when it fails."""

from __future__ import annotations

import faulthandler
import glob
import os
import signal
import sys
import tempfile
import time
import traceback
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any, TextIO

import fsspec  # type: ignore[import-untyped]  # noqa: F401 - this and the compiler are needed by all ranks
import torch._dynamo
import torch._inductor.config  # noqa: F401
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

from ckpttool.errors import CkptError, ReadError
from ckpttool.fleet.process import LONGEST
from ckpttool.resume.job import BUILT, END, ENDED, FILE, RESUMED, Job, Seen, read, write
from ckpttool.resume.launch import torchrun_world
from ckpttool.resume.observe.site.sitecustomize import list_backwards
from ckpttool.resume.worker import gradients, save_load, setup
from ckpttool.resume.worker.observe import RankObserver, check_shards
from ckpttool.resume.worker.record import record
from ckpttool.resume.worker.setup import Built, build
from ckpttool.storage.workspace import scratch_directory

# A fork of a process that has imported this much is not safe on macOS.
_START = "spawn" if sys.platform == "darwin" else "fork"
_POLL = 0.02  # seconds between two looks for a job


def serve(folder: str, seed: str) -> None:
    """Do the jobs of a seed in a folder, one after the other and each on processes of its own, until this one is ended:
    all ranks of it, or under torchrun the rank that torchrun gave this process."""
    done: set[str] = set()
    while True:
        for path in {*glob.glob(os.path.join(glob.escape(folder), "*", FILE))} - done:
            done.add(path)
            job, failed, of_torchrun = read(path), {}, torchrun_world() is not None
            if job.seed != int(seed):
                continue
            first = int(os.environ["RANK"]) if of_torchrun else 0
            count = int(first < job.mesh.world) if of_torchrun else job.mesh.world
            # They meet at a file: a store of TCP has threads, and a process that has some is not safe to fork.
            with nullcontext(job.folder) if of_torchrun else scratch_directory("ckpttool-trial-") as meeting:
                try:
                    start_processes(begin, (first, job, meeting), count, start_method=_START)
                except ProcessExitedException as error:  # the others are ended by SIGTERM
                    failed = {first + error.error_index: error.exit_code}
            write(failed, os.path.join(job.folder, ENDED.format(first)))
        time.sleep(_POLL)


class Watch:
    """Records the phase that a rank is in. If one exceeds its limit, the process writes the stacks of its threads and
    ends, whatever it is waiting for."""

    def __init__(self, job: Job, rank: int, stack: TextIO) -> None:
        self.rank = rank
        self._job = job
        self._stack = stack

    def enter(self, phase: str) -> None:
        """Begin a new phase, `step 3`."""
        with open(os.path.join(self._job.folder, f"rank{self.rank}.phase"), "w", encoding="utf-8") as stream:
            stream.write(phase)
        faulthandler.dump_traceback_later(self._job.limit, exit=True, file=self._stack)

    def end(self) -> None:
        faulthandler.cancel_dump_traceback_later()


def begin(index: int, first: int, job: Job, meeting: str) -> None:
    """Do a job as one of its ranks, which meet in a folder. What it raises is recorded, and the process ends with 1."""
    rank = first + index
    of_rank = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), rank) | {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    of_all = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), job.mesh.world)
    # Nobody listens there: the process group is formed before a recipe is called, and libraries ask for the names only.
    nowhere = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    if torchrun_world() is None:
        os.environ.update({name: str(value) for name, value in (of_rank | of_all | nowhere).items()})
    if len(temporary := os.path.join(job.folder, "tmp")) <= LONGEST:
        os.makedirs(temporary, exist_ok=True)
        os.environ["TMPDIR"], tempfile.tempdir = temporary, None
    if job.load is not None and not job.natively:
        list_backwards()
    with (
        open(os.path.join(job.folder, f"rank{rank}.log"), "wb") as log,
        open(os.path.join(job.folder, f"rank{rank}.stack"), "w", encoding="utf-8") as stack,
    ):
        for number in (1, 2):
            os.dup2(log.fileno(), number)
        faulthandler.enable(file=stack)
        # When one rank fails the others are terminated, and record their stacks too.
        faulthandler.register(signal.SIGTERM, file=stack, chain=True)
        watch = Watch(job, rank, stack)
        watch.enter("start")
        try:
            run(job, watch, meeting)
        except Exception as error:
            write(_described(error, job.recipe), os.path.join(job.folder, f"rank{rank}.error.json"))
            traceback.print_exception(error)
            sys.stderr.flush()
            # No clean-up of the process group, in which other ranks may be waiting.
            os._exit(1)
        finally:
            watch.end()


def _described(error: Exception, recipe: str) -> dict[str, Any]:
    """Return an error as JSON, with the line of the recipe that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if os.path.dirname(frame.filename) == os.path.dirname(recipe)]
    where = f"{os.path.basename(own[-1].filename)}:{own[-1].lineno} in {own[-1].name}" if own else None
    description = {
        "at": time.time(),
        "ours": False,
        "type": type(error).__name__,
        "message": str(error),
        "where": where,
        "stack": [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in reversed(frames)],
    }
    if isinstance(error, CkptError):
        description |= {"ours": True, "message": error.message, "hint": error.hint, "facts": error.facts}
    return description


# What a rank does ----------------------------------------------------------------------------------------------------


def run(job: Job, watch: Watch, meeting: str) -> None:
    """Do the job, and write what was observed. The ranks meet in the folder `meeting`."""
    switched_on = setup.deterministic(job)
    watch.enter("process group")
    mesh = setup.join(job, watch.rank, meeting)
    seen = Seen(watch.rank, setup.replica(mesh), switched_on=switched_on)
    watch.enter("build")
    built = build(job, mesh)
    if job.deterministic:
        seen.switched_on += setup.settle(built.model)
    if job.gradients_of is not None:
        watch.enter("gradients")
        seen.alone = gradients.again(job, built)
    else:
        _train(job, watch, built, seen)
    watch.enter("end")
    write(asdict(seen), os.path.join(job.folder, f"rank{watch.rank}.json"))
    dist.barrier()
    watch.end()
    dist.destroy_process_group()


def _train(job: Job, watch: Watch, built: Built, seen: Seen) -> None:
    observer = RankObserver(built)
    for before in range(job.before if job.load is None else 0):
        watch.enter(f"step {before}")
        seen.steps.append(observer.step(before))
    number = seen.first_step = job.before if job.load is None else _resume(job, job.load, watch, built, seen)
    watch.enter("recording the state")
    # Recorded before it is saved: changes by the save itself then show in the next steps.
    seen.shared = record(built, os.path.join(job.folder, RESUMED), number, rounded=True)
    check_shards(built, seen)
    if job.save_natively is not None:
        watch.enter("saving by torch")
        save_load.save_natively(built, job.save_natively, number)
    if job.save is not None:
        watch.enter("saving")
        save_load.save(built, job.save, number)
    for after in range(number, number + job.after):
        watch.enter(f"step {after}")
        seen.steps.append(observer.step(after))
    watch.enter("recording the end")
    record(built, os.path.join(job.folder, END), number + job.after)
    if job.keep_gradients:
        watch.enter("gradients")
        seen.gradients = gradients.keep(job, built, observer.inputs)


def _resume(job: Job, path: str, watch: Watch, built: Built, seen: Seen) -> int:
    watch.enter("recording what was built")
    record(built, os.path.join(job.folder, BUILT), 0, optimizer=False)
    watch.enter("loading")
    if job.natively:
        return save_load.load_natively(built, path)
    saved_at, notes = save_load.load(built, path, job.known)
    seen.notes += notes
    number = saved_at if saved_at is not None else job.first
    if number is None:
        raise ReadError(f"`{path}` contains no step", hint="pass `--first-step`", file=path)
    return number
