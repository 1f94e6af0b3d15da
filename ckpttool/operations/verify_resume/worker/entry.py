"""The process of one rank, from its first line."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ckpttool.operations.verify_resume.trial import job as jobs
from ckpttool.operations.verify_resume.worker.phases import watched


def begin(path: str, environment: Mapping[str, str]) -> None:
    """Do the job in a file. `environment` is that of who asked for it: the process may be forked from an older one."""
    ours = {name: value for name, value in os.environ.items() if name not in environment}
    os.environ.update({**environment, **ours, **_of_torchrun()})
    job = jobs.read(path)
    with watched(job, int(os.environ["RANK"])) as watch:
        # Here, so that whoever only names this function does not import all of it.
        from ckpttool.operations.verify_resume.worker.run import run

        run(job, watch)


def _of_torchrun() -> dict[str, str]:
    """What the launcher told this rank, and not an outer one."""
    names = (
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "MASTER_",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "TORCHELASTIC_",
    )
    return {name: value for name, value in os.environ.items() if name.startswith(names)}
