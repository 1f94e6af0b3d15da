"""What inspect says of a catalogue: parts, folded trees, hyper-parameters, values, findings, the JSON document."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import checkpoints
from support.paths import CHECKPOINTS
from torch import nn

import ckpttool
from ckpttool.analysis.describe.document import document
from ckpttool.analysis.describe.format_value import jsonable, type_name
from ckpttool.analysis.describe.hyperparameters import tables
from ckpttool.analysis.describe.listing import Listing
from ckpttool.analysis.describe.module_tree import ModuleLine, lines
from ckpttool.analysis.describe.summary import summarise
from ckpttool.catalogue import parts
from ckpttool.catalogue import values as stubs
from ckpttool.catalogue.dtypes import DTYPES
from ckpttool.catalogue.entries import Catalogue, Chunks, Extent, File, Object, Part, Record, Tensor
from ckpttool.catalogue.shown import shown
from ckpttool.catalogue.values import Link
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CorruptError, UsageError
from ckpttool.text import cut, ranges, safe


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Net(nn.Module):
    def __init__(self, layers: int = 3, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor(0))


def training(groups: int = 2) -> dict[str, Any]:
    torch.manual_seed(0)
    net = Net()
    named = list(net.parameters())
    optimizer = torch.optim.AdamW([{"params": named[i::groups], "lr": 0.1 * (i + 1)} for i in range(groups)])
    for p in named:
        p.grad = torch.ones_like(p)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {
        "model": net.state_dict(), "optim": optimizer.state_dict(), "sched": scheduler.state_dict(), "step": 7,
        "rng": torch.get_rng_state(),
    }  # fmt: skip


def catalogue(tree: dict[Any, Any], **extra: Any) -> Catalogue:
    found = checkpoints.state(tree, **extra)
    parts.assign(found)
    return found


# Parts ---------------------------------------------------------------------------------------------------------------


def test_parts_count_what_torch_counts() -> None:
    state, net = training(), Net()
    summary = summarise(catalogue(state))
    model, optimizer, *rest = summary.parts
    assert (model.part, model.root) == ("model", "model")
    assert model.tensor_count == len(net.state_dict())
    # Module.parameters() names a tied weight once.
    assert model.numel == sum(p.numel() for p in net.parameters()) + net.seen.numel()
    assert model.payload_bytes == sum(p.nbytes for p in net.parameters()) + net.seen.nbytes
    assert model.dtypes == {"float32": model.payload_bytes - 8, "int64": 8}
    moments = [t for s in state["optim"]["state"].values() for t in s.values()]
    assert (optimizer.tensor_count, optimizer.payload_bytes) == (len(moments), sum(t.nbytes for t in moments))
    assert [p.part for p in rest] == ["scheduler", "rng", "progress"]
    assert summary.headline.step == 7
    assert summary.ties == [("model.head.weight", "model.embed.weight")]


def test_step_comes_from_the_optimizer_when_nothing_else_says_it() -> None:
    state = {"model": {"w": torch.ones(2)}, "optim": {"state": {0: {"step": 12}}, "param_groups": [{"lr": 1.0}]}}
    assert summarise(catalogue(state)).headline.step == 12
    assert summarise(catalogue({"w": torch.ones(2)})).headline.step is None


# The tree ------------------------------------------------------------------------------------------------------------


def tree_of(module: nn.Module, depth: int = 9) -> list[ModuleLine]:
    found = catalogue(module.state_dict())
    return lines(found.tensors, (), {}, depth)


def test_equal_layers_are_one_line() -> None:
    net = Net(layers=32)
    del net.head
    found = {line.name: line for line in tree_of(net)}
    layers = found["layers.0-31"]
    assert (layers.times, layers.depth, layers.shape) == (32, 0, None)
    assert layers.elements == sum(p.numel() for p in net.layers.parameters())
    assert layers.tensors == len(net.layers.state_dict())
    norm = found["norm.weight"]
    assert (norm.times, norm.shape, norm.depth) == (32, (4,), 1)
    assert norm.elements == 32 * 4
    assert found["embed.weight"].times == 1


def test_layers_that_differ_are_not_folded() -> None:
    net = Net(layers=6)
    net.layers[2].norm.double()
    assert [line.name for line in tree_of(net, depth=1) if line.depth == 1] == ["0-1,3-5", "2"]


@pytest.mark.parametrize(("depth", "deepest", "closed"), [(1, 0, 1), (2, 2, 2), (3, 3, 0), (4, 3, 0)])
def test_depth_cuts_the_tree_and_keeps_the_totals(depth: int, deepest: int, closed: int) -> None:
    """`mlp` is a list of modules that differ, which is not a level of its own."""
    net = Net()
    found = tree_of(net, depth)
    assert max(line.depth for line in found) == deepest
    assert [line.closed for line in found if line.closed] == [3] * closed
    assert sum(line.tensors for line in found if line.depth == 0) == len(net.state_dict())


class Expert(nn.Module):
    """Layers of which the first is dense and the others have experts, within `model`, as transformers has them."""

    def __init__(self, layers: int = 12) -> None:
        super().__init__()
        self.lm_head = nn.Linear(2, 5, bias=False)
        self.model = nn.Module()
        self.model.embed = nn.Embedding(5, 2)
        self.model.layers = nn.ModuleList(nn.Module() for _ in range(layers))
        for i, layer in enumerate(self.model.layers):
            layer.norm = nn.LayerNorm(2)
            layer.mlp = nn.Linear(2, 2) if i < 3 else nn.Module()
            if i >= 3:
                layer.mlp.gate = nn.Linear(2, 4, bias=False)
                layer.mlp.experts = nn.ModuleList(nn.Bilinear(2, 2, 2) for _ in range(4))


def test_depth_is_not_spent_on_the_way_to_the_layers() -> None:
    found = tree_of(Expert(), 3)
    names = {line.name: line for line in found}
    assert [(names[n].depth, names[n].closed) for n in ("model", "layers", "0-2", "3-11", "experts.0-3")] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (2, 0),
        (4, 4),
    ]
    assert sum(line.tensors for line in found if line.depth == 0) == len(Expert().state_dict())
    opened = tree_of(Expert(), names["experts.0-3"].closed)
    assert not [line for line in opened if line.closed]
    assert ("weight", 36) in [(line.name, line.times) for line in opened]


def test_layers_come_in_the_order_of_their_numbers() -> None:
    """A safetensors file has them as 0, 1, 10, 11, 2, ..., and the tensors of each in an order of its own."""
    state = Expert(13).state_dict()
    shuffled = catalogue(dict(sorted(state.items(), key=lambda item: item[0][::-1])))
    found = lines(shuffled.tensors, (), {}, 3)
    assert [line.name for line in found if line.depth == 2 and line.name[0].isdecimal()] == ["0-2", "3-12"]


def test_modules_that_look_alike_until_one_has_more() -> None:
    """Modules with the same tensors are one in memory; what another part of the file adds to one is not in all."""
    names = [f"a.{i}.{last}" for i in range(4) for last in ("w", "b")]
    added = ["a.1.c", "a.2.w.x", "a.3.w", "z"]
    grouped = sorted({*names, *added}, key=lambda name: name.split(".")[:2])
    one_by_one = [*names, *added]

    def figures(order: list[str]) -> dict[tuple[int, str], tuple[int, int, int]]:
        found = lines(catalogue({name: torch.ones(2, 3) for name in order}).tensors, (), {}, 9)
        return {(line.depth, line.name): (line.folded, line.tensors, line.elements) for line in found}

    expected = figures(grouped)
    assert figures(one_by_one) == expected
    assert expected[0, "a"] == (1, 10, 60) and expected[1, "0,3"] == (2, 4, 24)
    assert expected[1, "1"] == (1, 3, 18) and expected[1, "2"] == (1, 3, 18)


def test_ranges() -> None:
    assert ranges([0, 1, 2, 5], ",") == "0-2,5"
    assert ranges([3]) == "3"
    assert ranges(range(0, 20, 2), ",", 4) == "0,2,4,...,18"


def test_a_name_of_a_thousand_dots_is_no_trouble() -> None:
    assert summarise(catalogue({"a." * 5000 + "b": torch.ones(1), "9" * 5000: torch.ones(1)}), depth=200).parts


# Hyper-parameters ----------------------------------------------------------------------------------------------------


def test_groups_are_columns_and_equal_ones_share_one() -> None:
    optim = training(groups=3)["optim"]
    for name in ("lr", "initial_lr"):
        optim["param_groups"][2][name] = optim["param_groups"][1][name]
    (table,) = tables(catalogue({"optim": optim}).entries.values(), {})
    assert table.root == ("optim",)
    assert table.titles == ["group 0", "groups 1-2"]
    assert table.columns[1].split == " + ".join(str(len(g["params"])) for g in optim["param_groups"][1:])
    sizes = [len(g["params"]) for g in optim["param_groups"]]
    assert [c.params for c in table.columns] == [sizes[0], sizes[1] + sizes[2]]
    assert table.columns[0].values["lr"] == "0.1"
    assert set(table.names) == set(optim["param_groups"][0]) - {"params"}


@pytest.mark.parametrize("one_key", [True, False])
def test_flattened_groups_are_folded_by_value(one_key: bool) -> None:
    """torchtitan's `param_groups.<fqn>.<name>`, with the path in one key or in several."""
    decay = {"layers.0.w.weight": 0.1, "layers.1.w.weight": 0.1, "norm.weight": 0.0}
    if one_key:
        flat: dict[str, Any] = {f"param_groups.{fqn}.weight_decay": d for fqn, d in decay.items()}
    else:
        flat = {"param_groups": {fqn: {"weight_decay": d} for fqn, d in decay.items()}}
    found = catalogue({"w": torch.ones(1), "optimizer": {**flat, "state.norm.weight.step": torch.ones(())}})
    (table,) = tables(found.entries.values(), {})
    assert table.titles == ["group 0", "group 1"]
    assert [(c.params, c.values) for c in table.columns] == [(2, {"weight_decay": "0.1"}), (1, {"weight_decay": "0.0"})]


