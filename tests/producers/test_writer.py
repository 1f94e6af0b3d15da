"""What is written for a framework to resume from: each piece as upstream reads it, against what the framework left."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import simulated_ranks
from support.layouts.reading import load
from support.upstream_samples import path_of, reference
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from ckpttool import convert, inspect
from ckpttool.catalogue.entries import Tensor
from ckpttool.errors import LossError, UsageError


def pieces(folder: Path) -> dict[str, Any]:
    """What a directory holds, by the names of its pieces."""
    return {path.name: load(path) for path in folder.iterdir()}


def assert_same(found: Any, expected: Any, at: str = "$") -> None:
    """Bit for bit; an OrderedDict is a dict, as no `load_state_dict` asks."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), at
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), at
        raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) if t.numel() else t for t in (found, expected)]
        assert torch.equal(*raw), at
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), at
        for key, value in expected.items():
            assert_same(found[key], value, f"{at}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected), at
        assert len(found) == len(expected), at
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{at}[{index}]")
    elif type(expected).__module__.startswith("accelerate."):
        assert_same(vars(found) | {"generator": 0}, vars(expected) | {"generator": 0}, at)
    else:
        assert type(found) is type(expected), at
        assert repr(found) == repr(expected), at


ACCELERATE = (
    ("run/accelerate_fsdp2_sharded_w2", "accelerate:sharded"),
    ("run/accelerate_fsdp1_sharded_w2", "accelerate:sharded"),
    ("run/accelerate_fsdp1_full_w2", "accelerate:full"),
    ("run/accelerate_ddp_w2", "accelerate:ddp"),
)


@pytest.mark.parametrize(("sample", "layout"), ACCELERATE)
def test_what_accelerate_left_comes_back(tmp_path: Path, sample: str, layout: str) -> None:
    made = convert(path_of(sample), tmp_path / "out", producer="accelerate", check=True)
    assert made.format == layout
    found, expected = pieces(tmp_path / "out"), pieces(Path(path_of(sample)))
    assert found.keys() == expected.keys()
    assert_same(found, expected)


def test_a_relative_destination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = path_of("rank/fsdp1_w2")
    for producer, name in (("torchtitan", "step-3"), ("verl", "global_step_3"), ("trainer", "checkpoint-3")):
        assert convert(source, name, producer=producer, check=True).destination == name


OTHERS = (
    ("run/trainer", "trainer", "checkpoint-4", "checkpoint-4"),
    ("run/trainer_w2", "trainer", "checkpoint-4", "checkpoint-4"),
    ("run/trainer_fsdp2_w2", "trainer", "checkpoint-4", "checkpoint-4"),
    ("run/torchtitan_w2", "torchtitan", "step-3", "step-3"),
)


@pytest.mark.parametrize(("sample", "producer", "name", "inside"), OTHERS)
def test_what_a_framework_left_comes_back(tmp_path: Path, sample: str, producer: str, name: str, inside: str) -> None:
    made = convert(path_of(sample), tmp_path / name, producer=producer, check=True)
    assert not [note for note in made.notes if "made with" in note or "by its name" in note]
    there = Path(path_of(sample)) / inside
    if producer == "torchtitan":
        assert_same(load(tmp_path / name), load(there))
        return
    expected = {n: v for n, v in pieces(there).items() if n not in ASSETS}
    assert_same(pieces(tmp_path / name), expected)


ASSETS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def test_what_verl_left_comes_back(tmp_path: Path) -> None:
    source, made = path_of("run/verl_fsdp2_w2"), tmp_path / "global_step_3"
    convert(source, made, producer="verl", tensor_class="dtensor:cpu:fsdp", check=True)
    names = {p.name for p in (Path(source) / "global_step_3/actor").iterdir()} - {"huggingface"}
    assert {p.name for p in (made / "actor").iterdir()} == names
    assert_same(load(made / "data.pt"), load(Path(source) / "global_step_3/data.pt"))
    for name in names:
        rank = int(name[-4]) if name.endswith(".pt") else 0
        with simulated_ranks.as_rank(rank, 2):
            both = [local(load(folder / "actor" / name)) for folder in (made, Path(source) / "global_step_3")]
        assert_same(*both)


def local(state: Any) -> Any:
    """A state with the pieces of this rank, and how they are cut."""
    if isinstance(state, DTensor):
        return [state.to_local(), str(state.placements), tuple(state.shape), str(state.device_mesh)]
    if isinstance(state, dict):
        return {key: local(value) for key, value in state.items()}
    return state


def test_a_step_that_only_the_state_says(tmp_path: Path) -> None:
    """Other people's `step` becomes what the framework has for it."""
    source = path_of("rank/fsdp1_w2")
    made = convert(source, tmp_path / "step-3", producer="torchtitan", check=True)
    state = load(tmp_path / "step-3")["train_state"]
    assert_same(state, {"step": torch.tensor(3, dtype=torch.int32), "ntokens_seen": torch.tensor(0)})
    assert made.dropped == []
    # What was made has a checksum like everything else: it is compared when the items are read.
    assert convert(tmp_path / "step-3", tmp_path / "again.pt").unchecked_bytes == 0
    convert(source, tmp_path / "checkpoint-3", producer="trainer", check=True)
    assert load(tmp_path / "checkpoint-3/trainer_state.json")["global_step"] == 3
    convert(source, tmp_path / "global_step_3", producer="verl", check=True)
    with pytest.raises(LossError, match="verl reads the step from the directory's name"):
        convert(source, tmp_path / "last", producer="verl")


def test_a_step_that_only_the_name_says(tmp_path: Path) -> None:
    source = path_of("rank/fsdp1_w2")
    convert(source, tmp_path / "checkpoint-7", producer="trainer", drop="step")
    assert load(tmp_path / "checkpoint-7/trainer_state.json")["global_step"] == 7
    for producer in ("trainer", "torchtitan"):
        with pytest.raises(UsageError, match="the source does not contain it"):
            convert(source, tmp_path / "last", producer=producer, drop="step")


def test_torchtitan_to_trainer(tmp_path: Path) -> None:
    """What has a counterpart is carried over, what has none is named."""
    source = path_of("run/torchtitan_w2")
    with pytest.raises(LossError, match=r"4 entries would be lost .*the Trainer stores no such value"):
        convert(source, tmp_path / "checkpoint-3", producer="trainer")
    exclude = "train_state.ntokens_seen"
    convert(source, tmp_path / "checkpoint-3", producer="trainer", drop="dataloader", exclude=exclude, check=True)
    found, ref = pieces(tmp_path / "checkpoint-3"), reference("run/torchtitan_w2")
    assert_same(found["model.safetensors"], dict(ref["model"]))
    names = [name for group in ref["optim"]["param_groups"] for name in group["params"]]
    assert [group["params"] for group in found["optimizer.pt"]["param_groups"]] == [[0, 1, 2], [3, 4]]
    for number, name in enumerate(names):
        assert_same(found["optimizer.pt"]["state"][number], dict(ref["optim"]["state"][name]), name)
    assert_same(found["scheduler.pt"], ref["scheduler"])
    assert found["trainer_state.json"]["global_step"] == 3


def test_data_loaders_go_where_they_mean_the_same(tmp_path: Path) -> None:
    """accelerate and verl keep torchdata's; torchtitan pickles one for each rank."""
    convert(path_of("run/verl_fsdp2_w2"), tmp_path / "a", producer="accelerate", check=True)
    assert_same(load(tmp_path / "a/dl_state_dict.bin"), reference("run/verl_fsdp2_w2")["dataloader"])
    with pytest.raises(LossError, match=r"dataloader\.dp_rank_1"):
        convert(path_of("run/torchtitan_w2"), tmp_path / "b", producer="accelerate", drop="train_state")
    torch.save({"model": {"w": torch.ones(2)}, "sampler": {"epoch": 1}}, tmp_path / "own.pt")
    with pytest.raises(LossError, match="sampler"):
        convert(tmp_path / "own.pt", tmp_path / "b", producer="accelerate")


def test_a_second_model(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}, "ema": {"w": torch.zeros(2)}, "model_1": {"w": torch.full((2,), 2.0)}}
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(LossError, match=r"1 entry would be lost \(`ema.w`\).*no second one"):
        convert(tmp_path / "state.pt", tmp_path / "a", producer="accelerate")
    convert(tmp_path / "state.pt", tmp_path / "a", producer="accelerate", drop="ema", check=True)
    assert_same(pieces(tmp_path / "a"), {"model.safetensors": state["model"], "model_1.safetensors": state["model_1"]})
    with pytest.raises(LossError, match=r"2 entries would be lost"):
        convert(tmp_path / "state.pt", tmp_path / "checkpoint-1", producer="trainer")


