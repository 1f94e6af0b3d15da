"""What was trained on ranks, exported, and loaded by transformers: the same weights, the same logits, no warnings."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.model_families import BRIEF, FAMILIES, KINDS, Trained, inputs

import ckpttool

SHORT = {("fsdp2", "gpt2", "accelerate"), ("fsdp2", "t5", "ranks")}
ALL = [(mode, family, kind) for mode in ("fsdp1", "fsdp2") for family in FAMILIES for kind in KINDS]


def load(folder: Path, caplog: pytest.LogCaptureFixture) -> tuple[Any, list[str]]:
    """A model by its own class, and what transformers had to say about keys."""
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    transformers.utils.logging.enable_propagation()
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="transformers"):
        model, info = kind.from_pretrained(folder, output_loading_info=True)
    transformers.utils.logging.disable_propagation()
    said = [record.getMessage() for record in caplog.records]
    return model.eval(), said + [f"{key}: {found}" for key, found in info.items() if found]


@pytest.mark.parametrize(
    ("mode", "family", "kind"), [pytest.param(*case, marks=() if case in SHORT else pytest.mark.long) for case in ALL]
)
def test_what_was_trained_is_loaded_bit_for_bit(
    mode: str, family: str, kind: str, trained: Trained, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = trained(mode) / family
    made = ckpttool.export(folder / kind, tmp_path / "out", assets=folder / "expected", check=True)
    assert made.compared.startswith(transformers.AutoConfig.from_pretrained(folder / "expected").architectures[0])

    ours, theirs = (load_file(at / "model.safetensors") for at in (tmp_path / "out", folder / "expected"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in theirs)

    expected, _ = load(folder / "expected", caplog)
    model, said = load(tmp_path / "out", caplog)
    assert said == []
    wanted = expected.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(**inputs(family)).logits, expected(**inputs(family)).logits)


def test_the_short_run_has_what_it_needs() -> None:
    assert {family for _, family, _ in SHORT} == set(BRIEF)


def test_split_and_cast_it_is_what_transformers_would_save(
    trained: Trained, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = trained("fsdp2") / "gpt2"
    ckpttool.export(
        folder / "dcp", tmp_path / "out", assets=folder / "expected", dtype="bfloat16", max_shard_size="20kB"
    )
    expected, _ = load(folder / "expected", caplog)
    expected.to(torch.bfloat16).save_pretrained(tmp_path / "theirs", max_shard_size="20kB")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    model, said = load(tmp_path / "out", caplog)
    assert said == []
    assert model.dtype == torch.bfloat16
    wanted = load(tmp_path / "theirs", caplog)[0].state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
