"""torch's own converters and ours take turns on a checkpoint, and nothing changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed.checkpoint as torch_dcp
from support.upstream_readers import dcp_whole, difference, expected_of, load, path_of
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

from ckpttool import convert

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

SAMPLES = ["dcp/fsdp2_w2", "dcp/fsdp2_tp_w4", "dcp/fsdp1_w2", "dcp/flat_optim_w2"]


@pytest.mark.parametrize("sample", SAMPLES)
def test_our_torch_file_through_theirs_and_ours(sample: str, tmp_path: Path) -> None:
    wanted = expected_of(sample)
    convert(path_of(sample), str(tmp_path / "ours.pt"), to="torch")
    # It reads with `weights_only=False`: the file is ours.
    torch_save_to_dcp(tmp_path / "ours.pt", tmp_path / "theirs")
    assert difference(dcp_whole(str(tmp_path / "theirs")), wanted) == "equal"
    convert(str(tmp_path / "theirs"), str(tmp_path / "again"), to="dcp", to_world=3)
    dcp_to_torch_save(tmp_path / "again", tmp_path / "theirs.pt")
    assert difference(load(tmp_path / "theirs.pt"), wanted) == "equal"
    convert(str(tmp_path / "theirs.pt"), str(tmp_path / "last.pt"), to="torch")
    assert difference(load(tmp_path / "last.pt"), wanted) == "equal"


@pytest.mark.parametrize("sample", SAMPLES)
def test_their_torch_file_is_ours(sample: str, tmp_path: Path) -> None:
    """Both converters, from the same directory: the same values in the same kinds of containers."""
    dcp_to_torch_save(path_of(sample), tmp_path / "theirs.pt")
    convert(path_of(sample), str(tmp_path / "ours.pt"), to="torch")
    assert difference(load(tmp_path / "ours.pt"), load(tmp_path / "theirs.pt")) == "equal"


@pytest.mark.parametrize("sample", ["hf/sharded_w2", "dcp/fsdp2_w4"])
def test_hugging_face_reader_of_torch(sample: str, tmp_path: Path) -> None:
    """Our safetensors directories, by `HuggingFaceStorageReader`."""
    wanted = expected_of(sample)
    only = ["model"] if "model" in wanted else []
    wanted = wanted.get("model", wanted)
    convert(path_of(sample), str(tmp_path / "out"), to="safetensors", only=only, max_shard_size=1500)
    reader = torch_dcp.HuggingFaceStorageReader(str(tmp_path / "out"))
    state = {name: tensor.clone().zero_() for name, tensor in wanted.items()}
    torch_dcp.load(state, storage_reader=reader, no_dist=True)
    assert difference(state, wanted) == "equal"
