"""What we write as a torch file is read by `torch.load`, bit for bit, and is a sound zip file."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support import large_state
from support.upstream_readers import PLAIN, detached, difference, expected_of, load, path_of, safetensors_in, unzipped

from ckpttool import convert


def written(source: str, folder: Path, **options: Any) -> Path:
    """`source` as a torch file."""
    convert(source, str(folder / "out.pt"), to="torch", **options)
    return folder / "out.pt"


def storage(tensor: torch.Tensor) -> int:
    """What two tensors have in common that share memory."""
    return tensor.untyped_storage().data_ptr()


def plain(tree: Any) -> Any:
    """Values alone: what is a view, a parameter or has Python attributes becomes a tensor like any other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32
        return detached(tree)


def test_order_of_keys_and_kinds_of_dicts_survive(tmp_path: Path) -> None:
    found, expected = load(written(path_of("torch/full"), tmp_path)), expected_of("torch/full")
    assert shape(found) == shape(expected)
    assert type(found["model"]) is type(expected["model"])
    assert found["model"]._metadata == expected["model"]._metadata
    assert list(found["optim"]["state"]) == list(expected["optim"]["state"])


def shape(tree: Any) -> Any:
    """The keys of a tree in their order, and the kinds of its containers."""
    if isinstance(tree, dict):
        return type(tree), [(key, shape(value)) for key, value in tree.items()]
    return (type(tree), [shape(value) for value in tree]) if isinstance(tree, (list, tuple)) else type(tree)


@pytest.mark.parametrize("options", [{}, {"mmap": True}])
def test_tied_weights_share_storage(options: dict[str, Any], tmp_path: Path) -> None:
    direct = load(written(path_of("torch/full"), tmp_path), **options)["model"]
    assert storage(direct["lm_head.weight"]) == storage(direct["embed.weight"])
    for route in (["dcp"], ["safetensors"], ["dcp", "safetensors", "dcp"]):
        source = path_of("torch/full")
        folder = tmp_path / "-".join(route)
        folder.mkdir()
        for number, to in enumerate(route):
            convert(source, str(folder / str(number)), to=to)
            source = str(folder / str(number))
        model = load(written(source, folder), **options)["model"]
        assert storage(model["lm_head.weight"]) == storage(model["embed.weight"]), route
        assert storage(model["norm.weight"]) != storage(model["embed.weight"])


@pytest.mark.parametrize("source", ["large.pt", "dcp"])
@pytest.mark.parametrize("threads", [1, 3])
def test_large_state(source: str, threads: int, large_folder: Path, tmp_path: Path) -> None:
    out = written(str(large_folder / source), tmp_path, threads=threads)
    expected = plain(large_state.state())
    assert difference(load(out), expected) == "equal"
    assert difference(load(out, mmap=True), expected) == "equal"
    assert unzipped(out) == "sound"
    tied = source == "large.pt"  # torch writes both names into DCP, and nothing of their being one
    found = load(out, mmap=True)["model"]
    assert (storage(found["head"]) == storage(found["embed"])) is tied
    if tied:
        assert out.stat().st_size < (large_folder / source).stat().st_size * 1.01


def test_one_model_from_a_training_state(tmp_path: Path) -> None:
    for sample in ("torch/full", "dcp/fsdp2_w4"):
        (tmp_path / sample).mkdir(parents=True)
        out = written(path_of(sample), tmp_path / sample, only=["model"])
        model = torch.load(out, weights_only=True)  # nothing but tensors: no class need be allowed
        assert difference(plain(dict(model)), plain(dict(expected_of(sample)["model"]))) == "equal"
        convert(str(out), str(tmp_path / sample / "m.safetensors"))
        assert set(safetensors_in(tmp_path / sample / "m.safetensors")) <= set(model)


def test_the_classes_that_are_allowed_are_needed(tmp_path: Path) -> None:
    # Else the tests above would not notice that an object was left out.
    assert PLAIN
    with pytest.raises(Exception, match="weights_only"):
        torch.load(written(path_of("torch/full"), tmp_path), weights_only=True)
