"""The process of one rank, from its first line."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ckpttool.operations.verify_resume.trial.job import read
from ckpttool.operations.verify_resume.worker.phases import watched


def begin(path: str, environment: Mapping[str, str]) -> None:
    """Do the job in a file. `environment` is that of the calling process: this one may be forked from an older one."""
    own = {name: value for name, value in os.environ.items() if name not in environment}
    os.environ.update({**environment, **own, **_of_torchrun()})
    job = read(path)
    with watched(job, int(os.environ["RANK"])) as watch:
        # Imported late: the launching process only refers to this function.
        from ckpttool.operations.verify_resume.worker.run import run

        run(job, watch)


def _of_torchrun() -> dict[str, str]:
    """Return the variables that the launcher set for this rank, in place of those of an outer one."""
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
