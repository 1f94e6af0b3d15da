"""Arguments that several commands take: rules that stand in a file, dtypes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpttool.errors import ReadError, UsageError
from ckpttool.operations import arguments


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "names.rules"
    path.write_text("\ufeff# of the author\nblk=layers  # a comment\n\n w#1=w1\n")
    return path


def test_a_file_stands_for_its_rules(file: Path) -> None:
    assert arguments.rules(["a=b", f"@{file}", "c=d"], "--rename") == ["a=b", "blk=layers", "w#1=w1", "c=d"]
    assert arguments.rules(f"@{file}", "--rename") == ["blk=layers", "w#1=w1"]
    assert arguments.rules("a=b", "--rename") == ["a=b"]


def test_a_dtype_of_torch_is_a_rule() -> None:
    assert arguments.dtypes(torch.bfloat16) == ["bfloat16"] == arguments.dtypes("bfloat16")
    assert arguments.dtypes((torch.float16, "*norm*=float32")) == ["float16", "*norm*=float32"]
    assert arguments.dtypes(()) == arguments.dtypes(None) == []


def test_a_line_that_is_no_rule_is_named(file: Path) -> None:
    file.write_text("a=b\nblk layers\n")
    with pytest.raises(UsageError, match=r'names\.rules` line 2: `rename="blk layers"` is not of the form'):
        arguments.rules(f"@{file}", "--rename")


def test_what_is_no_text_file(file: Path) -> None:
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ReadError, match="not a text file"):
        arguments.rules(f"@{file}", "--rename")
    with pytest.raises(ReadError, match="no such file"):
        arguments.rules(f"@{file}.txt", "--rename")
