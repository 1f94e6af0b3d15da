"""Safetensors files beside a model: another form of it, or a part of their own; none is left out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.paths import CHECKPOINTS
from transformers import MistralConfig, MistralForCausalLM

import ckpttool
from ckpttool.errors import ReadError

State = dict[str, torch.Tensor]


def saved(folder: Path, *, indexed: bool = False, config: bool = True) -> State:
    """Write a model as transformers does, and return its state dict."""
    folder.mkdir()
    state = {"model.embed.weight": torch.randn(8, 4), "lm_head.weight": torch.randn(8, 4)}
    if config:
        (folder / "config.json").write_text('{"architectures": ["Net"]}')
    if not indexed:
        save_file(state, folder / "model.safetensors")
        return state
    names = {name: f"model-0000{i}-of-00002.safetensors" for i, name in enumerate(state, 1)}
    for name, file in names.items():
        save_file({name: state[name]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return state


def converted(folder: Path, out: Path) -> State:
    ckpttool.convert(folder, out, to="torch")
    with ckpttool.open(out) as checkpoint:
        return {name: checkpoint[name].torch() for name in checkpoint}


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("config", [False, True])
def test_an_average_beside_a_model_is_read(indexed: bool, config: bool, tmp_path: Path) -> None:
    state = saved(tmp_path / "ckpt", indexed=indexed, config=config)
    average = {name: tensor + 0.5 for name, tensor in state.items()}
    save_file(average, tmp_path / "ckpt" / "ema.safetensors")
    found = converted(tmp_path / "ckpt", tmp_path / "out.pt")
    expected = {f"model.{name}": tensor for name, tensor in state.items()}
    expected |= {f"ema.{name}": tensor for name, tensor in average.items()}
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("stem", ["model", "diffusion_pytorch_model"])
def test_a_model_in_another_dtype_is_the_model(stem: str, tmp_path: Path) -> None:
    state = saved(tmp_path / "ckpt")
    half = {name: tensor.half() for name, tensor in state.items()}
    (tmp_path / "ckpt" / "model.safetensors").rename(tmp_path / "ckpt" / f"{stem}.safetensors")
    save_file(half, tmp_path / "ckpt" / f"{stem}.fp16.safetensors")
    assert converted(tmp_path / "ckpt", tmp_path / "out.pt").keys() == state.keys()
    assert [finding.kind for finding in ckpttool.verify(tmp_path / "ckpt").findings] == ["remark"]
    # One that was not rounded from it is a part of its own.
    save_file(half | {"lm_head.weight": half["lm_head.weight"] + 1}, tmp_path / "ckpt" / f"{stem}.fp16.safetensors")
    assert len(converted(tmp_path / "ckpt", tmp_path / "other.pt")) == 4


def in_the_form_of_mistral(state: State, config: MistralConfig) -> State:
    """The inverse of `convert_state_dict` in transformers' convert_mistral_weights_to_hf.py (4.57)."""

    def permuted(tensor: torch.Tensor, heads: int) -> torch.Tensor:
        rows, columns = tensor.shape
        return tensor.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns).contiguous()

    names = {
        "model.embed_tokens": "tok_embeddings",
        "lm_head": "output",
        "model.": "",
        "self_attn": "attention",
        "q_proj": "wq",
        "k_proj": "wk",
        "v_proj": "wv",
        "o_proj": "wo",
        "mlp": "feed_forward",
        "gate_proj": "w1",
        "down_proj": "w2",
        "up_proj": "w3",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    result = {}
    for name, tensor in state.items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        result[name] = permuted(tensor, heads) if heads else tensor
    return result


@pytest.fixture(scope="module")
def mistral() -> MistralForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "vocab_size": 32}
    return MistralForCausalLM(MistralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=4))


