"""What was trained on ranks under the names in memory, exported like what `save_pretrained` wrote: the same files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import model_families
from support.model_families import BRIEF, FAMILIES, Trained, inputs
from support.upstream_readers import dcp_whole

import ckpttool


def loaded(folder: Path, caplog: pytest.LogCaptureFixture) -> Any:
    """A model by its own class, of which transformers has nothing to say."""
    config = transformers.AutoConfig.from_pretrained(folder)
    transformers.utils.logging.enable_propagation()
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="transformers"):
        kind = getattr(transformers, config.architectures[0])
        model, info = kind.from_pretrained(folder, output_loading_info=True)
    transformers.utils.logging.disable_propagation()
    assert not caplog.records and not any(info.values())
    return model.eval()


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in BRIEF else pytest.mark.long) for f in FAMILIES])
def test_it_is_what_save_pretrained_wrote(
    family: str, trained: Trained, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = trained("fsdp2") / family
    expected, out = folder / "expected", tmp_path / "out"
    ckpttool.export(folder / "dcp", out, like=expected, check=True)
    assert (out / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
    assert {p.name for p in out.iterdir()} - {"README.md"} == {p.name for p in expected.iterdir()} - {"README.md"}
    ours, theirs = loaded(out, caplog), loaded(expected, caplog)
    with torch.no_grad():
        assert torch.equal(ours(**inputs(family)).logits, theirs(**inputs(family)).logits)


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in BRIEF else pytest.mark.long) for f in FAMILIES])
def test_and_back_it_is_a_training_checkpoint(family: str, trained: Trained, tmp_path: Path) -> None:
    folder = trained("fsdp2") / family
    made = ckpttool.convert(folder / "expected", tmp_path / "start", to="dcp", like=folder / "dcp", check=True)
    theirs, ours = dcp_whole(folder / "dcp")["model"], dcp_whole(tmp_path / "start")["model"]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) and ours[name].dtype == value.dtype for name, value in theirs.items())
    assert len([file for file in made.files if file.path.endswith(".distcp")]) == 2  # as many as the run has ranks
    assert any("no optimizer state" in note for note in made.notes)
    model = model_families.made(family)
    ckpttool.load(tmp_path / "start", model)
    expected = getattr(transformers, type(model).__name__).from_pretrained(folder / "expected")
    wanted = expected.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
