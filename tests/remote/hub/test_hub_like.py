"""A reference and a base on the Hub: headers are read, and of the base the tensors that are missing."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load, load_file, save
from support.hub_server import Hub

import ckpttool


def test_only_the_bytes_of_missing_tensors_are_fetched(hub: Hub, tmp_path: Path) -> None:
    language = {f"layers.{i}.weight": torch.randn(1024, 1024) for i in range(6)}
    vision = {"vision.weight": torch.randn(64, 64)}
    released = save({**language, **vision}, {"format": "pt"})
    hub.make("org/base")
    hub.commit("org/base", {"model.safetensors": released, "config.json": b'{"model_type": "none"}'})
    trained = {name: value + 1 for name, value in language.items()}
    torch.save({"model": trained}, tmp_path / "x.pt")
    hub.seen.clear()
    base = "hf://org/base"
    steps: list[tuple[int, int]] = []
    made = ckpttool.export(
        tmp_path / "x.pt", tmp_path / "out", like=base, fill_from=base, progress=lambda *step: steps.append(step)
    )
    assert made.filled == ["vision.weight"] and made.assets == ["config.json"]
    assert sum(one.sent for one in hub.seen) < len(released) / 4
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], value) for name, value in (trained | vision).items())
    assert "`hf://org/base`: `vision.weight`" in (tmp_path / "out" / "README.md").read_text()
    assert steps[-1][0] == steps[-1][1] == sum(value.nbytes for value in (trained | vision).values())

    sent = ckpttool.export(tmp_path / "x.pt", "hf://me/mine", like=base, fill_from=base)
    files = hub.files("me/mine")
    assert {"model.safetensors", "config.json", "README.md"} <= files.keys()
    there = load(files["model.safetensors"])
    assert all(torch.equal(there[name], value) for name, value in (trained | vision).items())
    assert sent.filled == ["vision.weight"]
