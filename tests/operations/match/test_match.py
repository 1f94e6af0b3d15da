"""`ckpttool match`: what it prints and writes, with checkpoints and configs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cli import run
from support.random_models import random_case

import ckpttool

NAMES = {
    "wte": ("model.embed_tokens", (61, 32)),
    "norm": ("model.norm", (32,)),
    "output": ("lm_head", (61, 32)),
    "layers.{}.attention.wq": ("model.layers.{}.self_attn.q_proj", (32, 32)),
    "layers.{}.attention.wk": ("model.layers.{}.self_attn.k_proj", (16, 32)),
    "layers.{}.attention.wv": ("model.layers.{}.self_attn.v_proj", (16, 32)),
    "layers.{}.attention.wo": ("model.layers.{}.self_attn.o_proj", (32, 32)),
    "layers.{}.feed_forward.w1": ("model.layers.{}.mlp.gate_proj", (48, 32)),
    "layers.{}.feed_forward.w2": ("model.layers.{}.mlp.down_proj", (32, 48)),
    "layers.{}.feed_forward.w3": ("model.layers.{}.mlp.up_proj", (48, 32)),
    "layers.{}.attention_norm": ("model.layers.{}.input_layernorm", (32,)),
    "layers.{}.ffn_norm": ("model.layers.{}.post_attention_layernorm", (32,)),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of a Llama under names like Meta's, and a released one."""
    meta, released = {"rope.freqs": torch.ones(4)}, {}
    torch.manual_seed(0)
    for old, (new, shape) in NAMES.items():
        for layer in range(2 if "{}" in old else 1):
            meta[f"{old.format(layer)}.weight"] = released[f"{new.format(layer)}.weight"] = torch.randn(shape)
    torch.save({"model": meta}, tmp_path / "meta.pt")
    (tmp_path / "released").mkdir()
    save_file(released, tmp_path / "released" / "model.safetensors")
    config = {"model_type": "llama", "head_dim": 8, "rope_theta": 10000.0}
    (tmp_path / "released" / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_the_map_is_printed_and_written(folder: Path) -> None:
    found = ckpttool.match(folder / "meta.pt", folder / "released", output=folder / "map.json")
    assert (found.exit_code, found.verdict, found.found, found.unused) == (1, "open", 17, ["rope.freqs"])
    assert [one.name for one in found.ambiguous] == [f"model.layers.{{n}}.self_attn.{one}_proj.weight" for one in "qk"]
    assert json.loads((folder / "map.json").read_text()) == found.map
    assert found.map["format"] == 2 and found.map["model_types"] == ["llama"]
    rules = {rule["from"]: rule["to"] for rule in found.map["rules"]}
    assert rules["layers.{n}.feed_forward.w3.weight"] == "model.layers.{n}.mlp.up_proj.weight"
    printed = run("match", str(folder / "meta.pt"), "--like", str(folder / "released"))
    assert printed.exit_code == 1
    assert "`layers.{n}.attention.wq.weight` rows of heads from neighbours to halves" in printed.stdout
    quiet = run("match", str(folder / "meta.pt"), "--like", str(folder / "released"), "-q")
    assert json.loads(quiet.stdout)["rules"] == found.map["rules"]


def test_a_key_map_that_comes_with_the_tool_decides(folder: Path) -> None:
    meta = torch.load(folder / "meta.pt")["model"]
    meta = {name.replace("wte", "tok_embeddings"): tensor for name, tensor in meta.items() if name != "rope.freqs"}
    torch.save({"model": meta}, folder / "meta.pt")
    found = ckpttool.match(folder / "meta.pt", folder / "released", output=folder / "map.json")
    assert (found.exit_code, found.by["map"]) == (0, 4)
    ckpttool.export(folder / "meta.pt", folder / "out", key_map=str(folder / "map.json"), head_dim=8, assets=None)
    out, released = (load_file(folder / name / "model.safetensors") for name in ("out", "released"))
    assert out.keys() == released.keys()
    for name, tensor in released.items():
        if "q_proj" in name or "k_proj" in name:
            tensor = tensor.view(-1, 4, 2, 32).transpose(1, 2).reshape(tensor.shape)
        assert torch.equal(out[name], tensor), name


def test_samples_of_values_decide(folder: Path) -> None:
    """Names that say nothing, a fused weight of unknown order, one that is transposed, and rows in another order."""
    released = load_file(folder / "released" / "model.safetensors")
    words = {"self_attn.q_proj": "aa", "self_attn.o_proj": "bb", "mlp.gate_proj": "cc", "mlp.up_proj": "dd"}
    tuned = {}
    for name, tensor in released.items():
        tensor = tensor + torch.randn(tensor.shape) / 100
        if "q_proj" in name:
            tensor = tensor.view(-1, 2, 4, 32).transpose(1, 2).reshape(tensor.shape)
        for old, new in words.items():
            name = name.replace(old, new)
        tuned[name] = tensor.T.contiguous() if "bb" in name or "down" in name else tensor
    torch.save({"model": tuned}, folder / "tuned.pt")
    blind = ckpttool.match(folder / "tuned.pt", folder / "released")
    assert {one.name.split(".")[-2] for one in blind.ambiguous} == {"q_proj", "o_proj", "gate_proj", "up_proj"}
    found = ckpttool.match(folder / "tuned.pt", folder / "released", content=True, output=folder / "map.json")
    assert found.compared and found.by["content"] == 6
    assert [one.name.split(".")[-2] for one in found.ambiguous] == ["q_proj"]
    rules = {rule["from"]: rule for rule in found.map["rules"]}
    assert rules["model.layers.{n}.bb.weight"]["operations"] == [{"transpose": [0, 1]}]
    assert rules["model.layers.{n}.cc.weight"]["to"] == "model.layers.{n}.mlp.gate_proj.weight"
    other = {name: torch.randn(tensor.shape) for name, tensor in tuned.items()}
    torch.save({"model": other}, folder / "other.pt")
    assert "content" not in ckpttool.match(folder / "other.pt", folder / "released", content=True).by
    arguments = str(folder / "tuned.pt"), "--like", str(folder / "released")
    line = run("match", *arguments, "--content", "--threads", "2")
    assert run("match", *arguments, "--content", "-j", "1", "-q").exit_code == 1
    assert "by samples of the values" in line.stdout


@pytest.mark.parametrize("word", ["linear_qkv", "attn_in", "qkv_proj"])
@pytest.mark.parametrize("is_source", [True, False])
def test_samples_tell_the_rows_of_a_fused_query_key_and_value(tmp_path: Path, word: str, is_source: bool) -> None:
    """Fused by groups of heads, or one after the other, with the rows of query and key for neighbours."""
    heads, groups, d, width = 8, 2, 8, 48
    torch.manual_seed(3)
    apart: dict[str, torch.Tensor] = {}
    fused: dict[str, torch.Tensor] = {}
    for n in range(2):
        q, k, v = (torch.randn(rows * d, width) for rows in (heads, groups, groups))
        apart |= {f"model.layers.{n}.self_attn.{one}_proj.weight": x for one, x in zip("qkv", (q, k, v), strict=True)}
        apart[f"model.layers.{n}.self_attn.o_proj.weight"] = o = torch.randn(width, heads * d)
        q, k = (x.view(-1, 2, d // 2, width).transpose(1, 2).reshape(x.shape) for x in (q, k))
        parts = [x.view(groups, -1, d, width) for x in (q, k, v)] if word != "qkv_proj" else [q, k, v]
        at = f"model.layers.{n}.{'self_attention' if word == 'linear_qkv' else 'self_attn'}"
        fused |= {f"{at}.{word}.weight": torch.cat(parts, int(word != "qkv_proj")).reshape(-1, width).contiguous()}
        fused[f"{at}.{'linear_proj' if word == 'linear_qkv' else 'o_proj'}.weight"] = o
    for name, state in (("src", fused if is_source else apart), ("ref", apart if is_source else fused)):
        (tmp_path / name).mkdir()
        save_file(state, tmp_path / name / "model.safetensors")
        config = {"model_type": "llama", "head_dim": d, "rope_theta": 10000.0}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    blind = ckpttool.match(tmp_path / "src", tmp_path / "ref")
    assert blind.exit_code == (1 if word == "attn_in" else 0)
    found = ckpttool.match(tmp_path / "src", tmp_path / "ref", content=True, output=tmp_path / "map.json")
    assert found.exit_code == 0 and found.by["content"] == (6 if is_source else 2)
    steps = [json.dumps(step) for rule in found.map["rules"] for step in rule.get("operations", ())]
    assert any('"parts": [0, 1]' in step and step.startswith('{"rows"') for step in steps)
    ckpttool.export(tmp_path / "src", tmp_path / "out", key_map=str(tmp_path / "map.json"))
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert out.keys() == (expected := load_file(tmp_path / "ref" / "model.safetensors")).keys()
    assert all(torch.equal(out[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("content", [False, True])
@pytest.mark.parametrize(
    "seed", [*range(100, 104), *(pytest.param(n, marks=pytest.mark.long) for n in (*range(104, 160), 1454))]
)
def test_the_map_of_a_random_model_makes_its_tensors(tmp_path: Path, seed: int, content: bool) -> None:
    model, source, target = random_case(seed)
    # The values are random, each at one place, so that samples tell them apart.
    values = np.random.default_rng(seed).standard_normal(model.next, dtype=np.float32)
    values[0] = 0
    for side, name in ((source, "src"), (target, "ref")):
        state = {key: torch.from_numpy(np.ascontiguousarray(values[array])) for key, array in side.state.items()}
        save_file(state, tmp_path / f"{name}.safetensors")
    like, written = tmp_path / "ref.safetensors", tmp_path / "map.json"
    found = ckpttool.match(tmp_path / "src.safetensors", like, output=written, content=content, head_dim=model.head_dim)
    keymap = str(written) if found.map["rules"] else "none"
    ckpttool.export(tmp_path / "src.safetensors", tmp_path / "out", key_map=keymap)
    out = load_file(tmp_path / "out" / "model.safetensors")
    open_ = {name for one in (*found.ambiguous, *found.unmatched) for name in one.names}
    for name, array in target.state.items():
        if name not in open_:
            assert torch.equal(out[name], torch.from_numpy(values[array])), name


def test_a_file_is_replaced_only_if_told_to(folder: Path) -> None:
    (folder / "map.json").write_text("mine")
    with pytest.raises(ckpttool.CkptError, match="exists") as raised:
        ckpttool.match(folder / "meta.pt", folder / "released", output=folder / "map.json")
    assert raised.value.exit_code == 6
    assert (folder / "map.json").read_text() == "mine"
    ckpttool.match(folder / "meta.pt", folder / "released", output=folder / "map.json", overwrite=True)
    assert json.loads((folder / "map.json").read_text())["rules"]


def test_nothing_is_open_where_all_is_found(folder: Path) -> None:
    found = ckpttool.match(folder / "released", folder / "released")
    assert (found.exit_code, found.verdict, found.by, found.map["rules"]) == (0, "found", {"name": 21}, [])
    document = json.loads(run("match", str(folder / "released"), "--like", str(folder / "released"), "--json").stdout)
    assert document["verdict"] == "found" and document["reference_tensor_count"] == 21


@pytest.mark.parametrize(("kind", "last"), [("lora", "lora_A.default.weight"), ("int8", "weight_scale")])
def test_what_belongs_to_a_weight_that_is_taken_alone_is_left_over(kind: str, last: str, tmp_path: Path) -> None:
    """The weights that are taken are others without it: this ended with 0."""
    released = {"model.embed.weight": torch.randn(9, 8), "model.up.weight": torch.randn(12, 8)}
    save_file(released, tmp_path / "released.safetensors")
    if kind == "lora":
        other = {"model.embed.weight": released["model.embed.weight"], "model.up.base_layer.weight": torch.randn(12, 8)}
        other |= {
            "model.up.lora_A.default.weight": torch.ones(2, 8),
            "model.up.lora_B.default.weight": torch.ones(12, 2),
        }
    else:
        other = released | {
            "model.up.weight": torch.ones(12, 8, dtype=torch.int8),
            "model.up.weight_scale": torch.ones(12, 1),
        }
    torch.save({"model": other}, tmp_path / "x.pt")
    found = ckpttool.match(tmp_path / "x.pt", tmp_path / "released.safetensors")
    assert kind == "lora" or (found.found, found.ambiguous, found.unmatched) == (2, [], [])
    assert (found.verdict, found.exit_code) == ("open", 1) and f"model.up.{last}" in found.left_over
    said = run("match", str(tmp_path / "x.pt"), "--like", str(tmp_path / "released.safetensors")).stdout
    assert ("merge it first" if kind == "lora" else "dequantise the model first") in said


def test_a_square_matrix_without_a_witness_is_called_assumed(tmp_path: Path) -> None:
    """Until values show it: of one of them that it is transposed."""
    released = {f"model.layers.{n}.{one}.weight": torch.randn(64, 64) for n in range(3) for one in ("o_proj", "fc")}
    released |= {f"model.layers.{n}.down_proj.weight": torch.randn(64, 96) for n in range(3)}
    tuned = {name[6:]: tensor + torch.randn(tensor.shape) / 100 for name, tensor in released.items()}
    tuned |= {name: tensor.T.contiguous() for name, tensor in tuned.items() if "o_proj" in name}
    for name, state in (("tuned", tuned), ("released", released)):
        save_file(state, tmp_path / f"{name}.safetensors")
    src, like, out = (tmp_path / name for name in ("tuned.safetensors", "released.safetensors", "out"))
    blind = ckpttool.match(src, like)
    assert [one.name for one in blind.assumed] == [f"model.layers.{{n}}.{one}.weight" for one in ("fc", "o_proj")]
    assert blind.exit_code == 0 and [len(one.names) for one in blind.assumed] == [3, 3]
    assert blind.assumed[1].candidates[0].rules[0]["operations"] == [{"transpose": [0, 1]}]
    words = "match", str(src), "--like", str(like)
    line = "  assumed  not to be transposed, which shapes do not show: `model.layers.{n}.fc.weight`, `model.layers"
    assert line in run(*words).stdout
    exported = ckpttool.export(src, out, like=like)
    assert any(note.startswith("assumed not to be transposed") for note in exported.notes)
    found = ckpttool.match(src, like, content=True, output=tmp_path / "map.json")
    assert found.assumed == [] and found.by["content"] == 3 and "assumed" not in run(*words, "--content").stdout
    ckpttool.export(src, tmp_path / "again", key_map=str(tmp_path / "map.json"))
    made = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.allclose(made[name], tensor, atol=0.1) for name, tensor in released.items())


def test_the_model_is_selected(folder: Path) -> None:
    meta = torch.load(folder / "meta.pt")["model"]
    both = {"module." + name: tensor for name, tensor in meta.items()}
    torch.save({"model": both, "ema": {"model": meta}}, folder / "two.pt")
    two, like, shapes, out = (str(folder / name) for name in ("two.pt", "released", "meta.pt", "map.json"))
    selected = run(
        "match",
        two,
        "--like",
        like,
        "--only",
        "model",
        "--exclude",
        "*.freqs",
        "--strip-wrappers",
        "--head-dim",
        "16",
        "--json",
    )
    document = json.loads(selected.stdout)
    assert document["unused"] == [] and document["found"] == 17
    rows = document["ambiguous"][0]["candidates"][1]["rules"][0]
    assert rows["from"] == "layers.{n}.attention.wq.weight"
    assert rows["operations"] == [{"rows": {"to": "halves", "head_dim": 16}}]
    written = run("match", two, "--like", like, "--only", "model", "--shapes", shapes, "-v", "-o", out)
    assert "wrote" in written.stdout and written.exit_code == 1
    again = run("match", two, "--like", like, "--only", "model", "--output", out, "--overwrite", "--quiet")
    assert json.loads(again.stdout) == json.loads((folder / "map.json").read_text())
    assert run("match", two, "--like", like, "--only", "model", "--verbose").exit_code == 1


def test_a_tied_tensor_of_the_reference_is_not_missing(tmp_path: Path) -> None:
    weight = torch.rand(5, 4)
    torch.save({"model": {"embed.weight": weight, "head.weight": weight}}, tmp_path / "ref.pt")
    save_file({"embed.weight": weight}, tmp_path / "x.safetensors")
    assert ckpttool.match(tmp_path / "x.safetensors", tmp_path / "ref.pt").exit_code == 0
