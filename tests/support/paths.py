"""Directories of the repository that tests read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "samples"
GENERATORS = SAMPLES / "generators"
CHECKPOINTS = SAMPLES / "checkpoints"


def samples_of(folder: str) -> list[str]:
    """The names of the samples of one kind: `samples_of("torch")` has `torch/full`."""
    return sorted(f"{folder}/{path.name}" for path in (CHECKPOINTS / folder).iterdir() if any(path.glob("ckpt*")))


def all_samples() -> list[str]:
    """The names of all samples."""
    return [name for folder in sorted(CHECKPOINTS.iterdir()) for name in samples_of(folder.name)]
