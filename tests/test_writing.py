"""What is written for a framework to resume from: each piece as upstream reads it, against what the framework left."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from originals import path_of
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from ckpttool import convert, inspect
from ckpttool.catalogue import Tensor
from ckpttool.errors import LossError, UsageError


def read(path: Path) -> Any:
    """A piece as upstream reads it."""
    if path.is_dir():
        state: dict[str, Any] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _load_state_dict(state, dcp.FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        return state
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix == ".json":
        return json.loads(path.read_text())
    return torch.load(path, weights_only=False)


def pieces(folder: Path) -> dict[str, Any]:
    """What a directory holds, by the names of its pieces."""
    return {path.name: read(path) for path in folder.iterdir()}


def assert_same(found: Any, expected: Any, at: str = "$") -> None:
    """Bit for bit; an OrderedDict is a dict, as no `load_state_dict` asks."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), at
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), at
        raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) if t.numel() else t for t in (found, expected)]
        assert torch.equal(*raw), at
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), at
        for key, value in expected.items():
            assert_same(found[key], value, f"{at}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected), at
        assert len(found) == len(expected), at
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{at}[{index}]")
    elif type(expected).__module__.startswith("accelerate."):
        assert_same(vars(found) | {"generator": 0}, vars(expected) | {"generator": 0}, at)
    else:
        assert type(found) is type(expected), at
        assert repr(found) == repr(expected), at


ACCELERATE = (
    ("run_accelerate_fsdp2_sharded_w2", "accelerate:sharded"),
    ("run_accelerate_fsdp1_sharded_w2", "accelerate:sharded"),
    ("run_accelerate_fsdp1_full_w2", "accelerate:full"),
    ("run_accelerate_ddp_w2", "accelerate:ddp"),
)


@pytest.mark.parametrize(("sample", "layout"), ACCELERATE)
def test_what_accelerate_left_comes_back(tmp_path: Path, sample: str, layout: str) -> None:
    made = convert(path_of(sample), tmp_path / "out", producer="accelerate", check=True)
    assert made.format == layout
    found, expected = pieces(tmp_path / "out"), pieces(Path(path_of(sample)))
    assert found.keys() == expected.keys()
    assert_same(found, expected)


def test_the_layouts_of_accelerate_hold_the_same(tmp_path: Path) -> None:
    source = path_of("run_accelerate_fsdp2_sharded_w2")
    expected = pieces(Path(source))
    convert(source, tmp_path / "full", producer="accelerate:full", check=True)
    found = pieces(tmp_path / "full")
    assert_same(found["pytorch_model_fsdp.bin"], expected["pytorch_model_fsdp_0"]["model"])
    assert_same(found["optimizer.bin"], expected["optimizer_0"]["optimizer"])
    convert(tmp_path / "full", tmp_path / "again", producer="accelerate:sharded", to_world=2, check=True)
    assert_same(pieces(tmp_path / "again"), expected)


def test_a_plan_lists_the_pieces(tmp_path: Path) -> None:
    made = convert(path_of("rank_fsdp1_w2"), tmp_path / "out", producer="accelerate", drop="step", dry_run=True)
    assert not (tmp_path / "out").exists()
    assert [name for name, _ in made.files] == [
        "pytorch_model_fsdp_0/__0_0.distcp", "pytorch_model_fsdp_0/__1_0.distcp",
        "optimizer_0/__0_0.distcp", "optimizer_0/__1_0.distcp",
    ]  # fmt: skip
    assert made.dropped == ["step"]


def test_what_has_no_place_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(LossError, match=r"`step`.*accelerate keeps no such value"):
        convert(path_of("rank_fsdp1_w2"), tmp_path / "out", producer="accelerate")
    assert not (tmp_path / "out").exists()


def test_generators_of_ranks_that_will_not_be_there(tmp_path: Path) -> None:
    source = path_of("run_accelerate_fsdp2_sharded_w2")
    with pytest.raises(LossError, match="it is of rank 1, and 1 ranks have no file for it"):
        convert(source, tmp_path / "out", producer="accelerate", to_world=1)
    made = convert(source, tmp_path / "out", producer="accelerate", to_world=4)
    assert "no states of random number generators for ranks 2, 3" in made.notes


@pytest.mark.parametrize("flag", [{"to": "dcp"}, {"tensor_class": "dtensor"}, {"max_shard_size": "1GB"}])
def test_flags_that_do_not_go_together(tmp_path: Path, flag: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        convert(path_of("rank_fsdp1_w2"), tmp_path / "out", producer="accelerate", **flag)


def test_a_layout_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no layout of a producer `acelerate`") as caught:
        convert(path_of("rank_fsdp1_w2"), tmp_path / "out", producer="acelerate")
    assert "accelerate" in str(caught.value.hint)


def test_a_layout_is_replaced_like_any_checkpoint(tmp_path: Path) -> None:
    for _ in range(2):
        convert(path_of("run_accelerate_ddp_w2"), tmp_path / "out", producer="accelerate", overwrite=True)
    entries = inspect(tmp_path / "out").entries
    assert sum(isinstance(entry, Tensor) for entry in entries.values()) == 29
