"""Mistakes in what is typed: what is said makes the next command right, and nothing is left behind."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from support.cli import run
from support.paths import CHECKPOINTS

import ckpttool
from ckpttool.errors import UsageError

MISTAKES = {
    "convert full.pt o.pt --rename model.embed": "hint: write OLD=NEW, such as `--rename 'model.*=*'`",
    "convert full.pt o.pt --strip-prefix module.": "hint: names in the model begin with `tokens_seen`, ",
    "convert full.pt o --to safetensors --max-shard-size 5": "hint: write a unit: `--max-shard-size 5GB`",
    "convert full.pt o --producer hf": "hint: `ckpttool export` writes a model for transformers and vLLM",
    "convert full.pt o --to gguf": "hint: `convert_hf_to_gguf.py` of llama.cpp makes one",
    "convert full.pt o.distcp": "hint: a DCP checkpoint is a directory: name that",
    "convert full.pt o.pt --force": "hint: did you mean `--overwrite`?",
    "convert full.pt o.pt --bf16": "hint: did you mean `--dtype bfloat16`?",
    "convert full.pt o.pt --weights-only": "hint: did you mean `--only model`?",
    "convert full.pt o --format dcp": "hint: did you mean `--to`?",
    "convert full.pt o --world-size 4": "hint: did you mean `--to-world`?",
    "convert full.pt --output o.pt": "hint: what is written is the last argument: `ckpttool convert SRC DST`",
    "reshard full.pt o 4": "hint: did you mean `--to-world 4`?",
    "diff full.pt full.pt --tolerance 1e-3": "hint: did you mean `--rtol` or `--atol`?",
    "report full.pt page.html": "hint: `-o page.html` writes the page to that file",
    "show full.pt": "hint: `ckpttool inspect full.pt --tensors '*'` lists the tensors",
    "inspect full.pt --filter x": "hint: did you mean `--tensors`?",
    "inspect step.tar": "hint: unpack it, `tar xf FILE`, and name what comes out",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_answered_by_what_to_type(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    shutil.copy(CHECKPOINTS / "torch/full/ckpt.pt", "full.pt")
    with tarfile.open("step.tar", "w") as archive:
        archive.add("full.pt")
    done = run(*words.split())
    assert done.exit_code in (2, 3) and MISTAKES[words] in done.stderr, done.stderr
    assert sorted(os.listdir()) == ["full.pt", "step.tar"]


def test_mistakes_in_python(tmp_path: Path) -> None:
    model, path = torch.nn.Linear(2, 2), CHECKPOINTS / "torch/full/ckpt.pt"
    for call, said in (
        (lambda: ckpttool.load(model, path), "`load` takes the path first"),
        (lambda: ckpttool.save(model, tmp_path / "x"), "`save` takes the path first"),
        (lambda: ckpttool.load_into({"model": model}, path), "`load_into` takes the path first"),
        (lambda: ckpttool.load(path, {"model": model}), "`load` fills a `torch.nn.Module`, and this is a dict"),
    ):
        with pytest.raises(UsageError) as raised:
            call()  # type: ignore[no-untyped-call]
        assert said in str(raised.value)
    with ckpttool.open(path) as ckpt:
        for index in (None, [0, 1], "a", 1.5):
            with pytest.raises(TypeError, match="an index is an integer or a slice"):
                ckpt["model.embed.weight"][index]
        with pytest.raises(TypeError, match="a name is a string"):
            ckpt[0]
    assert list(tmp_path.iterdir()) == []


def test_one_step_of_a_run_by_its_number(tmp_path: Path) -> None:
    for step in (1, 2):
        torch.save({"w": torch.ones(2), "step": step}, tmp_path / f"step_{step}.pt")
    assert [one["step"] for one in ckpttool.inspect(tmp_path, steps=1).facts["run"]] == [1]