def test_what_the_table_shows_is_not_among_the_objects() -> None:
    summary = summarise(catalogue(training()))
    assert not [o for o in summary.objects if "param_groups" in o.name]
    assert "sched.step_size" in [o.name for o in summary.objects]


# Objects and values --------------------------------------------------------------------------------------------------


def test_neighbours_that_differ_in_one_number_are_one_line() -> None:
    tree = {f"dp_rank_{i}": "same" for i in range(8)} | {"dp_rank_8": "other", "x1_1": "same", "x2_2": "same"}
    found = [(o.name, o.times) for o in summarise(catalogue(tree)).objects]
    assert found == [("dp_rank_0-7", 8), ("dp_rank_8", 1), ("x1_1", 1), ("x2_2", 1)]


def test_a_large_object_is_not_read_and_a_broken_one_is_named() -> None:
    found = Catalogue("made")
    found.add(Object(("big",), read=lambda: pytest.fail("read"), nbytes=1 << 30))

    def broken() -> Any:
        raise CorruptError("`x`: cut")

    found.add(Object(("bad",), read=broken))
    assert [o.text for o in summarise(found).objects] == ["<1073741824 bytes>", "<unreadable: `x`: cut>"]
    assert json.loads("".join(document(found, "x")))["objects"][1]["value"] == "<unreadable: `x`: cut>"


