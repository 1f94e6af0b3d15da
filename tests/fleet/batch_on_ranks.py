"""One of the ranks that divide a batch; each says what it knows in the end.

python forked_ranks.py 2 batch_on_ranks.py RUN FOLDER
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path

import ckpttool
from ckpttool.errors import UsageError
from ckpttool.transfer import processes


def main() -> None:
    run, folder, rank = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])
    try:
        ckpttool.batch("convert", run, folder / "no/{step}", to="torch" if rank else "dcp")
        refused = ""
    except UsageError as error:
        refused = error.message
    done = ckpttool.batch("convert", run, folder / "out/{step}", to="safetensors", only="model")
    # As in a process that torchrun starts again: what the first job has said is in the store still.
    os.environ["TORCHELASTIC_RESTART_COUNT"], processes._JOBS = "1", itertools.count()
    again = ckpttool.batch("convert", run, folder / "out/{step}", to="safetensors", only="model")
    states = [[(item.step, item.state) for item in result.items] for result in (done, again)]
    (folder / f"said-{rank}.json").write_text(json.dumps([refused, *states]))


if __name__ == "__main__":
    main()
