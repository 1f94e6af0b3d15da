"""Each family of transformers that can be made small: what is exported of the names in memory is what it writes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from support import generate_key_maps, tiny_models
from transformers.core_model_loading import revert_weight_conversion

import ckpttool
from ckpttool.models import key_maps

pytestmark = pytest.mark.long

# The Python of an environment with transformers 4.57 and the same torch.
OLD = os.environ.get("CKPTTOOL_TRANSFORMERS_4", "")
LOAD = """
import sys, torch, transformers

def loaded(folder):
    try:
        model, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    except Exception as error:
        return {}, f"{type(error).__name__}: {error}".replace(folder, ""), None
    try:
        with torch.no_grad():
            logits = next(iter(model.eval()(**torch.load(ours + "/../inputs.pt")).values()))
    except Exception:
        logits = None
    return model.state_dict(), {key: sorted(map(str, found)) for key, found in info.items() if found}, logits

ours, theirs, name = sys.argv[1:]
(state, info, logits), (expected, also, wanted) = loaded(ours), loaded(theirs)
assert state.keys() == expected.keys() and info == also, (info, also)
# What transformers 4.57 does not find in the files of version 5 is random in both.
names = state.keys() - set(info and not isinstance(info, str) and info.get("missing_keys") or ())
assert all(torch.equal(state[key], expected[key]) for key in names)
if names == state.keys() and logits is not None:
    assert torch.equal(logits, wanted)
print("incomplete" if info else "whole")
"""
# transformers 4.57 does not read these files of version 5 whole, whoever writes them, or has no such model.
NOT_WHOLE = {
    "gemma3",
    "hrm_text",
    "internvl",
    "llava",
    "llava_next",
    "mistral3",
    "mllama",
    "molmo2_text",
    "nemotron_h",
    "nomic_bert",
    "paligemma",
    "qwen3_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "sapiens2",
    "swin",
    "vit_mae",
}


def said(model: Any, asked: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The first of what a model says."""
    with torch.no_grad():
        return next(iter(model.eval()(**asked).values()))


@pytest.mark.parametrize("model_type", tiny_models.FAMILIES)
def test_an_export_is_what_save_pretrained_writes_and_transformers_loads(model_type: str, tmp_path: Path) -> None:
    torch.manual_seed(7)
    model = tiny_models.made(model_type)
    model.save_pretrained(tmp_path / "theirs")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_bytes((tmp_path / "theirs" / "config.json").read_bytes())
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)

    made = ckpttool.export(tmp_path / "dcp", tmp_path / "ours", assets=tmp_path / "base", card=False)
    assert made.compared.startswith(tiny_models.FAMILIES[model_type])
    ours, theirs = (load_file(tmp_path / each / "model.safetensors") for each in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert [n for n, v in theirs.items() if v.dtype != ours[n].dtype or not torch.equal(v, ours[n])] == []

    loaded, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    asked = tiny_models.inputs(model)
    if model_type not in tiny_models.SILENT:
        assert not any(info.values())
        # The weights are bit-equal; where they lie in memory changes the last bit of what some kernels compute.
        torch.testing.assert_close(said(loaded, asked), said(model, asked))
    if OLD:
        torch.save(asked, tmp_path / "inputs.pt")
        words = [OLD, "-c", LOAD, tmp_path / "ours", tmp_path / "theirs", tiny_models.FAMILIES[model_type]]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[-1] == ("incomplete" if model_type in NOT_WHOLE else "whole")


@pytest.mark.parametrize("model_type", ["molmo2_text", "nomic_bert", "vit"])
def test_without_a_key_map_transformers_says_how_names_are_written(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_maps, "generated", lambda kind: None)
    model = tiny_models.made(model_type)
    model.save_pretrained(tmp_path / "theirs")
    torch.save({"model": model.state_dict()}, tmp_path / "memory.pt")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_bytes((tmp_path / "theirs" / "config.json").read_bytes())
    made = ckpttool.export(tmp_path / "memory.pt", tmp_path / "ours", assets=tmp_path / "base", card=False)
    assert made.key_map.startswith("transformers 5")
    ours, theirs = (load_file(tmp_path / each / "model.safetensors") for each in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert [n for n, v in theirs.items() if not torch.equal(v, ours[n])] == []


def numbered(model: Any) -> dict[str, torch.Tensor]:
    """The state of a model on the meta device, with a number of its own in each element."""
    state, end = {}, 0
    for name, tensor in tiny_models.written(model).items():
        state[name] = torch.arange(end, end + tensor.numel(), dtype=torch.int32).view(tensor.shape)
        end += tensor.numel()
    return state


def models(name: str) -> Iterator[Any]:
    """The models on the meta device that a key map is for: of a model type, or of a class."""
    own = {path.stem for path in generate_key_maps.FOLDER.glob("*.json")}
    for model_type, kind in tiny_models.classes():
        if name == kind.__name__ or (name == model_type and kind.__name__ not in own):
            yield from generate_key_maps.models(model_type, kind)


MAPS = sorted(path.stem for path in generate_key_maps.FOLDER.glob("*.json"))


@pytest.mark.parametrize("name", MAPS)
def test_a_key_map_does_what_transformers_does(name: str, tmp_path: Path) -> None:
    changed = 0
    for number, model in enumerate(models(name)):
        state = numbered(model)
        expected = revert_weight_conversion(model, state)
        torch.save(state, tmp_path / f"{number}.pt")
        config = json.loads(model.config.to_json_string())
        config["architectures"] = [name] if name == type(model).__name__ else None
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / "config.json").write_text(json.dumps(config))
        out = tmp_path / f"{number}-out"
        ckpttool.export(tmp_path / f"{number}.pt", out, assets=tmp_path / f"{number}", strict=False, card=False)
        found = load_file(out / "model.safetensors")
        assert found.keys() == expected.keys()
        assert [n for n, value in expected.items() if not torch.equal(value, found[n])] == []
        changed += expected.keys() != state.keys()
        (tmp_path / f"{number}.pt").unlink()
        (out / "model.safetensors").unlink()
    assert changed


@pytest.mark.timeout(1200)
def test_the_key_maps_are_those_of_the_script() -> None:
    """Run `python -m support.generate_key_maps` in `tests/` where they are not."""
    kept = {path.stem: json.loads(path.read_text()) for path in generate_key_maps.FOLDER.glob("*.json")}
    made = {name: json.loads(text) for name, text in generate_key_maps.generated().items()}
    assert made.keys() == kept.keys()
    assert [name for name in made if made[name]["rules"] != kept[name]["rules"]] == []
