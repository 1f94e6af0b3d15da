"""Launches: what takes seconds to start is started once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.torchrun import Once, Verdicts, forked, torchrun


@pytest.fixture(scope="session")
def verdicts(once: Once) -> Verdicts:
    """`verdicts(name, world, cases, *options)`: what the ranks say of each case, in one launch of `on_ranks/run.py`."""

    def get(name: str, world: int, cases: list[list[str]], *options: str) -> dict[str, str]:
        def make(folder: Path) -> None:
            told, found = folder / "told.json", folder / "found.json"
            told.write_text(json.dumps(cases))
            start = torchrun if "accelerator" in options else forked
            said = start(world, Path(__file__).parent / "on_ranks" / "run.py", told, found, *options)
            verdict = json.loads(found.read_text()) if found.exists() else {}
            for case in cases:
                verdict.setdefault(" ".join(case), f"the ranks ended before they came to this case:\n{said}")
            (folder / "verdicts.json").write_text(json.dumps(verdict))

        made: dict[str, str] = json.loads((once(f"training-{name}-{world}", make) / "verdicts.json").read_text())
        return made

    return get
