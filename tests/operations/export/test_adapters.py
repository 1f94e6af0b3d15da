"""Adapters of PEFT, against the files that PEFT 0.21 wrote of the same models (`samples/generators/other_tools.py`)."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool import errors

PEFT = Path(__file__).parents[3] / "samples" / "checkpoints" / "other" / "peft"
METHODS = sorted(path.name for path in PEFT.iterdir() if path.name != "ptuning")


def state_of(method: str) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(PEFT / method / "state.pt")["model"]
    return state


def assets(method: str, folder: Path, **changed: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = json.loads((PEFT / method / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | changed))
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_the_file_is_that_of_save_pretrained(method: str, tmp_path: Path) -> None:
    expected = load_file(PEFT / method / "adapter_model.safetensors")
    base = assets(method, tmp_path / "base")
    torch_dcp.save({"app": {"model": state_of(method)}}, checkpoint_id=tmp_path / "app", no_dist=True)
    for number, source in enumerate((PEFT / method / "state.pt", tmp_path / "app")):
        made = ckpttool.export(source, tmp_path / str(number), assets=base)
        found = load_file(tmp_path / str(number) / "adapter_model.safetensors")
        assert made.adapter and found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("method", METHODS)
def test_what_peft_saved_stays_as_it_is(method: str, tmp_path: Path) -> None:
    expected = load_file(PEFT / method / "adapter_model.safetensors")
    shutil.copytree(PEFT / method, tmp_path / "a", ignore=shutil.ignore_patterns("*.pt"))
    ckpttool.export(tmp_path / "a" / "adapter_model.safetensors", tmp_path / "out", assets=tmp_path / "a")
    assert load_file(tmp_path / "out" / "adapter_model.safetensors").keys() == expected.keys()


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.LossError, match=r"type P_TUNING.*prompt_encoder.default.mlp_head"):
        ckpttool.export(PEFT / "ptuning" / "state.pt", tmp_path / "out", assets=assets("ptuning", tmp_path / "base"))
    state = state_of("ia3")
    names = {name: name.replace("ia3_l.default", "road_theta.default") for name in state}
    torch.save({names[name]: value for name, value in state.items()}, tmp_path / "road.pt")
    with pytest.raises(errors.LossError, match="road_theta"):
        ckpttool.export(tmp_path / "road.pt", tmp_path / "out")
    # What CPT trains is added to the embedding, which was exported alone.
    cpt = {f"prompt_encoder.default.{name}.weight": torch.ones(4, 8) for name in ("embedding", "delta_embedding")}
    torch.save(cpt | {"word_embeddings.weight": torch.ones(9, 8)}, tmp_path / "cpt.pt")
    with pytest.raises(errors.LossError, match="delta_embedding"):
        ckpttool.export(tmp_path / "cpt.pt", tmp_path / "out")
    torch.save(
        {n: v for n, v in state_of("vera").items() if not n.startswith("base_model.vera_")}, tmp_path / "vera.pt"
    )
    with pytest.raises(errors.LossError, match=r"base_model\.vera_A"):
        ckpttool.export(tmp_path / "vera.pt", tmp_path / "out")
    with pytest.raises(errors.LossError, match="rank_pattern"):
        base = assets("adalora", tmp_path / "base", rank_pattern={"x": [True]})
        ckpttool.export(PEFT / "adalora" / "state.pt", tmp_path / "out", assets=base)


def test_a_prompt_encoder_of_a_model_is_no_adapter(tmp_path: Path) -> None:
    names = [
        f"prompt_encoder.{rest}" for rest in ("mask_embed.conv1.weight", "point_embed.weight", "no_mask_embed.bias")
    ]
    names += ["prompt_encoder.shared_embedding.positional_embedding", "prompt_encoder.point_embed.0.weight"]
    torch.save({name: torch.arange(4.0) for name in names}, tmp_path / "sam.pt")
    made = ckpttool.export(tmp_path / "sam.pt", tmp_path / "out")
    assert not made.adapter
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {*names}


@pytest.mark.parametrize(
    ("method", "changed", "found", "expected"),
    [
        ("ia3", {"peft_type": "LORA"}, "IA3", "LORA"),
        ("adalora", {"init_r": 12}, 3, 12),
        ("lora_tokens", {"r": 4}, 2, 4),
        ("lora_tokens", {"trainable_token_indices": None}, None, None),
        ("lora_tokens", {"trainable_token_indices": [1, 2, 3]}, None, [1, 2, 3]),
        ("lora_tokens", {"target_modules": ["q_proj"]}, None, ["q_proj"]),
        ("lora_tokens", {"target_modules": ["q_proj", "v_proj", "o_proj"]}, None, None),
        ("lora_tokens", {"use_dora": True}, False, True),
        ("lora_dora_bias_mts", {"rank_pattern": {}}, 3, 2),
        ("lora_dora_bias_mts", {"modules_to_save": None}, None, []),
        ("lora_tokens", {"modules_to_save": ["lm_head"]}, None, ["lm_head"]),
        ("lora_tokens", {"layers_to_transform": [0]}, [0, 1], [0]),
        ("prompt", {"num_virtual_tokens": 20}, [3], 20),
    ],
)
def test_the_config_of_another_adapter(method: str, changed: Any, found: Any, expected: Any, tmp_path: Path) -> None:
    base = assets(method, tmp_path / "base", **changed)
    with pytest.raises(errors.CorruptError, match="is not the config of this adapter") as caught:
        ckpttool.export(PEFT / method / "state.pt", tmp_path / "out", assets=base)
    assert not (tmp_path / "out").exists()
    assert found is None or caught.value.facts["found"] == found
    assert expected is None or caught.value.facts["expected"] == expected


@pytest.mark.parametrize(("tokens", "is_right"), [(4, True), (5, False)])
def test_what_peft_saved_of_cpt_stays_as_it_is(tokens: int, is_right: bool, tmp_path: Path) -> None:
    """`modules_to_save: null` of its config was called that of another adapter."""
    config = {"peft_type": "CPT", "modules_to_save": None, "num_virtual_tokens": tokens, "task_type": "CAUSAL_LM"}
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config))
    prompt = torch.randn(4, 8)
    save_file({"prompt_embeddings": prompt}, tmp_path / "a" / "adapter_model.safetensors")
    with nullcontext() if is_right else pytest.raises(errors.CorruptError, match="is not the config of this adapter"):
        ckpttool.export(tmp_path / "a", tmp_path / "out")
        found = load_file(tmp_path / "out" / "adapter_model.safetensors")
        assert found["prompt_embeddings"].equal(
            load_file(tmp_path / "a" / "adapter_model.safetensors")["prompt_embeddings"]
        )


def test_a_full_model_with_the_config_of_an_adapter(tmp_path: Path) -> None:
    torch.save({"lm_head.weight": torch.ones(2, 2)}, tmp_path / "a.pt")
    with pytest.raises(errors.CorruptError, match="found no adapter, expected LORA"):
        ckpttool.export(tmp_path / "a.pt", tmp_path / "out", assets=assets("lora_tokens", tmp_path / "base"))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"target_modules": "(.*.*)*x("}, r"the regular expression '\(\.\*\.\*\)\*x\('"),
        ({"rank_pattern": {"(": 3}}, "the regular expression"),
        ({"rank_pattern": [3]}, r"`rank_pattern` is \[3\]"),
        ({"target_modules": [{}]}, r"`target_modules` has \[\{\}\]"),
        ({"target_modules": 3}, "`target_modules` is 3"),
        ({"modules_to_save": [["a"]]}, "`modules_to_save` has"),
        ({"layers_to_transform": ["a"]}, "`layers_to_transform` has"),
        ({"target_modules": "(.+)+[.]no_such"}, "is not the config of this adapter: modules that are no"),
        ({"rank_pattern": {"(.+)+[.]no_such": 3}}, None),
    ],
)
def test_the_config_of_a_stranger(changed: dict[str, Any], why: str | None, tmp_path: Path) -> None:
    base = assets("lora_tokens", tmp_path / "base", **changed)
    if why is None:
        assert ckpttool.export(PEFT / "lora_tokens" / "state.pt", tmp_path / "out", assets=base).adapter
        return
    with pytest.raises(errors.CorruptError, match=why) as caught:
        ckpttool.export(PEFT / "lora_tokens" / "state.pt", tmp_path / "out", assets=base)
    assert str(base) in caught.value.message