@pytest.mark.parametrize(
    "value",
    [None, True, 3, -(2**70), 0.5, float("inf"), 1 + 2j, "text", "it's", (0.9, 0.95), (1,), (), [], [1, "a"], {},
     {"a": 1}, {1, 2}, set(), frozenset(), frozenset({"a"}), b"\x00ab"],
)  # fmt: skip
def test_plain_values_look_as_python_writes_them(value: Any) -> None:
    assert shown(value) == repr(value)


def test_a_torch_size_looks_as_torch_writes_it() -> None:
    assert shown(stubs.TorchSize((2, 3))) == repr(torch.Size([2, 3]))


def stub(module: str, name: str, *args: Any, state: Any = None) -> Any:
    found = stubs.stub_type(module, name)(*args)
    if state is not None:
        found.__setstate__(state)
    return found


def test_stubs_say_their_class_and_what_is_in_them() -> None:
    namespace = stub("argparse", "Namespace", state={"lr": 0.1, "name": "tiny"})
    assert shown(namespace) == "<argparse.Namespace lr=0.1 name='tiny'>"
    assert shown(stubs.stub_type("torch", "float32")) == "torch.float32"
    assert type_name(namespace) == "argparse.Namespace"


def test_blobs_are_sizes() -> None:
    assert shown(b"x" * 5056) == "<5056 bytes>"
    assert shown((3, tuple(range(625)), None)) == "(3, <625 numbers>, None)"