def test_a_tensor_tied_across_pieces_is_written_in_both(tmp_path: Path) -> None:
    shared = torch.arange(3.0)
    torch.save({"model": {"w": shared}, "model_1": {"w": shared}}, tmp_path / "state.pt")
    convert(tmp_path / "state.pt", tmp_path / "a", producer="accelerate", check=True)
    assert_same(pieces(tmp_path / "a"), {"model.safetensors": {"w": shared}, "model_1.safetensors": {"w": shared}})


def test_the_world_of_whole_tensors_is_that_of_its_generators(tmp_path: Path) -> None:
    source = path_of("run/trainer_w2")
    with pytest.raises(LossError, match="it is of rank 1, and 1 ranks have no file for it"):
        convert(source, tmp_path / "checkpoint-4", producer="trainer", to_world=1)
    convert(source, tmp_path / "checkpoint-4", producer="trainer", to_world=1, exclude="rng.rank1.*", check=True)
    found = load(tmp_path / "checkpoint-4/rng_state.pth")
    assert_same(found, load(Path(source) / "checkpoint-4/rng_state_0.pth"))


def test_generators_under_the_names_of_another_framework(tmp_path: Path) -> None:
    convert(path_of("run/verl_fsdp2_w2"), tmp_path / "a", producer="accelerate", check=True)
    for rank, expected in enumerate(reference("run/verl_fsdp2_w2")["rng_by_rank"]):
        found = load(tmp_path / f"a/random_states_{rank}.pkl")
        names = {"random_state": "random", "numpy_random_seed": "numpy", "torch_manual_seed": "cpu"}
        assert_same(found, {name: expected[theirs] for name, theirs in names.items()})


