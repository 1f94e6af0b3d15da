"""What a rank does from its start to its end; see `Job`."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch.distributed as dist

from ckpttool.errors import ReadError
from ckpttool.resume.job import BUILT, END, RESUMED, Job, Seen, write
from ckpttool.resume.worker import gradients, save_load, setup, shard_checks
from ckpttool.resume.worker.build import Built, build
from ckpttool.resume.worker.observe import RankObserver
from ckpttool.resume.worker.record import record

if TYPE_CHECKING:
    from ckpttool.resume.worker.process import Watch


def run(job: Job, watch: Watch, *, leave: bool = True) -> None:
    """Do the job, and write what was observed. `leave` ends the process group."""
    switched_on = setup.deterministic(job)
    watch.enter("process group")
    mesh = setup.join(job)
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
    if leave:
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
    shard_checks.check(built, seen)
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
    saved_at, notes = save_load.load(built, path)
    seen.notes += notes
    number = saved_at if saved_at is not None else job.first
    if number is None:
        raise ReadError(f"`{path}` contains no step", hint="pass `--first-step`", file=path)
    return number