def test_a_model_as_its_authors_keep_it_is_the_model(mistral: MistralForCausalLM, tmp_path: Path) -> None:
    mistral.save_pretrained(tmp_path / "ckpt", max_shard_size="8KB")
    state = mistral.state_dict()
    theirs = in_the_form_of_mistral(state, mistral.config)
    assert not theirs.keys() & state.keys()
    save_file(theirs, tmp_path / "ckpt" / "consolidated.safetensors")
    catalogue = ckpttool.inspect(tmp_path / "ckpt")
    text = "`consolidated.safetensors` has the tensors of the model under other names, and is not read"
    assert [str(warning) for warning in catalogue.warnings] == [text]
    found = converted(tmp_path / "ckpt", tmp_path / "out.pt")
    assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)
    # Of another step, with one tensor more, or with one less, it is read.
    name = "layers.1.attention.wq.weight"
    for other in (
        theirs | {name: theirs[name] * 1.01},
        theirs | {"head": torch.ones(3)},
        {key: tensor for key, tensor in theirs.items() if key != name},
    ):
        save_file(other, tmp_path / "ckpt" / "consolidated.safetensors")
        found = converted(tmp_path / "ckpt", tmp_path / "another.pt")
        assert {f"model.{key}" for key in state} | {f"consolidated.{key}" for key in other} == found.keys()
        assert all(torch.equal(found[f"consolidated.{key}"], other[key]) for key in other)
        (tmp_path / "another.pt").unlink()


def test_pieces_of_tensors_beside_whole_ones_are_refused(tmp_path: Path) -> None:
    """The pieces were left out, whatever the file beside them held."""
    folder = Path(shutil.copytree(CHECKPOINTS / "hf/consolidated_w2/ckpt" / "sharded", tmp_path / "ckpt"))
    save_file({"w": torch.ones(4)}, folder / "ema.safetensors")
    with pytest.raises(ReadError, match=r"has pieces of tensors, `shard-0.*, beside whole ones, `ema\.safetensors`"):
        ckpttool.inspect(folder)


@pytest.mark.parametrize("equal", [True, False])
def test_pieces_of_a_model_that_was_joined(equal: bool, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(CHECKPOINTS / "hf/consolidated_w2/ckpt", tmp_path / "ckpt"))
    save_file({"w": torch.ones(4)}, folder / "ema.safetensors")
    files = list(folder.glob("model*.safetensors"))
    if not equal:
        state = load_file(files[0])
        name = next(name for name, tensor in state.items() if tensor.ndim and tensor.is_floating_point())
        save_file(state | {name: state[name] + 1}, files[0])
    roots = {tensor.path[0] for tensor in ckpttool.inspect(folder).tensors}
    assert roots == ({"model", "ema"} if equal else {"model", "ema", "sharded"})


def test_a_file_beside_a_training_state_is_read(tmp_path: Path) -> None:
    """It was left out without a word."""
    torch.save({"model": {"w": torch.ones(4)}, "optimizer": {"state": {0: {"m": torch.zeros(4)}}}}, tmp_path / "a.pt")
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "ckpt", to="safetensors")
    assert (tmp_path / "ckpt" / "ckpttool.json").is_file()
    before = converted(tmp_path / "ckpt", tmp_path / "before.pt")
    save_file({"w": torch.full((4,), 2.0)}, tmp_path / "ckpt" / "best.safetensors")
    found = converted(tmp_path / "ckpt", tmp_path / "out.pt")
    assert found.keys() == before.keys() | {"best.w"} and torch.equal(found["best.w"], torch.full((4,), 2.0))


@pytest.mark.parametrize("config", [False, True])
@pytest.mark.parametrize("more", [False, True])
def test_a_shard_of_another_save_is_named(config: bool, more: bool, tmp_path: Path) -> None:
    """What an index does not name, but has the tensors of, is left over; it was passed over in silence beside more."""
    state = saved(tmp_path / "ckpt", indexed=True, config=config)
    save_file({"lm_head.weight": torch.zeros(8, 4)}, tmp_path / "ckpt" / "model-00003-of-00003.safetensors")
    if more:
        save_file(state, tmp_path / "ckpt" / "ema.safetensors")
    assert (
        "`model-00003-of-00003.safetensors` is from another save: `model.safetensors.index.json` does not name it"
    ) in (str(warning).partition(", but")[0] for warning in ckpttool.inspect(tmp_path / "ckpt").warnings)
    assert len(converted(tmp_path / "ckpt", tmp_path / "out.pt")) == 2 * (1 + more)
    save_file({"head": torch.zeros(8, 4)}, tmp_path / "ckpt" / "model-00003-of-00003.safetensors")
    catalogue = ckpttool.inspect(tmp_path / "ckpt")
    assert any("head" in path for path in catalogue.entries) or "model-00003-of-00003" in str(catalogue.faults)