def test_how_many_batches_were_gathered_is_left_out_when_it_is_none(tmp_path: Path) -> None:
    """accelerate keeps it with the generators; another framework has no place for it."""
    source = path_of("run/accelerate_fsdp2_sharded_w2")
    drop = ("scaler", "sampler", "other")
    made = convert(source, tmp_path / "global_step_6", producer="verl", drop=drop, check=True)
    assert not [name for name in made.dropped if name.startswith("rng")]
    with pytest.raises(LossError, match=r"`data.pt` is beside `actor/`"):
        convert(source, tmp_path / "actor", producer="verl", drop=drop)
    own = torch.load(path_of("run/accelerate_fsdp2_sharded_w2") + "/random_states_0.pkl", weights_only=False)
    torch.save({"model": {"w": torch.ones(4, 2)}, "rng": {**own, "step": 3}}, tmp_path / "state.pt")
    with pytest.raises(LossError, match=r"1 entry would be lost \(`rng.step`\)"):
        convert(tmp_path / "state.pt", tmp_path / "checkpoint-1", producer="trainer")


def test_attributes_of_dicts_are_kept(tmp_path: Path) -> None:
    state = nn.BatchNorm1d(3).state_dict()  # of version 2, which is worth saying
    torch.save({"model": state}, tmp_path / "state.pt")
    made = convert(tmp_path / "state.pt", tmp_path / "a", producer="accelerate:full", check=True)
    assert load(tmp_path / "a/pytorch_model_fsdp.bin")._metadata == state._metadata  # type: ignore[attr-defined]
    assert not [note for note in made.notes if "attributes" in note]


def test_tensors_inside_objects_go_with_them(tmp_path: Path) -> None:
    arguments = argparse.Namespace(weights=torch.arange(3.0))
    state = {"model": {"w": torch.ones(2)}, "training_args": arguments, "step": 5}
    torch.save(state, tmp_path / "state.pt")
    convert(tmp_path / "state.pt", tmp_path / "checkpoint-5", producer="trainer", check=True)
    assert_same(vars(load(tmp_path / "checkpoint-5/training_args.bin")), vars(arguments))


def test_a_model_that_is_split(tmp_path: Path) -> None:
    convert(path_of("run/trainer"), tmp_path / "checkpoint-4", producer="trainer", max_shard_size=2000, check=True)
    names = sorted(p.name for p in (tmp_path / "checkpoint-4").glob("model*"))
    assert names[-1] == "model.safetensors.index.json" and len(names) == 3
    weights = [load(tmp_path / "checkpoint-4" / name) for name in names[:-1]]
    assert_same(weights[0] | weights[1], load(Path(path_of("run/trainer")) / "checkpoint-4/model.safetensors"))


