"""What public training scripts write is read whole: each tensor of each file, its role, its step, and back again.

The expected values are those of torch, safetensors and numpy, which wrote the files (`support.layouts`).
"""

from __future__ import annotations

import zipfile
from collections import Counter
from pathlib import Path

import pytest
from support import layouts
from support.layouts.measure import Figures, measured
from support.layouts.run_names import RUNS, RunNames

import ckpttool
from ckpttool.errors import ReadError

# A zip archive of several torch.save files: the error says to unpack it.
REFUSED = {"DLR-RM/stable-baselines3"}
ALL = [layout for layout in layouts.LAYOUTS if layout.name not in REFUSED]


@pytest.fixture(scope="module", params=[2, pytest.param(1, marks=pytest.mark.long)])
def figures(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Figures]:
    """Of every layout; of every second one, and of those that are refused, where tests are not to take long."""
    some = [one for i, one in enumerate(layouts.LAYOUTS) if i % request.param == 0 or one.name in REFUSED]
    return {one.name: measured(one, tmp_path_factory.mktemp("layout"), convert=False) for one in some}


def test_every_tensor_of_every_file_is_seen(figures: dict[str, Figures]) -> None:
    unseen = {name: one.unseen for name, one in figures.items() if one.unseen and name not in REFUSED}
    assert unseen == {}
    assert {name for name, one in figures.items() if not one.opened} == REFUSED
    assert {name: one.unnamed for name, one in figures.items() if one.unnamed and name not in REFUSED} == {}


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


def test_an_archive_of_files_is_read_when_it_is_unpacked(tmp_path: Path) -> None:
    written = next(one for one in layouts.LAYOUTS if one.name in REFUSED).write(tmp_path, 100)
    with pytest.raises(ReadError) as caught:
        ckpttool.inspect(written.path)
    assert "unzip FILE -d DIR" in str(caught.value.hint)
    with zipfile.ZipFile(written.path) as archive:
        archive.extractall(tmp_path / "unpacked")
    found = Counter(entry.part.kind for entry in ckpttool.inspect(tmp_path / "unpacked").tensors)
    expected: Counter[str] = Counter()
    for one in written.expected:
        expected[one.role] += one.tensors
    assert found == +expected


def each() -> list[object]:
    """Every layout; a fourth of them where tests are not to take long."""
    return [pytest.param(one, id=one.name, marks=[pytest.mark.long] if i % 4 else []) for i, one in enumerate(ALL)]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("layout", each())
def test_what_was_converted_is_what_was_written(layout: layouts.Layout, tmp_path: Path) -> None:
    """To DCP, to one torch file, and to the same layout: no tensor has other bits, none is lost."""
    found = measured(layout, tmp_path, convert=True).conversions
    lost = {to: said for to, said in found.items() if said != "equal" and not said.startswith("0 lost")}
    if "the whole state" in lost.get("dcp", "")[:200]:
        del lost["dcp"]  # DCP stores a dict, and here a tuple or a list is the state: the error says so
    assert lost == {}
