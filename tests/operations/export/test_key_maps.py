"""Key maps against transformers' own weights, and views against numpy."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from support import model_families
from support.simulated_ranks import as_rank, mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpttool
from ckpttool import errors
from ckpttool.catalogue.boxes import row_major, span
from ckpttool.catalogue.dtypes import DTYPES
from ckpttool.catalogue.entries import Catalogue, Chunk, Chunks, Extent, File, Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.layout import views
from ckpttool.layout.assemblies import Assembly
from ckpttool.layout.index_operations import Rows
from ckpttool.models import key_maps as keymaps
from ckpttool.storage.files import Pool
from ckpttool.transfer import read

NAMES = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output", "model.layers": "layers",
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def theirs(name: str) -> str:
    """What Meta and torchtitan call a parameter of Llama."""
    for ours, other in NAMES.items():
        name = name.replace(ours + ".", other + ".")
    return name


def paired(weight: torch.Tensor, head: int) -> torch.Tensor:
    """Halves of a head as neighbours: what the converters of transformers undo for Meta's weights."""
    rows = weight.view(weight.shape[0] // head, 2, head // 2, *weight.shape[1:])
    return rows.transpose(1, 2).reshape(weight.shape).contiguous()


def meta_llama() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A Llama of transformers, and the same under Meta's names, its query and key rows in Meta's order."""
    model = model_families.made("llama")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    turned = {
        theirs(name): paired(value, 8) if "q_proj" in name or "k_proj" in name else value
        for name, value in state.items()
    }
    return state, turned


def permuted_by_transformers(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """`permute` of `convert_llama_weights_to_hf.py` of transformers."""
    rows, width = weight.shape
    return weight.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


def assets(config: Any, folder: Path) -> None:
    """A config without the class, so that no process is started to compare the model with it."""
    folder.mkdir()
    said = {key: value for key, value in config.to_dict().items() if key != "architectures"}
    (folder / "config.json").write_text(json.dumps(said))


def test_the_rows_of_the_test_are_those_that_transformers_converts() -> None:
    weight = torch.arange(32 * 3).view(32, 3)
    assert torch.equal(permuted_by_transformers(paired(weight, 8), 4), weight)


def test_what_torchtitan_saved_of_llama_is_loaded_by_transformers(tmp_path: Path) -> None:
    state, turned = meta_llama()
    torch_dcp.save({**turned, "train_state": {"step": 3}}, checkpoint_id=tmp_path / "step-3", no_dist=True)
    assets(model_families.made("llama").config, tmp_path / "base")
    made = ckpttool.export(tmp_path / "step-3", tmp_path / "out", assets=tmp_path / "base", check=True)
    assert made.key_map == "llama-meta"
    found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert all(torch.equal(value, state[name]) for name, value in found.state_dict().items())


@pytest.mark.parametrize("world", [1, 2, 3])
def test_rows_are_put_in_order_whatever_the_shards(world: int, tmp_path: Path) -> None:
    # Three ranks cut 32 rows at 11 and 22, in the middle of pairs.
    state, turned = meta_llama()
    source = tmp_path / "ranks"
    source.mkdir()
    for rank in range(world):
        with as_rank(rank, world):
            grid = mesh(world)
            sharded = {
                name: distribute_tensor(value, grid, [Shard(0)], src_data_rank=None) for name, value in turned.items()
            }
            torch.save({"model": sharded}, source / f"rank{rank}.pt")
    ckpttool.export(source, tmp_path / "out", head_dim=8, check=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], value) for name, value in state.items())


def test_consolidated_files_of_meta_go_by_their_params(tmp_path: Path) -> None:
    state, turned = meta_llama()
    (tmp_path / "params").mkdir()
    (tmp_path / "params" / "params.json").write_text(json.dumps({"dim": 32, "n_heads": 4}))
    torch.save({**turned, "rope.freqs": torch.ones(4)}, tmp_path / "consolidated.00.pth")
    made = ckpttool.export(tmp_path / "consolidated.00.pth", tmp_path / "out", assets=tmp_path / "params")
    assert "rope.freqs" in made.dropped
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in state.items())


def test_without_the_width_of_a_head_there_is_no_guess(tmp_path: Path) -> None:
    torch.save(meta_llama()[1], tmp_path / "a.pt")
    with pytest.raises(errors.UsageError, match="`head_dim` of the model is unknown") as caught:
        ckpttool.export(tmp_path / "a.pt", tmp_path / "out")
    assert "--head-dim" in (caught.value.hint or "")
    with pytest.raises(errors.UsageError, match="are not a multiple of 12, those of a head"):
        ckpttool.export(tmp_path / "a.pt", tmp_path / "out", head_dim=12)
    made = ckpttool.export(tmp_path / "a.pt", tmp_path / "out", key_map="none")
    assert not made.key_map
    assert "tok_embeddings.weight" in load_file(tmp_path / "out" / "model.safetensors")


def qwen_moe() -> Any:
    torch.manual_seed(3)
    config = transformers.Qwen3MoeConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=3, num_experts_per_tok=2,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)


# What torchtitan called the matrices of the experts, and the output layer, up to 0.2.2, in between, and in 0.3.0.
TITAN_NAMES = {
    "0.2": ("attention.w", "moe.experts.w1", "moe.experts.w2", "moe.experts.w3", "output.", "expert_bias"),
    "0.3.dev": (
        "attention.qkv_linear.w",
        "moe.experts.w1_EFD",
        "moe.experts.w2_EDF",
        "moe.experts.w3_EFD",
        "lm_head.",
        "expert_bias_E",
    ),
    "0.3.0": (
        "attention.qkv_linear.w",
        "moe.routed_experts.inner_experts.w1_EFD",
        "moe.routed_experts.inner_experts.w2_EDF",
        "moe.routed_experts.inner_experts.w3_EFD",
        "lm_head.",
        "expert_bias_E",
    ),
}


def titan_of(model: Any, version: str) -> dict[str, torch.Tensor]:
    """The state dict of a Qwen3 MoE as that version of torchtitan has it: all experts of a layer in one tensor."""
    qkv, w1, w2, w3, output, bias = TITAN_NAMES[version]
    titan = {}
    for name, value in model.state_dict().items():
        name = re.sub(r"attention\.w(?=[qkv]\.)", qkv, theirs(name)).replace("output.", output)
        layer = name.partition(".mlp.")[0]
        if "gate_up" in name:
            titan[f"{layer}.{w1}"], titan[f"{layer}.{w3}"] = value.chunk(2, dim=1)
        elif "experts" in name:
            titan[f"{layer}.{w2}"] = value
            titan[f"{layer}.moe.{bias}"] = torch.ones(len(value))
        else:
            titan[name.replace("mlp.gate.", "moe.router.gate.")] = value
    return titan


def test_experts_that_are_stacked_are_files_of_their_own(tmp_path: Path) -> None:
    model = qwen_moe()
    model.save_pretrained(tmp_path / "theirs")
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    torch.save({"model": model.state_dict()}, tmp_path / "in-memory.pt")
    for version in TITAN_NAMES:
        torch_dcp.save(titan_of(model, version), checkpoint_id=tmp_path / version, no_dist=True)
    assets(model.config, tmp_path / "base")
    for source in ("in-memory.pt", *TITAN_NAMES):
        # Of the older ones transformers is not asked, which takes seconds.
        base = tmp_path / "base" if source in ("in-memory.pt", "0.3.0") else None
        ckpttool.export(tmp_path / source, tmp_path / f"{source}-out", assets=base, check=True)
        found = load_file(tmp_path / f"{source}-out" / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_map_of_ones_own(tmp_path: Path) -> None:
    values = torch.arange(24.0).view(2, 4, 3)
    torch.save({"blocks.0.w": values, "blocks.0.other": values[0], "old": values[1]}, tmp_path / "a.pt")
    rules = [{"from": "blocks.{n}.w", "to": ["layer.{n}.{e}.a", "layer.{n}.{e}.b"]}, {"from": "old", "to": None}]
    (tmp_path / "map.json").write_text(json.dumps({"name": "mine", "rules": rules}))
    made = ckpttool.export(tmp_path / "a.pt", tmp_path / "out", key_map=str(tmp_path / "map.json"))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(found) == ["blocks.0.other", "layer.0.0.a", "layer.0.0.b", "layer.0.1.a", "layer.0.1.b"]
    assert torch.equal(found["layer.0.1.b"], values[1, 2:])
    assert made.dropped == ["old"]


def test_the_documented_map_of_megatron_and_its_inverse(tmp_path: Path) -> None:
    """Experts of all layers in one tensor; the rows of the query and key in a fused weight are neighbours."""
    page = (Path(__file__).parents[3] / "docs" / "reference" / "key-maps.md").read_text()
    blocks = [json.loads(block) for block in re.findall("```json\n(.*?)```", page, re.DOTALL)]
    data = next(block for block in blocks if block["name"] == "megatron")
    config = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 6}
    (tmp_path / "map.json").write_text(json.dumps(data))
    (tmp_path / "back.json").write_text(json.dumps(keymaps.parse(data, "map").inverse.data()))
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(config))
    experts = torch.randn(3, 4, 2, 5)
    fused = [torch.randn(2 * (4 + 1 + 1) * 6, 7) for _ in range(3)]
    state = {f"decoder.layers.{n}.self_attention.linear_qkv.weight": one for n, one in enumerate(fused)}
    state["decoder.layers.mlp.experts.linear_fc2.weight"] = experts
    torch.save(state, tmp_path / "megatron.pt")
    ckpttool.export(tmp_path / "megatron.pt", tmp_path / "out", key_map=str(tmp_path / "map.json"), assets=base)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert len(found) == 3 * 4 + 3 * 3
    for n, one in enumerate(fused):
        for e in range(4):
            assert torch.equal(found[f"model.layers.{n}.mlp.experts.{e}.down_proj.weight"], experts[n, e])
        heads = one.view(2, 6, 3, 2, 7)
        at = f"model.layers.{n}.self_attn"
        assert torch.equal(found[f"{at}.q_proj.weight"], heads[:, :4].transpose(2, 3).reshape(48, 7))
        assert torch.equal(found[f"{at}.k_proj.weight"], heads[:, 4].transpose(1, 2).reshape(12, 7))
        assert torch.equal(found[f"{at}.v_proj.weight"], heads[:, 5].reshape(12, 7))
    ckpttool.export(tmp_path / "out", tmp_path / "again", key_map=str(tmp_path / "back.json"), assets=base)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == state.keys() and all(torch.equal(again[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([], "a key map is an object"),
        ({"rules": [{"to": "x"}]}, "is not a rule of a key map"),
        ({"rules": [{"from": "a.{n}.{m}", "to": "b", "operations": [{"stack": 0}]}]}, "is not a rule of a key map"),
        ({"rules": [{"from": "a.{n*}", "to": "b"}]}, "is not a rule of a key map"),
        ({"rules": [{"from": "a", "to": "b", "rows": "thirds"}]}, "is not a rule of a key map"),
        ({"rules": [], "needs": "a"}, "a list of strings"),
        ({"rules": [{"from": "a.{1}", "to": "b"}]}, "has no name of its own"),
        ({"rules": [{"from": "a.{n}.{n}", "to": "b"}]}, "has no name of its own"),
    ],
)
def test_a_map_that_is_none(said: Any, why: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    (tmp_path / "map.json").write_text(json.dumps(said))
    with pytest.raises(errors.UsageError, match=why):
        ckpttool.export(tmp_path / "a.pt", tmp_path / "out", key_map=str(tmp_path / "map.json"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"rules": [\n  oops]}', "is not JSON: expecting value in line 2, column 3"),
        (b"", "is not JSON: expecting value in line 1, column 1"),
        (b'{"rules": [], "rules": []}', "names `rules` twice"),
        (b"PK\3\4\0", "is not JSON: a zero at byte 4"),
        (b'"\xff"', "is not UTF-8 at its byte 1"),
    ],
)
def test_a_map_that_is_no_json(text: bytes, why: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    (tmp_path / "map.json").write_bytes(text)
    with pytest.raises(errors.UsageError) as caught:
        ckpttool.export(tmp_path / "a.pt", tmp_path / "out", key_map=str(tmp_path / "map.json"))
    assert str(caught.value) == f"`{tmp_path}/map.json` {why}"


def test_a_map_that_does_not_fit(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3, 2)}, tmp_path / "a.pt")
    with pytest.raises(errors.UsageError, match="there is no key map `llama`") as caught:
        ckpttool.export(tmp_path / "a.pt", tmp_path / "out", key_map="llama")
    assert "llama-meta" in (caught.value.hint or "")
    with pytest.raises(errors.UsageError, match="none of its rules matches"):
        ckpttool.export(tmp_path / "a.pt", tmp_path / "out", key_map="llama-meta")
    (tmp_path / "map.json").write_text(json.dumps({"rules": [{"from": "w", "to": ["a", "b"]}]}))
    with pytest.raises(errors.UsageError, match=r"`w` \[3, 2\] to `a`: .* cannot be split into 1:1"):
        ckpttool.export(tmp_path / "a.pt", tmp_path / "out", key_map=str(tmp_path / "map.json"))


def test_the_maps_that_come_along_name_each_tensor_once() -> None:
    maps = keymaps.known()
    assert len({keymap.name for keymap in maps}) == len(maps) > 2
    for keymap in maps:
        assert all(any(rule.sources for rule in keymap.rules) for _ in keymap.needs)


# Views ----------------------------------------------------------------------------------------------------------------


class Still(Source):
    """A source whose chunks say where they lie."""

    def __init__(self) -> None:
        self.catalogue = Catalogue("torch", [File("/x", "x", 1 << 20)])

    def close(self) -> None:
        """Nothing is open."""


@given(st.data())
def test_each_element_of_a_view_comes_from_where_the_slice_says(data: st.DataObject) -> None:
    heads, half, width = (data.draw(st.integers(1, n)) for n in (4, 4, 3))
    rows = 2 * heads * half
    cuts = sorted(data.draw(st.sets(st.integers(1, max(rows - 1, 1)), max_size=5)) | {0, rows})
    # Rows lie in a file with so many elements between them.
    stride = width + data.draw(st.integers(0, 2))
    chunks = [
        Chunk((low, 0), sizes, Extent(0, 4 * low * stride, 4 * span(sizes, (stride, 1)), (stride, 1)))
        for low, high in pairwise(cuts)
        if (sizes := (high - low, width))
    ]
    tensor = Tensor(("w",), DTYPES["float32"], (rows, width), Chunks.of(chunks))
    viewed = views.Viewed(Still())
    permuted = Rows("halves", 2 * half).apply([{(): Assembly.of(0, (rows, width))}], {}, 1)[0][()]
    seen = viewed.view([tensor], ("v",), (rows, width), permuted.pieces, permuted.fold)
    expected = (torch.arange(rows)[:, None] * stride + torch.arange(width)).view(heads, half, 2, width)
    expected = expected.transpose(1, 2)
    found = torch.full((heads, 2, half, width), -1)
    (chunk,) = seen.chunks
    weave = viewed.resolve(seen, chunk).weave
    assert weave is not None and weave.fold == ((heads, 2, half), (width,))
    for (offsets, sizes), extent in weave.parts:
        strides = extent.strides or row_major(sizes)
        for at in np.ndindex(*sizes):
            place = tuple(o + i for o, i in zip(offsets, at, strict=True))
            assert found[place] == -1
            found[place] = extent.offset // 4 + sum(i * s for i, s in zip(at, strides, strict=True))
    assert torch.equal(found, expected)


WAYS: list[dict[str, Any]] = [
    {"to": order, **how}
    for order in ("halves", "neighbours")
    for how in ({"head_dim": 4}, {"head_dim": 12}, {"heads": 1}, {"heads": 1, "axis": 1}, {"heads": 4, "axis": 1})
]


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("tile", [600, 1 << 20])
def test_rows_in_another_order_are_gathered_in_tiles_of_any_size(
    world: int, tile: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards and tiles cut heads and pairs."""
    state = {f"w{n}": torch.randn(60, 8, 3) for n in range(len(WAYS))}
    source = tmp_path / "ranks"
    source.mkdir()
    for rank in range(world):
        with as_rank(rank, world):
            grid = mesh(world)
            shards = {name: distribute_tensor(x, grid, [Shard(0)], src_data_rank=None) for name, x in state.items()}
            torch.save({"model": shards}, source / f"rank{rank}.pt")
    rules = [{"from": f"w{n}", "to": f"w{n}", "operations": [{"rows": way}]} for n, way in enumerate(WAYS)]
    (tmp_path / "map.json").write_text(json.dumps({"format": 2, "rules": rules}))
    monkeypatch.setattr(read, "TILE", tile)
    ckpttool.export(source, tmp_path / "out", key_map=str(tmp_path / "map.json"), check=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    for n, way in enumerate(WAYS):
        axis = way.get("axis", 0)
        last = state[f"w{n}"].transpose(axis, -1)
        size = last.shape[-1]
        head = way.get("head_dim", size // way.get("heads", 1))
        pairs = (head // 2, 2) if way["to"] == "halves" else (2, head // 2)
        expected = last.unflatten(-1, (size // head, *pairs)).transpose(-1, -2).flatten(-3).transpose(axis, -1)
        assert torch.equal(found[f"w{n}"], expected), way


@pytest.mark.parametrize(
    ("shape", "operation", "made", "most"),
    [
        ((1024, 16384), {"transpose": [0, 1]}, lambda matrix: matrix.T, 1200),  # small tiles take some for each row
        ((4096, 512), {"rows": {"to": "neighbours", "head_dim": 128}}, lambda matrix: paired(matrix, 128), 100),
    ],
    ids=["transposed", "rows in another order"],
)
def test_a_matrix_is_read_in_few_reads(
    shape: tuple[int, int], operation: Any, made: Any, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = torch.arange(shape[0] * shape[1]).to(torch.int16).view(shape)
    torch.save({"m.weight": matrix}, tmp_path / "a.pt")
    rules = [{"from": "m.weight", "to": "m.weight", "operations": [operation]}]
    (tmp_path / "map.json").write_text(json.dumps({"format": 2, "rules": rules}))
    reads: list[int] = []
    read_into = Pool.read_into

    def counted(pool: Pool, location: str, offset: int, into: memoryview) -> None:
        reads.append(len(into))
        read_into(pool, location, offset, into)

    with monkeypatch.context() as patched:
        patched.setattr(Pool, "read_into", counted)
        ckpttool.export(tmp_path / "a.pt", tmp_path / "out", key_map=str(tmp_path / "map.json"))
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["m.weight"], made(matrix))
    assert len(reads) < most and sum(reads) <= 2 * matrix.nbytes  # once more for the checksum of the archive
