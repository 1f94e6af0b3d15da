"""What `--producer` writes is resumed from by the framework: state and next step are those of its own checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.torchrun import Once, forked
from support.upstream_readers import path_of, reference_of

from ckpttool import convert

# name: source, producer, options, the name of the destination, what reads it, the framework's own checkpoint
Case = tuple[str, str, dict[str, Any], str, str, str | None]
CASES: dict[str, Case] = {
    "accelerate, FSDP2": (
        "run/accelerate_fsdp2_sharded_w2", "accelerate", {}, "a", "accelerate fsdp2", "run/accelerate_fsdp2_sharded_w2",
    ),
    "accelerate, FSDP1": (
        "run/accelerate_fsdp1_sharded_w2", "accelerate", {}, "a", "accelerate fsdp1", "run/accelerate_fsdp1_sharded_w2",
    ),
    "accelerate, FSDP1 whole": (
        "run/accelerate_fsdp1_full_w2", "accelerate", {}, "a", "accelerate full", "run/accelerate_fsdp1_full_w2",
    ),
    "accelerate, DDP": (
        "run/accelerate_fsdp2_sharded_w2", "accelerate:ddp", {}, "a", "accelerate ddp", None,
    ),
    "accelerate, DDP, safetensors": (
        "run/accelerate_ddp_w2", "accelerate", {}, "a", "accelerate ddp", "run/accelerate_ddp_w2",
    ),
    "rank files of FSDP1 -> accelerate": (
        "run/accelerate_fsdp1_rankfiles_w2", "accelerate:sharded", {}, "a", "accelerate fsdp1",
        "run/accelerate_fsdp1_sharded_w2",
    ),
    "torchtitan": ("run/torchtitan_w2", "torchtitan", {}, "step-3", "torchtitan few", "run/torchtitan_w2"),
    "accelerate -> torchtitan": (
        "run/accelerate_fsdp2_sharded_w2", "torchtitan",
        {"drop": ("rng", "dataloader", "sampler", "scaler", "other")}, "step-3", "torchtitan", None,
    ),
    "verl": (
        "run/verl_fsdp2_w2", "verl", {"tensor_class": "dtensor:cpu:fsdp"}, "global_step_3", "verl", "run/verl_fsdp2_w2",
    ),
    "verl, FSDP1 -> FSDP2": (
        "run/verl_fsdp1_w2", "verl", {"tensor_class": "dtensor:cpu:fsdp"}, "global_step_3", "verl", None,
    ),
}  # fmt: skip
INNER = {"run/torchtitan_w2": "step-3", "run/verl_fsdp2_w2": "global_step_3/actor"}


@pytest.fixture(scope="session")
def resumed(once: Once) -> dict[str, str]:
    """What the ranks say of each case; converts everything first, then launches once."""

    def make(folder: Path) -> None:
        told = []
        for number, (name, (source, producer, options, called, reader, theirs)) in enumerate(CASES.items()):
            ours = folder / str(number) / called
            convert(path_of(source), ours, producer=producer, check=True, **options)
            own = Path(path_of(theirs)) / INNER.get(theirs, "") if theirs is not None else None
            told.append({
                "name": name, "reader": reader, "ours": str(ours / "actor" if producer == "verl" else ours),
                "theirs": str(own) if own is not None else None, "reference": str(reference_of(source)),
            })  # fmt: skip
        (folder / "told.json").write_text(json.dumps(told, indent=2))
        script = Path(__file__).with_name("resume_on_ranks.py")
        said = forked(2, script, folder)
        assert (folder / "verdicts.json").exists(), said

    found: dict[str, str] = json.loads((once("resumed", make) / "verdicts.json").read_text())
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_framework_resumes(name: str, resumed: dict[str, str]) -> None:
    assert resumed.get(name, "the ranks ended before they came to this case") == "equal"
