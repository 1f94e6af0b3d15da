"""What `browse` shows, without a screen: the tree, the order in which values are read, pictures."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
import torch.distributed.checkpoint as dcp
from support import qwen3
from support.hub_client import use
from support.hub_server import Hub
from support.paths import CHECKPOINTS
from support.upstream_samples import path_of

import ckpttool
from ckpttool.analysis.browsing import survey as survey_module
from ckpttool.analysis.browsing.folding import Node
from ckpttool.analysis.browsing.pixels import as_matrix, pooled
from ckpttool.analysis.browsing.session import Opened
from ckpttool.transfer.threads import Work

SAMPLES = ["dcp/hsdp_w4", "dcp/dtypes", "dcp/fsdp2_tp_w4", "torch/full", "torch/layouts", "hf/llama", "rank/fsdp1_w4"]


def finish(opened: Opened) -> None:
    opened.survey.start()
    until = time.monotonic() + 300
    while not opened.survey.finished:
        assert time.monotonic() < until and not opened.survey.damage, opened.survey.damage
        time.sleep(0.01)


def leaves(node: Node) -> list[int]:
    return [node.tensor] if node.tensor is not None else [i for child in node.children for i in leaves(child)]


@pytest.mark.parametrize("name", SAMPLES)
def test_every_tensor_is_in_the_tree_once(name: str) -> None:
    opened = Opened(path_of(name), None)
    found = [i for root in opened.tree.roots for i in leaves(root)]
    assert sorted(found) == list(range(len(opened.tensors))) and found
    for i in found:
        path = opened.tree.path_to(i)
        assert path[-1].tensor == i
        for above, below in pairwise(path):
            assert below in above.children and set(below.members) <= set(above.members)
    opened.source.close()


@pytest.mark.parametrize("name", SAMPLES)
def test_the_statistics_are_those_of_stats(name: str) -> None:
    opened = Opened(path_of(name), None)
    finish(opened)
    expected = ckpttool.stats(path_of(name))
    assert opened.survey.rows == expected.tensors
    assert opened.survey.findings == expected.findings
    opened.source.close()


def test_layers_and_experts_are_folded(tmp_path: Path) -> None:
    names = [f"m.layers.{i}.experts.{j}.up.weight" for i in range(12) for j in (0, 1, 2)]
    names += [f"m.layers.{i}.norm" for i in range(12)] + ["m.head", "m.head.bias", "0", "1"]
    arrays = {name: np.zeros(2, np.float32) for name in names}
    safetensors.numpy.save_file(arrays, tmp_path / "a.safetensors")
    opened = Opened(str(tmp_path / "a.safetensors"), None)
    (root,) = opened.tree.roots
    assert {node.label for node in root.children} == {"m", "0", "1"}
    inside = {node.label: node for node in next(node for node in root.children if node.label == "m").children}
    assert set(inside) == {"layers.0-11", "head", "head.bias"} or set(inside) == {"layers.0-11", "head"}
    layers = {node.label: node for node in inside["layers.0-11"].children}
    assert layers["norm"].times == 12 and [node.label for node in layers["norm"].children][9:] == [
        "[9]",
        "[10]",
        "[11]",
    ]
    experts = layers["experts.0-2.up.weight"]
    assert len(experts.children) == 36 and experts.children[4].label == "[1.1]"
    opened.source.close()


def test_what_is_wanted_is_read_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {f"t{i:03}": np.full(4, float(i), np.float32) for i in range(100)}
    safetensors.numpy.save_file(arrays, tmp_path / "a.safetensors")
    opened = Opened(str(tmp_path / "a.safetensors"), None)
    read: list[str] = []
    first, may_go_on = threading.Event(), threading.Event()

    class Reading(survey_module.TensorReading):
        def result(self):  # type: ignore[no-untyped-def]
            read.append(self.tensor.name)
            first.set()
            may_go_on.wait(300)
            return super().result()

    monkeypatch.setattr(survey_module, "TensorReading", Reading)
    opened.survey.start()
    first.wait(300)
    opened.survey.want([opened.numbers["t090"], opened.numbers["t007"]])
    may_go_on.set()
    finish_waiting = time.monotonic() + 300
    while not opened.survey.finished and time.monotonic() < finish_waiting:
        time.sleep(0.01)
    assert read[1:3] == ["t090", "t007"] and sorted(read) == sorted(arrays)
    opened.source.close()


def test_of_a_checkpoint_on_the_hub_only_what_is_demanded_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(tmp_path / "hub")
    qwen3.add(hub)
    use(hub, monkeypatch, tmp_path)
    opened = Opened(f"hf://{qwen3.NAME}", None)
    survey, wanted = opened.survey, opened.numbers["model.norm.weight"]
    survey.start()
    survey.want([wanted, opened.numbers["lm_head.weight"]])
    time.sleep(0.5)
    assert not survey.is_local and not any(survey.rows) and sum(each.sent for each in hub.seen) < 1 << 20
    survey.want([wanted], demanded=True)
    until = time.monotonic() + 300
    while survey.rows[wanted] is None and time.monotonic() < until:
        time.sleep(0.01)
    assert survey.rows[wanted] is not None and sum(row is not None for row in survey.rows) == 1
    assert sum(each.sent for each in hub.seen) < 1 << 20
    survey.stop()
    opened.source.close()
    hub.close()


def test_a_second_look_is_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTTOOL_CACHE", str(tmp_path))
    rows = []
    for was_read in (False, True):
        opened = Opened(path_of("dcp/hsdp_w4"), None)
        finish(opened)
        assert opened.survey.cached == was_read
        rows.append(opened.survey.rows)
        opened.source.close()
    assert rows[0] == rows[1]
    # `stats` wants groups too, and does not take them from there.
    assert not ckpttool.stats(path_of("dcp/hsdp_w4")).cached


@pytest.mark.parametrize("name", ["dcp/fsdp2_tp_w4", "dcp/dtypes", "torch/layouts"])
@pytest.mark.parametrize("size", [(1, 1), (4, 3), (1000, 1000)])
def test_a_picture_has_the_largest_of_each_cell(name: str, size: tuple[int, int]) -> None:
    """Cell by cell, from the whole tensor as `ckpttool.open` reads it."""
    opened = Opened(path_of(name), None)
    compared = 0
    with ckpttool.open(path_of(name)) as checkpoint:
        for tensor in opened.tensors:
            grid = pooled(tensor, opened.source, *size, Work())
            if grid is None:
                continue
            values = checkpoint[tensor.path].torch()
            wide = values.to(torch.complex128 if values.is_complex() else torch.float64)
            matrix = wide.abs().numpy().reshape(as_matrix(tensor.shape))
            matrix[~np.isfinite(matrix)] = np.nan
            rows, columns = (np.arange(n) * m // n for n, m in zip(matrix.shape, grid.shape, strict=True))
            for y in range(grid.shape[0]):
                for x in range(grid.shape[1]):
                    cell = matrix[np.ix_(rows == y, columns == x)]
                    assert np.allclose(grid[y, x], cell.max(), rtol=1e-14, atol=0, equal_nan=True)
            compared += 1
    assert compared > 5
    opened.source.close()


def test_what_cannot_be_read_is_said_of_that_tensor(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    source = CHECKPOINTS / "dcp" / "hsdp_w4" / "ckpt"
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    shards = sorted(folder.glob("*.distcp"))
    shards[0].write_bytes(shards[0].read_bytes()[:2000])
    opened = Opened(str(folder), None)
    opened.survey.start()
    until = time.monotonic() + 300
    while not (opened.survey.finished or opened.survey.damage) and time.monotonic() < until:
        time.sleep(0.01)
    survey = opened.survey
    assert survey.damage or survey.errors
    assert not any(row is None and i not in survey.errors for i, row in enumerate(survey.rows)) or survey.damage
    survey.stop()
    opened.source.close()


@pytest.mark.parametrize("name", ["torch/full", "dcp/int_keys", "dcp/hsdp_w4"])
def test_optimizer_state_is_found_by_the_name_of_its_parameter(name: str) -> None:
    """Of an optimizer that has numbers for them, too: torch's own load gives each its shape."""
    opened = Opened(path_of(name), None)
    weights = [one for one in opened.tensors if one.part.kind == "model"]
    found = {one.fqn: [opened.tensors[i] for i in opened.moments_of(one)] for one in weights}
    moments = [one for one in opened.tensors if one.part.kind == "optimizer"]
    kept = {id(one): name for name, ones in found.items() for one in ones}
    assert len(kept) == len(moments) > 20 and not opened.unnamed
    for parameter in (one for one in weights if found[one.fqn]):
        of = {one.path[-1]: one for one in found[parameter.fqn]}
        assert of["exp_avg"].shape == of["exp_avg_sq"].shape == parameter.shape
    opened.source.close()


