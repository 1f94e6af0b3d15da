"""DeepSpeed's directories of runs with pipeline and tensor parallelism, and what a script leaves in `client_state`.

`ds_to_universal` copies the model states of all model-parallel ranks, with the shapes that each has, and writes
parameters whole. The directories here are put together as it does (`checkpoint/ds_to_universal.py` of DeepSpeed 0.19).
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from formats.test_deepspeed import RUNS, change, converted, copied, expected, parameters_of, require_same
from torch.optim.lr_scheduler import CosineAnnealingLR

import ckpttool
from ckpttool.errors import CorruptError, ReadError

PIPELINE = "pipeline_zero1_w4"
STAGE_1 = "bf16_zero_pp_rank_{}_mp_rank_01_optim_states.pt"


def universal_pipeline(folder: Path) -> Path:
    """What `ds_to_universal` makes of the sample: no files of layers, and so no buffers and frozen parameters."""
    source, wanted = RUNS / PIPELINE / "saved" / "global_step2", expected(PIPELINE)
    out = folder / "global_step2_universal"
    for name, weight in wanted["weights"].items():
        (out / "zero" / name).mkdir(parents=True)
        torch.save(torch.tensor(2.0), out / "zero" / name / "step.pt")
        for kind, value in {"fp32": weight, **wanted["moments"][name]}.items():
            torch.save({"cat_dim": 0, "param": value}, out / "zero" / name / f"{kind}.pt")
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0]}]
    torch.save({"param_groups": groups, "ds_version": "0.19.8"}, out / "zero" / "optimizer_state.pt")
    for file in source.glob("mp_rank_*"):
        shutil.copy(file, out)
    return out


def test_a_universal_checkpoint_of_a_pipeline(tmp_path: Path) -> None:
    path, wanted = universal_pipeline(tmp_path), expected(PIPELINE)
    state, catalogue = converted(path, tmp_path), ckpttool.inspect(path)
    assert state["model"].keys() == wanted["weights"].keys()
    require_same(state["model"], wanted["weights"])
    for name, kinds in wanted["moments"].items():
        require_same(state["optimizer"]["state"][name], kinds)
    assert sorted(state["optimizer"]["param_groups"][0]["params"]) == sorted(wanted["moments"])
    assert catalogue.facts["layout"] == "universal, 2 data-parallel ranks before x 2 model-parallel ranks"
    assert any("nor what was not trained: `1.seen`, `3.seen`" in str(w) for w in catalogue.warnings), catalogue.warnings
    # And what is written of it is of one model-parallel rank.
    for producer, world in (("zero2", 3), ("zero3", 2), ("universal", None)):
        out = tmp_path / producer
        ckpttool.convert(path, out, producer=f"deepspeed:{producer}", to_world=world, check=True)
        after = converted(out, tmp_path, overwrite=True)
        require_same(parameters_of(after), parameters_of(state))
        assert after["checkpoint_parallel_dimensions"] == {"pp_degree": 1, "tp_degree": 1}
    (path / "mp_rank_01_model_states.pt").unlink()
    with pytest.raises(CorruptError, match="the weights file of `rank 2` is missing: 4 ranks"):
        ckpttool.convert(path, tmp_path / "b.pt")


CUT = {"up.weight": ((4, 5), (3, 5)), "up.bias": ((4,), (3,)), "down.weight": ((5, 4), (5, 3))}


def universal_tensor_parallel(folder: Path) -> Path:
    """A universal checkpoint whose run had two tensor-parallel ranks: parameters are whole, `param_shapes` are not."""
    out = folder / "global_step2_universal"
    ckpttool.convert(RUNS / "zero2_w3" / "saved", out, producer="deepspeed:universal")
    (out / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    module = torch.load(RUNS / "zero2_w3/saved/global_step2/mp_rank_00_model_states.pt", weights_only=False)["module"]
    shutil.copy(out / "mp_rank_00_model_states.pt", out / "mp_rank_01_model_states.pt")
    for rank in range(2):

        def by(tree: Any, rank: int = rank) -> None:
            tree["checkpoint_parallel_dimensions"] = {"pp_degree": 1, "tp_degree": 2}
            tree["module"] = {name: module[name] for name in ("seen", "frozen")}
            for group in tree["param_shapes"]:
                group.update((name, torch.Size(CUT[name][rank])) for name in group if name in CUT)

        change(out / f"mp_rank_0{rank}_model_states.pt", by)
    return out


def test_a_universal_checkpoint_of_tensor_parallelism(tmp_path: Path) -> None:
    path, wanted = universal_tensor_parallel(tmp_path), expected("zero2_w3")
    state = converted(path, tmp_path)
    require_same(state["model"], {name: wanted["weights"][name] for name in wanted["moments"]})
    for name, kinds in wanted["moments"].items():
        require_same(state["optimizer"]["state"][name], kinds)
    change(path / "mp_rank_01_model_states.pt", lambda tree: tree["module"]["seen"].add_(1))
    with pytest.raises(CorruptError, match=r"`model.seen` differs between ranks that should have the same"):
        ckpttool.convert(path, tmp_path / "b.pt")
    file = path / "zero" / "up.weight" / "exp_avg.pt"
    torch.save({"cat_dim": 0, "param": torch.zeros(7, 6)}, file)
    with pytest.raises(CorruptError, match=r"has \[7, 6\], but `param_shapes` \[4, 5\]"):
        ckpttool.convert(path, tmp_path / "b.pt")


def _drifted(state: Any) -> None:
    state["single_partition_of_fp32_groups"][0].data[3] += 1


def _drifted_moments(state: Any) -> None:
    state["base_optimizer_state"]["state"][0]["exp_avg"][3] += 1


@pytest.mark.parametrize(("by", "what"), [(_drifted, "the weights of group 0"), (_drifted_moments, "exp_avg")])
def test_tied_parameters_are_the_same_in_all_stages(by: Callable[[Any], None], what: str, tmp_path: Path) -> None:
    path = copied(PIPELINE, tmp_path)
    change(path / STAGE_1.format(0), by)
    text = f"{what} of `tied_modules.embed.weight`, which is tied, are not the same in two stages of the pipeline"
    with pytest.raises(CorruptError, match=text):
        ckpttool.convert(path, tmp_path / "out.pt")
    faults = [str(fault) for fault in ckpttool.inspect(path).faults]
    assert len(faults) == 1 and STAGE_1.format(0) in faults[0], faults


def test_what_is_refused_by_its_own_name(tmp_path: Path) -> None:
    path = copied("zero2_w3", tmp_path)
    change(path / "mp_rank_00_model_states.pt", lambda tree: tree.update(ds_autoep_layers=[{"ep_size": 2}]))
    with pytest.raises(ReadError, match="experts of AutoEP, not read") as caught:
        ckpttool.inspect(path)
    assert "ds_to_universal.py" in str(caught.value.hint)
    # A pipeline of which no file of a layer is left is called what it looks like.
    path = copied(PIPELINE, tmp_path / "pipeline")
    for file in path.glob("layer_*"):
        file.unlink()
    with pytest.raises(ReadError, match="no file is of a pipeline's layers"):
        ckpttool.inspect(path)
    path = copied("zero3_w3", tmp_path / "experts")
    shutil.copy(
        path / "zero_pp_rank_0_mp_rank_00_model_states.pt", path / "layer_0_expert_0_mp_rank_00_model_states.pt"
    )
    with pytest.raises(CorruptError, match="files of experts beside those of ZeRO 3"):
        ckpttool.inspect(path)


# What a script leaves -------------------------------------------------------------------------------------------------


def of_a_script() -> dict[str, Any]:
    """Under names that say nothing: what they are is what they hold."""
    optimizer = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters(), lr=0.5)
    schedule, scaler = CosineAnnealingLR(optimizer, 10), torch.amp.GradScaler("cpu", init_scale=512.0)
    generators = {"python": random.Random(3).getstate(), "torch": torch.arange(16, dtype=torch.uint8)}
    position = {"_snapshot": {"_snapshot_step": 4}, "_steps_since_snapshot": 0, "_iterator_finished": False}
    return {
        "amp": scaler.state_dict(),
        "plan": schedule.state_dict(),
        "rng_state": generators,
        "train_loader": position,
        "epoch": 3,
        "lr_scheduler": None,
    }


def test_client_state_comes_through(tmp_path: Path) -> None:
    """Through a DCP directory, and back into every stage of ZeRO; a schedule that the script steps stays its own."""
    given = of_a_script()
    path = copied("zero2_w3", tmp_path)
    change(path / "mp_rank_00_model_states.pt", lambda tree: tree.update(given))
    ckpttool.reshard(path, tmp_path / "dcp", to_world=2)
    for source in (path, tmp_path / "dcp"):
        kinds = {entry.path[0]: entry.part.kind for entry in ckpttool.inspect(source).entries.values()}
        assert [kinds[key] for key in ("amp", "plan", "rng_state", "train_loader", "epoch")] == [
            "scaler", "scheduler", "rng", "dataloader", "progress",
        ]  # fmt: skip
    for producer, world in (("zero1", 2), ("zero3", 3), ("universal", None)):
        out = tmp_path / producer
        ckpttool.convert(tmp_path / "dcp", out, producer=f"deepspeed:{producer}", to_world=world)
        states = torch.load(next(out.rglob("*mp_rank_00_model_states.pt")), weights_only=False)
        for key, value in given.items():
            if key == "rng_state":
                assert states[key]["torch"].equal(value["torch"]) and states[key]["python"] == value["python"]
            else:
                assert states[key] == value, (producer, key)
