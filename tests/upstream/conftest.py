"""What is converted and loaded on ranks, made once."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from conversion_cases import CASES, description
from support import large_state
from support.torchrun import Once, forked


@pytest.fixture(scope="session")
def large_folder(once: Once) -> Path:
    """The state of `large.py` as torch writes it: `large.pt`, and the DCP directory `dcp`."""

    def make(folder: Path) -> None:
        torch.save(large_state.state(), folder / "large.pt")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process only
            torch_dcp.save(large_state.state(), checkpoint_id=folder / "dcp", no_dist=True)

    return once("large", make)


@pytest.fixture(scope="session")
def verdicts(once: Once, large_folder: Path, pytestconfig: pytest.Config) -> Callable[[int], dict[str, str]]:
    """`verdicts(world)`: what the ranks of a world say of each case. Converts everything first, then launches once."""
    # All cases of a world go into one launch, so it has to know what pytest will not ask for.
    brief = "not long" in pytestconfig.getoption("markexpr")
    cases = [case for case in CASES.values() if not (brief and all(map(case.long_on, case.worlds)))]

    def convert_all(folder: Path) -> None:
        told = [description(case, large_folder / "large.pt", folder / str(i)) for i, case in enumerate(cases)]
        (folder / "cases.json").write_text(json.dumps(told, indent=2))

    def launch(world: int) -> Callable[[Path], None]:
        def make(folder: Path) -> None:
            told = json.loads((once("routes", convert_all) / "cases.json").read_text())
            found = {one["name"]: one["verdict"] for one in told if "verdict" in one}
            rest = [one for one in told if "verdict" not in one and world in CASES[one["name"]].worlds]
            rest = [one for one in rest if not (brief and CASES[one["name"]].long_on(world))]
            (folder / "cases.json").write_text(json.dumps(rest))
            script = Path(__file__).with_name("read_on_ranks.py")
            said = forked(world, script, folder / "cases.json", folder / "read.json")
            if (folder / "read.json").exists():
                found.update(json.loads((folder / "read.json").read_text()))
            for one in rest:
                found.setdefault(one["name"], f"the ranks ended before they came to this case:\n{said}")
            (folder / "verdicts.json").write_text(json.dumps(found, indent=2))

        return make

    def get(world: int) -> dict[str, str]:
        made: dict[str, str] = json.loads((once(f"ranks-{world}", launch(world)) / "verdicts.json").read_text())
        return made

    return get