def test_numbered_state_is_that_of_torch(tmp_path: Path) -> None:
    """Of two weights of one shape: the values are those that the optimizer has of the parameter itself."""
    model = torch.nn.ModuleDict({"b": torch.nn.Linear(4, 4), "a": torch.nn.Linear(4, 4)})
    optimizer = torch.optim.AdamW([{"params": [*model["a"].parameters()]}, {"params": [*model["b"].parameters()]}])
    (model["b"](model["a"](torch.rand(3, 4))) ** 2).sum().backward()
    optimizer.step()
    # Two groups of equal shapes: which is which is not told, and is not guessed.
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "unclear.pt")
    opened = Opened(str(tmp_path / "unclear.pt"), None)
    assert [opened.moments_of(one) for one in opened.tensors if one.part.kind == "model"] == [[]] * 4
    assert opened.unnamed
    opened.source.close()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "clear.pt")
    with ckpttool.open(tmp_path / "clear.pt") as checkpoint:
        opened = Opened(str(tmp_path / "clear.pt"), None)
        for name, parameter in model.named_parameters():
            (weight,) = (one for one in opened.tensors if one.fqn == name and one.part.kind == "model")
            for i in opened.moments_of(weight):
                key = opened.tensors[i].path[-1]
                assert torch.equal(checkpoint[opened.tensors[i].name].torch(), optimizer.state[parameter][str(key)])
            assert len(opened.moments_of(weight)) == 3
        opened.source.close()