def test_nothing_to_split(tmp_path: Path) -> None:
    source = path_of("run/trainer_fsdp2_w2")
    made = convert(source, tmp_path / "checkpoint-4", producer="trainer", max_shard_size="1GB")
    assert "`--max-shard-size` has no effect: no component is a safetensors file" in made.notes


def test_ids_in_the_order_of_the_model(tmp_path: Path) -> None:
    """FSDP1 with flat parameters has them unit by unit; verl makes its optimizer of `model.parameters()`."""
    tensor_class = "dtensor:cpu:fsdp"
    source, out = path_of("run/verl_fsdp1_w2"), tmp_path / "global_step_3"
    made = convert(source, out, producer="verl", tensor_class=tensor_class, check=True)
    assert not [note for note in made.notes if "ids" in note]
    ref = reference("run/verl_fsdp1_w2")
    with simulated_ranks.as_rank(0, 2):
        model = load(out / "actor/model_world_size_2_rank_0.pt")
        optim = load(out / "actor/optim_world_size_2_rank_0.pt")
    names = [name for name in model if name != "lm_head.weight"]
    for number, name in enumerate(names):
        moment = optim["state"][number]["exp_avg"]
        assert_same(moment.to_local(), ref["optim"]["state"][name]["exp_avg"].chunk(2)[0], name)


def test_the_layouts_of_accelerate_hold_the_same(tmp_path: Path) -> None:
    source = path_of("run/accelerate_fsdp2_sharded_w2")
    expected = pieces(Path(source))
    convert(source, tmp_path / "full", producer="accelerate:full", check=True)
    found = pieces(tmp_path / "full")
    assert_same(found["pytorch_model_fsdp.bin"], expected["pytorch_model_fsdp_0"]["model"])
    assert_same(found["optimizer.bin"], expected["optimizer_0"]["optimizer"])
    convert(tmp_path / "full", tmp_path / "again", producer="accelerate:sharded", to_world=2, check=True)
    assert_same(pieces(tmp_path / "again"), expected)


def test_a_plan_lists_the_pieces(tmp_path: Path) -> None:
    made = convert(path_of("rank/fsdp1_w2"), tmp_path / "out", producer="accelerate", drop="step", dry_run=True)
    assert not (tmp_path / "out").exists()
    assert [name for name, _ in made.files] == [
        "pytorch_model_fsdp_0/__0_0.distcp", "pytorch_model_fsdp_0/__1_0.distcp",
        "optimizer_0/__0_0.distcp", "optimizer_0/__1_0.distcp",
    ]  # fmt: skip
    assert made.dropped == ["step"]


def test_what_has_no_place_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(LossError, match=r"`step`.*accelerate stores no such value"):
        convert(path_of("rank/fsdp1_w2"), tmp_path / "out", producer="accelerate")
    assert not (tmp_path / "out").exists()


def test_generators_of_ranks_that_will_not_be_there(tmp_path: Path) -> None:
    source = path_of("run/accelerate_fsdp2_sharded_w2")
    with pytest.raises(LossError, match="it is of rank 1, and 1 ranks have no file for it"):
        convert(source, tmp_path / "out", producer="accelerate", to_world=1)
    made = convert(source, tmp_path / "out", producer="accelerate", to_world=4)
    assert "no states of random number generators for ranks 2-3" in made.notes
    made = convert(path_of("run/verl_fsdp2_w2"), tmp_path / "global_step_3", producer="verl", to_world=4, check=True)
    said = [note for note in made.notes if "rng" in note or "generators" in note]
    assert len(said) == 1 and said[0].startswith("`actor/extra_state_world_size_4_rank_*.pt`: the files of ranks 2-3")


