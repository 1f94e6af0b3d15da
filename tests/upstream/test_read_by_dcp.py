"""What we write as a DCP directory is read by `torch.distributed.checkpoint` in one process, bit for bit.

On several ranks: `test_read_on_ranks.py`.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from support import large_state
from support.upstream_readers import (
    dcp_into,
    dcp_whole,
    detached,
    difference,
    expected_of,
    hollow,
    named,
    path_of,
    spelled,
    trusted,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ckpttool import convert

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def written(source: str, folder: Path, **options: Any) -> str:
    """`source` as a DCP directory."""
    convert(source, str(folder / "out"), to="dcp", **options)
    return str(folder / "out")


def expected(sample: str) -> Any:
    """What DCP can spell of what was saved."""
    return spelled(detached(expected_of(sample)))


@pytest.mark.parametrize("sample", ["dcp/fsdp2_w4", "dcp/fsdp2_tp_w4", "torch/full", "hf/sharded_w2", "torch/dtypes"])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_pieces_of_every_world(sample: str, world: int, tmp_path: Path) -> None:
    out = written(path_of(sample), tmp_path, to_world=world)
    wanted = expected(sample)
    assert difference(dcp_into(out, hollow(wanted)), wanted) == "equal"
    ranks = {int(file.name[2:].split("_")[0]) for file in Path(out).glob("*.distcp")}
    assert ranks <= set(range(world))
    described = torch_dcp.FileSystemReader(out).read_metadata()
    for name, entry in described.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            assert sum(chunk.sizes.numel() for chunk in entry.chunks) == entry.size.numel(), name
            assert len(entry.chunks) <= world
    for index, info in described.storage_data.items():
        entry = described.state_dict_metadata[index.fqn]
        if isinstance(entry, TensorStorageMetadata) and len(entry.chunks) > 1:
            # The piece that FSDP2 would give to the rank whose file it is in.
            rank = int(info.relative_path[2:].split("_")[0])
            rows = torch.arange(entry.size[0]).chunk(world)[rank]
            assert tuple(index.offset) == (int(rows[0]), *(0,) * (len(entry.size) - 1)), index.fqn


@pytest.mark.parametrize("sample", ["dcp/fsdp2_w4", "torch/full", "torch/layouts", "safetensors/single", "dcp/dtypes"])
def test_items_are_sound_archives(sample: str, tmp_path: Path) -> None:
    """Each item is a zip file whose CRCs are right, and what is between items is nothing."""
    out = written(path_of(sample), tmp_path, to_world=2)
    ends: dict[str, list[tuple[int, int]]] = {}
    for info in torch_dcp.FileSystemReader(out).read_metadata().storage_data.values():
        ends.setdefault(info.relative_path, []).append((info.offset, info.offset + info.length))
        data = (Path(out) / info.relative_path).read_bytes()[info.offset :][: info.length]
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None
    for name, spans in ends.items():
        whole = sorted(set(spans))  # tied names have one item
        assert [start for start, _ in whole] == [0, *(end for _, end in whole[:-1])]
        assert whole[-1][1] == (Path(out) / name).stat().st_size


@pytest.mark.parametrize("sample", ["torch/full", "torch/model", "dcp/fsdp2_w2"])
def test_named_as_torch_names_it(sample: str, tmp_path: Path) -> None:
    """The keys, key paths, dtypes, sizes and kinds of an index that torch writes of the same state."""
    state = trusted(path_of(sample)) if sample.startswith("torch/") else expected_of(sample)
    torch_dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    theirs = torch_dcp.FileSystemReader(tmp_path / "theirs").read_metadata()
    ours = torch_dcp.FileSystemReader(written(path_of(sample), tmp_path)).read_metadata()
    empty = {"extra.empty_dict": ("extra", "empty_dict")} if sample == "torch/full" else {}  # see `spelled`
    assert ours.planner_data == {**theirs.planner_data, **empty}
    assert set(ours.state_dict_metadata) == {*theirs.state_dict_metadata, *empty}
    for name, entry in theirs.state_dict_metadata.items():
        mine = ours.state_dict_metadata[name]
        assert type(mine) is type(entry), name
        if isinstance(entry, TensorStorageMetadata):
            assert (mine.size, mine.properties.dtype) == (entry.size, entry.properties.dtype), name
    assert {index.fqn for index in ours.storage_data} == set(ours.state_dict_metadata)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_one_part_alone(world: int, tmp_path: Path) -> None:
    out = written(path_of("dcp/fsdp2_w4"), tmp_path, only=["model"], to_world=world)
    assert difference(dcp_whole(out), expected("dcp/fsdp2_w4")["model"]) == "equal"


@pytest.mark.parametrize("world", [None, 1, 3])
@pytest.mark.parametrize("source", ["large.pt", "dcp"])
def test_large_state(source: str, world: int | None, large_folder: Path, tmp_path: Path) -> None:
    out = written(str(large_folder / source), tmp_path, to_world=world)
    wanted = spelled(detached(large_state.state()))
    assert difference(dcp_whole(out), wanted) == "equal"
    if source == "large.pt":  # two names, one item
        total = sum(file.stat().st_size for file in Path(out).glob("*.distcp"))
        once = {value.data_ptr(): value.nbytes for value in named(large_state.state()).values()}
        assert total < sum(once.values()) * 1.01


def test_strict_reader_misses_nothing(tmp_path: Path) -> None:
    # Else `dcp_into` would be content with keys that are not there.
    out = written(path_of("dcp/fsdp2_w2"), tmp_path, exclude=["model.norm.weight"])
    with pytest.raises(BaseException, match=r"norm\.weight"):
        dcp_into(out, hollow(expected("dcp/fsdp2_w2")))