def test_a_link_is_the_tensor_it_stands_for() -> None:
    found = catalogue({"pair": (torch.ones(2, 3), 1)})
    (entry,) = found.objects
    assert shown(entry.value, found.entries) == "(<tensor float32 [2, 3]>, 1)"


def test_no_value_is_long_or_takes_long() -> None:
    bomb: Any = [0, 0]
    for _ in range(200):
        bomb = [bomb, bomb]
    for value in (bomb, "x" * 10**7, ["y"] * 10**6, dict.fromkeys(range(10**5), "z"), 1 << 10**6):
        assert len(shown(value, limit=72)) <= 72
    assert len(json.dumps(jsonable(bomb))) < 20_000_000


def test_no_more_of_a_value_is_looked_at_than_is_shown() -> None:
    class Long(list[str]):
        def __iter__(self) -> Iterator[str]:
            for _ in range(100):
                yield "word"
            pytest.fail("looked at more")

    assert shown(Long(["word"])).startswith("['word', 'word'")


EVIL = "\x1b]0;owned\x07\x1b[31m\u202e\x9b2J\r\n\x00\ud800"


def test_nothing_reaches_a_terminal_raw() -> None:
    for text in (safe(EVIL), shown(EVIL), shown({EVIL: stub("evil", "Evil", state={EVIL: EVIL})})):
        assert text.isprintable()
    assert safe("a\x1b[2J") == r"a\x1b[2J"
    assert safe("layers.0 héllo 日本語") == "layers.0 héllo 日本語"


def test_cut() -> None:
    assert cut("abcdef", 6) == "abcdef"
    assert cut("abcdefg", 6) == "abc..."


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ((1, 2.5, "x"), [1, 2.5, "x"]),
        (float("nan"), "nan"),
        (-float("inf"), "-inf"),
        ({0: {"a": (1,)}}, {"0": {"a": [1]}}),
        (OrderedDict(b=1, a=None), {"b": 1, "a": None}),
        (b"abc" * 9, "<27 bytes>"),
        (2**70, 2**70),
        ({1}, "{1}"),
    ],
)
def test_json_values(value: Any, expected: Any) -> None:
    assert jsonable(value) == expected
    assert json.loads(json.dumps(jsonable(value), allow_nan=False)) == expected


# Findings ------------------------------------------------------------------------------------------------------------


def warnings_of(found: Catalogue) -> list[str]:
    return [str(warning) for warning in summarise(found).warnings]


def test_uneven_ranks() -> None:
    def ranks(*sizes: int) -> Catalogue:
        return Catalogue("dcp", [File(f"{r}", f"{r}", size, rank=r) for r, size in enumerate(sizes)])

    (said,) = warnings_of(ranks(100_000_000, 100_000_000, 100_000_000, 500_000_000))
    assert said.startswith("rank 3 wrote 500 MB, 2.5 times the mean of 4 ranks")
    assert not warnings_of(ranks(100_000, 100_000, 100_000, 500_000))  # nobody waits for half a megabyte
    assert not warnings_of(ranks(1_000_000_000, 1_000_000_000, 1_000_000_000, 1_200_000_000))
    assert not warnings_of(Catalogue("dcp", [File(f"{r}", f"{r}", 100 + r, rank=r) for r in range(4)]))
    assert not warnings_of(Catalogue("torch", [File("a", "a", 100), File("b", "b", 10)]))