@pytest.mark.parametrize("flag", [{"to": "dcp"}, {"tensor_class": "dtensor"}, {"max_shard_size": "1GB"}])
def test_flags_that_do_not_go_together(tmp_path: Path, flag: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        convert(path_of("rank/fsdp1_w2"), tmp_path / "out", producer="accelerate", **flag)


def test_flags_that_do_not_go_with_verl(tmp_path: Path) -> None:
    for flag in ({"tensor_class": "sharded_tensor"}, {"to_world": 1}, {"optim_keys": "fqn"}):
        with pytest.raises(UsageError):
            convert(path_of("run/verl_fsdp2_w2"), tmp_path / "global_step_3", producer="verl", **flag)
    assert not any(tmp_path.iterdir())


def test_a_layout_that_is_none(tmp_path: Path) -> None:
    for name, row in (("lightning", "Lightning"), ("megatron", "Megatron Core"), ("OLMo", "OLMo"), ("torchtune",) * 2):
        with pytest.raises(UsageError, match=f"the layout of {row} is read, and not written") as caught:
            convert(path_of("rank/fsdp1_w2"), tmp_path / "x", producer=name)
        assert "`--producer PATH`" in str(caught.value.hint)
    with pytest.raises(UsageError, match="no layout of a producer is called `dcp`") as caught:
        convert(path_of("rank/fsdp1_w2"), tmp_path / "out", producer="dcp")
    assert "`--to dcp`" in str(caught.value.hint)
    with pytest.raises(UsageError, match="no layout of a producer is called `acelerate`") as caught:
        convert(path_of("rank/fsdp1_w2"), tmp_path / "out", producer="acelerate")
    assert "accelerate" in str(caught.value.hint)


def test_what_was_written_is_known_again(tmp_path: Path) -> None:
    """Also without the generators that accelerate always saves."""
    for producer in ("accelerate:ddp", "accelerate:sharded", "accelerate:full"):
        convert(path_of("rank/fsdp1_w2"), tmp_path / producer, producer=producer, drop="step")
        assert inspect(tmp_path / producer).facts["producer"] == "accelerate"


def test_a_layout_is_replaced_like_any_checkpoint(tmp_path: Path) -> None:
    for _ in range(2):
        convert(path_of("run/accelerate_ddp_w2"), tmp_path / "out", producer="accelerate", overwrite=True)
    entries = inspect(tmp_path / "out").entries
    assert sum(isinstance(entry, Tensor) for entry in entries.values()) == 29


def named_parameters(folder: Path) -> list[tuple[str, list[int]]]:
    """Of the model that left the Trainer's checkpoint, as transformers makes it."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return [(name, list(parameter.shape)) for name, parameter in model.named_parameters()]


@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_a_model_that_once_was_sorted_orders_nothing(tmp_path: Path, to: str) -> None:
    """The groups are in the order of the model; the model that came out of safetensors is not, in any format."""
    source = Path(path_of("run/trainer")) / "checkpoint-4"
    (tmp_path / "order.json").write_text(json.dumps(named_parameters(source)))
    named, shapes = tmp_path / "named", str(tmp_path / "order.json")
    convert(source, named, to=to, optim_keys="fqn", shapes=shapes)
    for folder, hint in (("a", None), ("b", shapes)):
        made = convert(named, tmp_path / folder / "checkpoint-4", producer="trainer", shapes=hint, check=True)
        assert_same(load(tmp_path / folder / "checkpoint-4/optimizer.pt"), load(source / "optimizer.pt"))
        assert not [note for note in made.notes if "numbered" in note]


def test_ids_where_nobody_knows_the_order(tmp_path: Path) -> None:
    """Model and group sorted by name; the order that `--shapes` has wins, and it is said."""
    order = ("q.weight", "k.weight", "v.weight", "norm.weight")
    names = sorted(order)
    state = {
        "model": {name: torch.ones(2) for name in names},
        "optimizer": {
            "state": {name: {"exp_avg": torch.full((2,), float(order.index(name)))} for name in names},
            "param_groups": [{"lr": 0.1, "params": names}],
        },
        "step": 4,
    }
    torch.save(state, tmp_path / "state.pt")
    out = tmp_path / "checkpoint-4"
    with pytest.raises(UsageError, match="sorted by name") as caught:
        convert(tmp_path / "state.pt", out, producer="trainer")
    assert "--shapes" in str(caught.value.hint) and not out.exists()
    (tmp_path / "order.json").write_text(json.dumps([(name, [2]) for name in order]))
    made = convert(tmp_path / "state.pt", out, producer="trainer", shapes=str(tmp_path / "order.json"))
    assert [note for note in made.notes if "numbered in the order of `--shapes`" in note]
    found = load(out / "optimizer.pt")["state"]
    assert [float(found[i]["exp_avg"][0]) for i in range(4)] == [0, 1, 2, 3]
    (tmp_path / "order.json").write_text(json.dumps([(name, [2]) for name in order[1:]]))
    with pytest.raises(UsageError, match=r"does not list `q\.weight`"):
        convert(tmp_path / "state.pt", tmp_path / "b", producer="trainer", shapes=str(tmp_path / "order.json"))
