"""What public training scripts write is read whole: each tensor of each file, its role, its step, and back again.

The expected values are those of torch, safetensors and numpy, which wrote the files (`support.layouts`).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support import layouts
from support.layouts.measure import Figures, measured
from support.layouts.run_names import RUNS, RunNames


@pytest.fixture(scope="module", params=[2, pytest.param(1, marks=pytest.mark.long)])
def figures(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Figures]:
    """Of every layout; of every second one, where tests are not to take long."""
    some = layouts.LAYOUTS[:: request.param]
    return {one.name: measured(one, tmp_path_factory.mktemp("layout"), convert=False) for one in some}


def test_every_tensor_of_every_file_is_seen(figures: dict[str, Figures]) -> None:
    assert {name: one.unseen for name, one in figures.items() if one.unseen} == {}
    assert [name for name, one in figures.items() if not one.opened] == []
    assert {name: one.unnamed for name, one in figures.items() if one.unnamed} == {}


def test_roles_come_from_what_files_hold(figures: dict[str, Figures]) -> None:
    """What is not known is `other`; nothing is taken for what it is not."""
    roles = sum((one.roles for one in figures.values()), Counter[str]())
    assert roles["wrong"] == 0, {name: one.wrong for name, one in figures.items() if one.wrong}
    assert roles["right"] >= 0.95 * roles.total(), roles


def test_a_run_opens_at_its_newest_step(figures: dict[str, Figures]) -> None:
    newest = Counter(one.newest for one in figures.values())
    assert newest["newest"] >= 0.9 * len(figures), newest
    assert not newest["old"], newest


@pytest.mark.parametrize("run", RUNS, ids=[one.name.replace("/", " ") for one in RUNS])
def test_the_newest_is_told_by_the_names(run: RunNames, tmp_path: Path) -> None:
    """A number that is not a step is not taken for one: ranks, rates, ports, sizes, layers."""
    assert run.outcome(tmp_path / "run") == "newest"


def each() -> list[object]:
    """Every layout; a fourth of them where tests are not to take long."""
    marks = [[pytest.mark.long] if i % 4 else [] for i in range(len(layouts.LAYOUTS))]
    return [pytest.param(one, id=one.name, marks=own) for one, own in zip(layouts.LAYOUTS, marks, strict=True)]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("layout", each())
def test_what_was_converted_is_what_was_written(layout: layouts.Layout, tmp_path: Path) -> None:
    """To DCP, to one torch file, and to the same layout: no tensor has other bits, none is lost."""
    found = measured(layout, tmp_path, convert=True).conversions
    lost = {to: said for to, said in found.items() if said != "equal" and not said.startswith("0 lost")}
    if "the whole state" in lost.get("dcp", "")[:200]:
        del lost["dcp"]  # DCP stores a dict, and here a tuple or a list is the state: the error says so
    assert lost == {}
