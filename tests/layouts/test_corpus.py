"""The corpus of layouts, read by the libraries that wrote it: the counts that tests expect are those of the files."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import yaml
from support import layouts
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.utils._pytree import tree_leaves


def tensors_in(load: Callable[[], object]) -> list[torch.Tensor]:
    """The tensors that unpickling makes, whatever object holds them."""
    tensors: list[torch.Tensor] = []
    rebuild = torch._utils._rebuild_tensor_v2

    def counted(*arguments: Any) -> torch.Tensor:
        tensors.append(rebuild(*arguments))
        return tensors[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._utils, "_rebuild_tensor_v2", counted)
        load()
    return tensors


def arrays_of(path: Path) -> list[Any]:
    """Every tensor of a file, as its own library counts them; the file is read whole."""
    if path.is_dir():
        state: dict[str, Any] = {}
        _load_state_dict(state, dcp.FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        return [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    if path.suffix == ".safetensors":
        return list(safetensors.torch.load_file(path).values())
    if path.suffix == ".npz":
        return list(np.load(path).values())
    if path.suffix == ".json":
        json.loads(path.read_text())
        return []
    if path.suffix == ".yaml":
        assert isinstance(yaml.safe_load(path.read_text()), dict)
        return []
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            members = [BytesIO(archive.read(name)) for name in archive.namelist() if name.endswith(".pth")]
        return [one for member in members for one in tensors_in(partial(torch.load, member, weights_only=False))]
    data = path.read_bytes()
    if is_text(data):
        return []
    if data[:2] == b"PK" or data[2:3] == b"\x8a" or b"ustar" in data[:512]:
        return tensors_in(lambda: torch.load(path, weights_only=False))
    return tensors_in(lambda: pickle.loads(data))


def is_text(data: bytes) -> bool:
    try:
        return data.decode().replace("\n", "").isprintable()
    except UnicodeDecodeError:
        return False


def files_below(root: Path) -> Iterator[Path]:
    """Every file, with a directory that DCP wrote as one; side files in it are files of their own."""
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.name != ".metadata" and path.suffix != ".distcp":
            yield path
        elif path.name == ".metadata":
            yield path.parent


@pytest.mark.parametrize("layout", layouts.LAYOUTS, ids=[one.name.replace("/", " ") for one in layouts.LAYOUTS])
def test_counts(layout: layouts.Layout, tmp_path: Path) -> None:
    written = layout.write(tmp_path, 100)
    assert written.path == layout.path(tmp_path, 100)
    assert written.path.is_dir() == (layout.kind != "file")
    named = {(tmp_path / file) for file in written.files}
    assert named == set(files_below(tmp_path))
    for file in written.files:
        tensors = arrays_of(tmp_path / file)
        expected = [one for one in written.expected if one.file == file]
        assert sum(one.tensors for one in expected) == len(tensors), file
        assert sum(one.nbytes for one in expected) == sum(one.nbytes for one in tensors), file
    assert written.parameters or not any(one.role == "model" for one in written.expected)


@pytest.mark.parametrize("layout", layouts.LAYOUTS, ids=[one.name.replace("/", " ") for one in layouts.LAYOUTS])
def test_runs(layout: layouts.Layout, tmp_path: Path) -> None:
    first, last = layouts.run(tmp_path, layout)
    assert first.expected and len(first.expected) == len(last.expected)
    if layout.kind != "file":
        assert all((tmp_path / file).exists() for one in (first, last) for file in one.files)


def test_the_corpus_is_of_all_kinds() -> None:
    assert len(layouts.BY_NAME) == len(layouts.LAYOUTS)
    kinds = Counter(one.kind for one in layouts.LAYOUTS)
    assert set(kinds) <= {"file", "flat", "directory"}
    roles = {one for layout in layouts.LAYOUTS for one in layout.contents.__code__.co_names}
    assert {"model", "ema", "optimizer", "scheduler", "scaler", "rng", "dataloader", "progress", "config"} <= roles
