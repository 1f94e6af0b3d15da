"""An export has the names that `save_pretrained` writes, whatever transformers calls the tensors in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support import tiny_models
from support.weights_read import same, weights_in

import ckpttool
from ckpttool import errors
from ckpttool.layout.key_maps import parse
from ckpttool.models import key_maps, written_names
from ckpttool.models.written_names import WrittenNames

# Model type, class and number of layers that it takes for one of each kind.
MODELS = {
    "dinov2": ("Dinov2ForImageClassification", 2),
    "inkling2_text": ("Inkling2TextModel", 2),  # gate and up are interleaved in files
    "gpt_neox": ("GPTNeoXForCausalLM", 2),
    "jamba": ("JambaForCausalLM", 5),
    "molmo2_text": ("Molmo2TextModel", 2),  # query, key and value are one tensor in files
    "phimoe": ("PhimoeForCausalLM", 2),
    "qwen3_next": ("Qwen3NextForCausalLM", 4),
    "segformer": ("SegformerForSemanticSegmentation", 2),
    "step3p7": ("Step3p7Model", 2),  # query and key in a fused tensor have their rows in another order
    "vit": ("ViTForImageClassification", 2),
}


def made(model_type: str, folder: Path) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """A checkpoint with the names in memory, the directory of its config, and what `save_pretrained` writes of it."""
    name, layers = MODELS[model_type]
    small = {"hidden_sizes": [8, 16, 24, 32], "decoder_hidden_size": 16} if model_type == "segformer" else {}
    torch.manual_seed(5)
    model = getattr(transformers, name)(tiny_models.config(model_type, layers, **small))
    model.save_pretrained(folder / "theirs")
    torch.save({"model": model.state_dict()}, folder / "memory.pt")
    config = json.loads((folder / "theirs" / "config.json").read_text())
    # Without a class transformers is not asked, which takes seconds, and what is written is by the key map alone.
    del config["architectures"]
    (folder / "base").mkdir()
    (folder / "base" / "config.json").write_text(json.dumps(config))
    return folder / "memory.pt", folder / "base", load_file(folder / "theirs" / "model.safetensors")


@pytest.mark.parametrize("model_type", MODELS)
def test_names_are_those_that_save_pretrained_writes(model_type: str, tmp_path: Path) -> None:
    source, base, expected = made(model_type, tmp_path)
    done = ckpttool.export(source, tmp_path / "out", assets=base)
    assert done.key_map == f"{model_type}-transformers"
    assert same(weights_in(tmp_path / "out"), expected)
    # They are released names now, and stay.
    again = ckpttool.export(tmp_path / "out", tmp_path / "again")
    assert again.key_map == ""
    assert same(weights_in(tmp_path / "again"), expected)


def test_names_in_memory_stay_where_they_are_asked_for(tmp_path: Path) -> None:
    source, base, _ = made("vit", tmp_path)
    done = ckpttool.export(source, tmp_path / "out", assets=base, names="memory")
    assert done.key_map == ""
    assert same(weights_in(tmp_path / "out"), torch.load(source)["model"])
    with pytest.raises(errors.UsageError, match='names="memori'):
        ckpttool.export(source, tmp_path / "other", assets=base, names="memori")


@pytest.mark.parametrize(
    ("model_type", "prefix", "names"),
    [
        # The names in memory are not those of files, and a head is tied.
        ("ernie4_5_moe", "net.", "released"),
        pytest.param("ernie4_5_moe", "net.", "memory", marks=pytest.mark.long),
        # transformers would load `model.model.layers.0` itself, which others do not.
        pytest.param("llama", "model.", "released", marks=pytest.mark.long),
        pytest.param("bert", "model.", "released", marks=pytest.mark.long),
    ],
)
def test_what_lightning_puts_before_the_names_is_removed(
    model_type: str, prefix: str, names: str, tmp_path: Path
) -> None:
    model = tiny_models.made(model_type)
    model.save_pretrained(tmp_path / "theirs")
    state = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    torch.save({"state_dict": state, "epoch": 1, "global_step": 4}, tmp_path / "a.ckpt")
    done = ckpttool.export(tmp_path / "a.ckpt", tmp_path / "out", assets=tmp_path / "theirs", names=names)
    assert any(f"`{prefix}` is removed" in note for note in done.notes)
    written = load_file(tmp_path / "theirs" / "model.safetensors")
    assert same(weights_in(tmp_path / "out"), written if names == "released" else tiny_models.written(model))
    _, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())


@pytest.mark.parametrize("by", ["config", "reference"])
def test_a_module_of_the_models_own_is_no_wrapper(by: str, tmp_path: Path) -> None:
    sizes = {"hidden_sizes": [16, 16, 16], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1], "key_dim": [4, 4, 4]}
    model = transformers.LevitModel(transformers.LevitConfig(image_size=64, **sizes))
    model.save_pretrained(tmp_path / "theirs")
    state = {f"module._orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    assert any(".module." in name.removeprefix("module.") for name in state)
    torch.save({"model": state}, tmp_path / "a.pt")
    given = {"assets" if by == "config" else "like": tmp_path / "theirs"}
    ckpttool.export(tmp_path / "a.pt", tmp_path / "out", **given)
    assert same(weights_in(tmp_path / "out"), load_file(tmp_path / "theirs" / "model.safetensors"))


def test_check_knows_both_spellings(tmp_path: Path) -> None:
    source, base, _ = made("vit", tmp_path)
    ckpttool.export(source, tmp_path / "memory", assets=base, names="memory")
    released = ckpttool.check(source, tmp_path / "theirs")
    memory = ckpttool.check(source, tmp_path / "memory")
    assert (released.verdict, released.key_map) == ("fits", "vit-transformers")
    assert (memory.verdict, memory.key_map) == ("fits", "")


def test_a_class_has_a_map_of_its_own_where_it_differs() -> None:
    names = ["beit.embeddings.cls_token"]
    by_type = key_maps.chosen(None, names, {"model_type": "beit"})
    by_class = key_maps.chosen(None, names, {"model_type": "beit", "architectures": ["BeitBackbone"]})
    assert (by_type and by_type.name, by_class and by_class.name) == (None, "BeitBackbone-transformers")


@pytest.mark.parametrize("kind", ["../llama-meta", "transformers/vit", "", None, "nothing"])
def test_a_model_type_is_no_path(kind: Any) -> None:
    assert key_maps.generated(kind) is None


def test_what_changes_under_its_name_is_not_changed_twice() -> None:
    same = {"from": "experts.{n}.up", "to": "experts.{n}.up", "operations": [{"transpose": [0, 1]}]}
    head = {"generated": {"transformers": "5"}}
    alone = parse({**head, "rules": [same]}, "alone")
    with_other = parse({**head, "rules": [same, {"from": "norm.w", "to": "norm.weight"}]}, "with_other")
    assert not alone.fits(["experts.0.up"], {})
    assert with_other.fits(["experts.0.up", "norm.w"], {})
    assert not with_other.fits(["experts.0.up", "norm.weight"], {})


def test_heads_of_several_sizes_are_named() -> None:
    sizes = {"q_proj": 32, "k_proj": 16, "v_proj": 16}
    facts = {"num_attention_heads": 4, "num_key_value_heads": 2}
    parts = ["num_attention_heads", "num_key_value_heads", "num_key_value_heads"]
    assert written_names._concat(0, sizes, facts) == {"axis": 0, "parts": parts}
    assert written_names._concat(0, dict.fromkeys(sizes, 8), {}) == 0
    for unlike in ({"num_attention_heads": 8, "num_key_value_heads": 2}, {}):
        with pytest.raises(NotImplementedError, match="nothing says"):
            written_names._concat(0, sizes, unlike)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"a.0.w": "b.0.w", "a.1.w": "b.1.w"}, [{"from": "a.{n}.w", "to": "b.{n}.w"}]),
        # A number that means another name is said for each.
        ({"m.0.w": "up.w", "m.2.w": "down.w"}, [{"from": "m.0.w", "to": "up.w"}, {"from": "m.2.w", "to": "down.w"}]),
        ({"a.0.b.1.w": "c.1.0.w", "a.1.b.0.w": "c.0.1.w"}, [{"from": "a.{n}.b.{m}.w", "to": "c.{m}.{n}.w"}]),
        # Those that stay as they are need no rule, and are under none.
        ({"a.0.w": "a.0.w", "a.1.w": "b.w"}, [{"from": "a.1.w", "to": "b.w"}]),
        ({"a.0.w": "b.{e}.0.w", "a.1.w": "b.{e}.1.w"}, [{"from": "a.{n}.w", "to": "b.{e}.{n}.w"}]),
    ],
)
def test_rules_are_as_few_as_there_can_be(written: dict[str, str], expected: list[dict[str, str]]) -> None:
    assert written_names.rules(WrittenNames((old,), (new,)) for old, new in written.items()) == expected
