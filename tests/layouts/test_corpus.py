"""The corpus of layouts, read by the libraries that wrote it: the counts that tests expect are those of the files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import layouts
from support.layouts import reading
from torch.utils._pytree import tree_leaves


def tensors_made(path: Path) -> list[torch.Tensor]:
    """Every tensor of a file: of a pickle those that torch is asked to make, whatever object holds them."""
    if path.is_dir() or path.suffix in (".safetensors", ".npz"):
        return [leaf for leaf in tree_leaves(reading.load(path)) if isinstance(leaf, torch.Tensor)]
    tensors: list[torch.Tensor] = []
    rebuild = torch._utils._rebuild_tensor_v2

    def counted(*arguments: Any) -> torch.Tensor:
        tensors.append(rebuild(*arguments))
        return tensors[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._utils, "_rebuild_tensor_v2", counted)
        reading.load(path)
    return tensors


def files_below(root: Path) -> Iterator[Path]:
    """Every file, with a directory that DCP wrote as one; side files in it are files of their own."""
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.name != ".metadata" and path.suffix != ".distcp":
            yield path
        elif path.name == ".metadata":
            yield path.parent


@pytest.mark.sweep(4)
@pytest.mark.parametrize("layout", layouts.LAYOUTS, ids=[one.name.replace("/", " ") for one in layouts.LAYOUTS])
def test_counts(layout: layouts.Layout, tmp_path: Path) -> None:
    written = layout.write(tmp_path, 100)
    assert written.path == layout.path(tmp_path, 100)
    assert written.path.is_dir() == (layout.kind != "file")
    named = {(tmp_path / file) for file in written.files}
    assert named == set(files_below(tmp_path))
    for file in written.files:
        made = tensors_made(tmp_path / file)
        ours = [one for one in written.expected if one.file == file]
        assert sum(one.tensors for one in ours) == len(made), file
        assert sum(one.nbytes for one in ours) == sum(one.nbytes for one in made), file
    for one, tensors, _ in reading.tensors(tmp_path, written.expected):
        assert (one.tensors, one.nbytes) == (len(tensors), sum(tensor.nbytes for tensor in tensors)), one
    assert written.parameters or not any(one.role == "model" for one in written.expected)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("layout", layouts.LAYOUTS, ids=[one.name.replace("/", " ") for one in layouts.LAYOUTS])
def test_runs(layout: layouts.Layout, tmp_path: Path) -> None:
    first, last = layouts.run(tmp_path, layout)
    assert first.expected and len(first.expected) == len(last.expected)
    if layout.kind != "file":
        assert all((tmp_path / file).exists() for one in (first, last) for file in one.files)


def test_the_corpus_is_of_all_kinds() -> None:
    assert len(layouts.BY_NAME) == len(layouts.LAYOUTS)
    kinds = Counter(one.kind for one in layouts.LAYOUTS)
    assert set(kinds) == {"file", "flat", "directory"}
    roles = {one for layout in layouts.LAYOUTS for one in layout.contents.__code__.co_names}
    assert {"model", "ema", "optimizer", "scheduler", "scaler", "rng", "dataloader", "progress", "config"} <= roles
