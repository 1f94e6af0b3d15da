"""What DCP leaves where there is less to save than there are ranks: it is whole."""

from __future__ import annotations

import subprocess
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.torchrun import forked_launcher

import ckpttool
from ckpttool.errors import CorruptError
from ckpttool.operations.repair import repair
from ckpttool.operations.verify import verify

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    script = Path(__file__).with_name("save_little_on_ranks.py")
    subprocess.run([*forked_launcher(), "4", script, folder], check=True, timeout=300)
    return folder


def test_ranks_that_had_nothing_to_write(saved: Path, tmp_path: Path) -> None:
    path = saved / "few"
    empty = [file for file in path.glob("*.distcp") if not file.stat().st_size]
    assert empty, "torch leaves no empty files any more"
    assert ckpttool.inspect(path).warnings == []
    report = verify(path)
    assert report.verdict == "whole" and report.findings == []
    assert repair(path, tmp_path / "repaired").verdict == "whole" and not (tmp_path / "repaired").exists()
    ckpttool.convert(path, tmp_path / "out.pt")
    loaded = torch.load(tmp_path / "out.pt")
    assert loaded["a"].equal(torch.arange(6.0)) and loaded["b"].equal(torch.ones(3))
    # One that the index names is damaged.
    named = next(file for file in path.glob("*.distcp") if file.stat().st_size)
    data = named.read_bytes()
    named.write_bytes(b"")
    try:
        assert [warning.kind for warning in ckpttool.inspect(path).warnings][:1] != []
        assert verify(path).verdict == "damaged"
        with pytest.raises(CorruptError):
            ckpttool.convert(path, tmp_path / "again.pt")
    finally:
        named.write_bytes(data)


def test_a_checkpoint_of_nothing(saved: Path, tmp_path: Path) -> None:
    path = saved / "none"
    assert not ckpttool.inspect(path).entries and verify(path).verdict == "whole"
    ckpttool.convert(path, tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt") == {}
    ckpttool.convert(path, tmp_path / "out", to="dcp", check=True)
    state: dict[str, torch.Tensor] = {}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert state == {} and verify(tmp_path / "out").verdict == "whole"
    ckpttool.reshard(path, tmp_path / "two", to_world=2)
    assert verify(tmp_path / "two").verdict == "whole"


@pytest.mark.parametrize("state", [{}, OrderedDict()], ids=["dict", "OrderedDict"])
@pytest.mark.parametrize(
    "options", [{"to": "torch"}, {"to": "safetensors"}, {"to": "dcp"}, {"to": "fsdp1", "to_world": 2}]
)
def test_a_file_of_nothing(state: dict[str, torch.Tensor], options: dict[str, Any], tmp_path: Path) -> None:
    """Through every format, and to DCP."""
    torch.save(state, tmp_path / "state.pt")
    ckpttool.convert(tmp_path / "state.pt", tmp_path / "middle", **options)
    ckpttool.convert(tmp_path / "middle", tmp_path / "out", to="dcp", check=True)
    dcp.load({}, checkpoint_id=tmp_path / "out", no_dist=True)
    assert not dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    ckpttool.convert(tmp_path / "middle", tmp_path / "again.pt")
    loaded = torch.load(tmp_path / "again.pt")
    assert loaded == state
    assert type(loaded) is type(state) or options["to"] in ("dcp", "fsdp1")
