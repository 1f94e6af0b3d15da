"""One of the ranks that reshard together while calls of one of them fail; each says what came of each case.

    python forked_ranks.py 2 reshard_on_failing_ranks.py SOURCE FOLDER cases.json

A case is `[engine, rank, stage, code, part]`: of the calls of that stage on that rank, the one in this part fails (0 is
the first, 1 the last) with this error number, and of those that write all after it. What there is at the end is in
`FOLDER/NUMBER`, and the words of the ranks in `FOLDER/said-RANK.json`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "samples"))

from support.faults import failing_read, faulty_disk

import ckpttool
from ckpttool.errors import StorageError
from ckpttool.operations import reshard as module
from ckpttool.training import counted_files


@contextmanager
def failing(source: Path, stage: str, code: int, nth: int) -> Iterator[list[str]]:
    """The `nth` call of a stage fails. Gives the calls so far."""
    if stage == "plan":
        error = StorageError(os.strerror(code).lower())
        with mock.patch.object(module, "_plan", **({"side_effect": error} if nth == 0 else {"wraps": module._plan})):
            yield ["plan"]
    elif stage == "read":
        with failing_read(source, nth, code) as calls:
            yield calls
    else:
        with faulty_disk(code, nth, stays=nth >= 0) as calls, open(os.devnull, "wb") as null:
            real = counted_files._Counted.write

            def write(stream: Any, data: Any) -> Any:
                os.write(null.fileno(), b"x")  # what torch writes passes no function of `os`
                return real(stream, data)

            with mock.patch.object(counted_files._Counted, "write", write):
                yield calls


def main() -> None:
    """Count the calls of each stage, and go through the cases."""
    source, folder, own = Path(sys.argv[1]), Path(sys.argv[2]), int(os.environ["RANK"])
    counts: dict[tuple[str, str], int] = {}
    said: list[Any] = []

    def attempt(name: str, engine: str, stage: str, code: int, nth: int | None) -> Any:
        (folder / name).mkdir(exist_ok=True)
        with nullcontext([]) if nth is None else failing(source, stage, code, nth) as calls:
            try:
                ckpttool.reshard(source, folder / name / "dst", to_world=2, engine=engine, threads=1, check=True)
            except BaseException as error:
                return [getattr(error, "exit_code", type(error).__name__), str(error)]
            finally:
                counts.setdefault((engine, stage), len(calls))
        return None

    cases = json.loads(Path(sys.argv[3]).read_text())
    for engine, stage in dict.fromkeys((case[0], case[2]) for case in cases):
        assert attempt(f"{engine} {stage}", engine, stage, 0, -1) is None
    for number, (engine, rank, stage, code, part) in enumerate(cases):
        nth = round(part * (counts[engine, stage] - 1)) if rank == own else None
        said.append(attempt(str(number), engine, stage, code, nth))
        (folder / f"said-{own}.json").write_text(json.dumps([said, [[*key, n] for key, n in counts.items()]]))


main()
