"""The training scripts of `samples/`: from weights of a bare model, then on another kind and number of ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import torchrun
from reading import path_of

SAMPLES = Path(__file__).resolve().parents[2] / "samples"
LOSS = re.compile(r"step (\d+) loss ([\d.]+)")


def train(script: str, world: int, *options: object) -> dict[int, float]:
    """The loss of each step."""
    said = torchrun(world, SAMPLES / script, *options)
    found = {int(step): float(loss) for step, loss in LOSS.findall(said)}
    assert len(found) >= 4, said
    return found


@pytest.fixture(scope="module")
def straight() -> dict[int, float]:
    """Eight steps at one go."""
    return train("train_fsdp2.py", 2, "--weights", path_of("torch_model"), "--steps", 8)


def test_from_fsdp1_to_fsdp2_on_more_ranks(straight: dict[int, float], tmp_path: Path) -> None:
    saved = tmp_path / "full.pt"
    first = train("train_fsdp1.py", 2, "--weights", path_of("torch_model"), "--save", saved, "--format", "torch")
    then = train("train_fsdp2.py", 3, "--resume", saved)
    assert first | then == pytest.approx(straight, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["parallel", "broadcast"])
def test_from_fsdp2_to_fsdp1_and_on(straight: dict[int, float], tmp_path: Path, strategy: str) -> None:
    first = train("train_fsdp2.py", 3, "--weights", path_of("torch_model"), "--save", tmp_path / "dcp", "--steps", 4)
    options = ("--strategy", strategy, "--format", "fsdp1")
    then = train("train_fsdp1.py", 2, "--resume", tmp_path / "dcp", "--save", tmp_path / "ranks", *options)
    assert first | then == pytest.approx(straight, rel=1e-5)
    last = train("train_fsdp1.py", 1, "--resume", tmp_path / "ranks")
    assert last == pytest.approx(train("train_fsdp2.py", 3, "--resume", tmp_path / "ranks"), rel=1e-5)