def tensor(path: tuple[str, ...], offset: int, crc: int, shape: tuple[int, ...] = (4, 4)) -> Tensor:
    extent = Extent(0, offset, 64, record=Record(0, offset, 64, crc))
    return Tensor(path, DTYPES["float32"], shape, Chunks.single(shape, extent), part=Part("model", ("model",)))


def test_equal_checksums_in_two_places() -> None:
    found = Catalogue("torch", [File("a", "a", 1000)])
    for i, crc in enumerate((5, 6, 5)):
        found.add(tensor(("model", f"w{i}"), 100 * i, crc))
    found.add(tensor(("model", "tied"), 100, 6))
    (said,) = warnings_of(found)
    assert said == "`model.w0` and `model.w2` hold the same bytes, stored 2 times"


def test_a_tied_weight_that_was_stored_twice_is_suspected() -> None:
    """As DCP leaves it: head and embedding apart, and the optimizer knows one of them."""
    state = training()
    weight = state["model"]["embed.weight"]
    model = {**state["model"], "head.weight": weight.clone()}
    moments = {name: {"exp_avg": torch.ones(1)} for name, _ in Net().named_parameters()}
    optim = {"state": moments, "param_groups": [{"lr": 0.1, "params": list(moments)}]}
    (said,) = warnings_of(catalogue({"model": model, "optim": optim}))
    assert said.startswith("`model.head.weight` and `model.embed.weight` look tied, but are stored twice")
    assert not warnings_of(catalogue({"model": model}))
    frozen = copy.deepcopy(model) | {"other.weight": weight.clone()}
    assert not warnings_of(catalogue({"model": frozen, "optim": optim}))


# JSON ----------------------------------------------------------------------------------------------------------------


def test_the_document() -> None:
    weight = torch.ones(5, 3)
    cuts = {"model.w": checkpoints.grid((5, 3), (2, 1))}
    found = catalogue({"model": {"w": weight}, "optim": {"state": {0: {"step": 3}}, "param_groups": []}}, cuts=cuts)
    found.warnings.append(Warning("left-out", "look"))
    found.facts["writer"] = "torch"
    said = json.loads("".join(document(found, "run/")))
    assert list(said)[:3] == ["schema", "exit_code", "verdict"]
    assert (said["schema"], said["format"], said["world_size"]) == ("ckpttool/inspect/2", "made", 2)
    assert said["tensors"] == [{
        "name": "model.w", "path": ["model", "w"], "part": "model", "dtype": "float32", "shape": [5, 3],
        "nbytes": weight.nbytes, "placements": ["Shard(0)"], "mesh": [2],
        "chunks": [
            {"offsets": [0, 0], "sizes": [3, 3], "file": "0.bin", "rank": 0},
            {"offsets": [3, 0], "sizes": [2, 3], "file": "1.bin", "rank": 1},
        ],
    }]  # fmt: skip
    assert said["objects"][0] == {
        "name": "optim.state.0.step", "path": ["optim", "state", 0, "step"], "part": "optimizer",
        "type": "int", "value": 3,
    }  # fmt: skip
    assert said["warnings"][0] == "look"
    assert (said["writer"], said["path"], said["step"]) == ("torch", "run/", 3)


def test_a_fact_cannot_take_the_place_of_the_schema() -> None:
    found = catalogue({"w": torch.ones(1)})
    found.facts |= {"schema": "mine", "tensors": 5, "x": Link(("w",))}
    text = "".join(document(found, "x"))
    said = json.loads(text)
    assert said["schema"] == "ckpttool/inspect/2"
    names = [name for name, _ in json.loads(text, object_pairs_hook=lambda pairs: pairs)]
    assert len(names) == len({*names})


def test_chosen_tensors() -> None:
    found = catalogue({"a": torch.ones(1), "b": torch.ones(1)})
    said = json.loads("".join(document(found, "x", Listing(["b"]))))
    assert [t["name"] for t in said["tensors"]] == ["b"]