def test_the_headline_counts_a_weight_that_is_stored_twice_once(tmp_path: Path) -> None:
    """In every place where it is made: browse, stats, inspect, and the pages of verify and reshard."""
    model = {"embed.weight": torch.rand(32, 8), "body.weight": torch.rand(8, 8)}
    state = {name: {"exp_avg": torch.rand_like(value)} for name, value in model.items()}
    groups = [{"lr": 0.1, "params": [*model]}]
    optimizer = {"state": state, "param_groups": groups}
    twice = {**model, "head.weight": model["embed.weight"].clone()}
    dcp.save({"model": twice, "optimizer": optimizer}, checkpoint_id=tmp_path / "x", no_dist=True)
    opened = Opened(str(tmp_path / "x"), None)
    expected = "320 parameters"
    assert str(opened.headline).startswith(expected)
    assert opened.headline.parameters == 320
    opened.source.close()
    assert ckpttool.stats(tmp_path / "x", cache=False).headline.startswith(expected)
    ckpttool.verify(tmp_path / "x", html=tmp_path / "verify.html")
    ckpttool.reshard(tmp_path / "x", tmp_path / "y", to_world=2, dry_run=True, html=tmp_path / "reshard.html")
    for name in ("verify", "reshard"):
        assert "stored twice: they have the same checksums" in (tmp_path / f"{name}.html").read_text(), name