def test_flat_parameters_without_shapes_are_no_damage() -> None:
    """Only `--shapes` is missing, and the hint says so."""
    path = CHECKPOINTS / "rank/fsdp1_flat_w2/ckpt"
    warnings = ckpttool.inspect(path).warnings
    assert not [w for w in warnings if w.kind == "damaged"]
    (unknown,) = [w for w in warnings if w.kind == "unknown-shape"]
    assert "LOCAL_STATE_DICT" in unknown.text and "pass `--shapes FROM`" in unknown.text


def test_a_truncated_file_is_one_warning(tmp_path: Path) -> None:
    """Of everything behind its end, and none of it is damage of its own."""
    shutil.copytree(CHECKPOINTS / "dcp/hsdp_w4/ckpt", tmp_path / "cut")
    os.truncate(tmp_path / "cut" / "__1_0.distcp", 6000)
    about = [str(w) for w in ckpttool.inspect(tmp_path / "cut").warnings if "__1_0.distcp" in str(w)]
    [said] = about
    counted = re.fullmatch(
        r"damaged: `__1_0\.distcp`: truncated at 6,000 bytes: (\d+) tensors and (\d+) objects lie beyond its end", said
    )
    assert counted is not None, said
    [cut] = [finding for finding in ckpttool.verify(tmp_path / "cut").findings if finding.kind == "truncated"]
    assert len(cut.names) == int(counted[1]) + int(counted[2])


def test_an_entry_is_looked_up_by_its_name(tmp_path: Path) -> None:
    state = {"model": {"norm.weight": torch.ones(3), "norm.bias": torch.zeros(2)}, "step": 7}
    torch.save(state, tmp_path / "full.pt")
    catalogue = ckpttool.inspect(tmp_path / "full.pt")
    assert catalogue.tensors["model.norm.weight"] is catalogue.tensors[0]
    assert catalogue.tensors["model", "norm.bias"].shape == (2,)
    assert catalogue.objects["step"].value == 7
    assert "step" in catalogue.objects and "step" not in catalogue.tensors and catalogue.tensors[0] in catalogue.tensors
    with pytest.raises(KeyError, match=r"did you mean model\.norm\.weight"):
        catalogue.tensors["norm.weight"]
    with pytest.raises(KeyError, match="'step'"):
        catalogue.tensors["step"]


@pytest.mark.parametrize(
    "templates", [("step_{}.pt",), ("G_{}.pth", "D_{}.pth"), ("ckpt-{}/model.pt", "ckpt-{}/opt.pt")]
)
def test_some_steps_of_a_run(templates: tuple[str, ...], tmp_path: Path) -> None:
    for step in (200, 900, 1000):
        for template in templates:
            path = tmp_path / template.format(step)
            path.parent.mkdir(exist_ok=True)
            torch.save({"weight": torch.full((2,), float(step))}, path)
    names = [tensor.name for tensor in ckpttool.inspect(tmp_path).tensors]
    for steps, listed in (("200", [200]), ("900,200", [200, 900]), ([1000], [1000]), ("201..1000", [900, 1000])):
        catalogue = ckpttool.inspect(tmp_path, steps=steps)
        assert [one["step"] for one in catalogue.facts["run"]] == listed
        assert [one["step"] for one in catalogue.facts["run"] if one["taken"]] == listed[-1:]
        assert [tensor.name for tensor in catalogue.tensors] == names
        files = {file.name for file in catalogue.files}
        assert files == {template.format(listed[-1]).rpartition("/")[2] for template in templates}
    assert len(ckpttool.inspect(tmp_path, steps="all").facts["run"]) == 3
    for absent in ("7", "200,7", "201..899"):
        with pytest.raises(UsageError, match=f"no complete checkpoint of step {absent.rpartition(',')[2]}") as raised:
            ckpttool.inspect(tmp_path, steps=absent)
        assert raised.value.hint == "the complete ones are 200, 900, 1000"
    with pytest.raises(UsageError, match="is not a run"):
        ckpttool.inspect(tmp_path / templates[0].format(200), steps="200")
