"""`export --like`: names, order, dtypes, files and assets of a reference; `--fill-from` and `--take`."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from support.cli import run

import ckpttool
from ckpttool.errors import CorruptError, LossError, UsageError

State = dict[str, torch.Tensor]
FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def trained() -> State:
    generator = torch.Generator().manual_seed(0)
    state = {EMBEDDING: torch.randn(64, 16, generator=generator), "model.norm.weight": torch.ones(16)}
    for layer in range(3):
        state[f"model.layers.{layer}.mlp.weight"] = torch.randn(16, 16, generator=generator)
        state[f"model.layers.{layer}.norm.weight"] = torch.randn(16, generator=generator)
    return state


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tied model in float32, its optimizer and averaged weights."""
    state = trained()
    names = list(state)
    optimizer = {
        "state": {name: {"exp_avg": torch.zeros_like(value)} for name, value in state.items()},
        "param_groups": [{"lr": 1.0, "params": names}],
    }
    ema = {"module": {f"module.{name}": value * 2 for name, value in state.items()}, "decay": 0.9}
    model = {**state, HEAD: state[EMBEDDING]}
    torch.save({"model": model, "optim": optimizer, "ema": ema}, tmp_path / "x.pt")
    return tmp_path / "x.pt"


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    """Two files in bfloat16, whose tensors are in an order of their own; the last one in float32."""
    folder = tmp_path / "released"
    folder.mkdir()
    names = [*trained()][::-1]
    halves = dict(zip(FILES, (names[:3], names[3:]), strict=True))
    for file, inside in halves.items():
        write(folder / file, {n: torch.zeros_like(trained()[n]).to(dtype_of(n)) for n in inside})
    weight_map = {name: file for file, inside in halves.items() for name in sorted(inside)}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "none", "tie_word_embeddings": True}))
    (folder / "tokenizer.json").write_text('{"version": 1}')
    (folder / "README.md").write_text("# Released")
    return folder


def dtype_of(name: str) -> torch.dtype:
    return torch.float32 if name == EMBEDDING else torch.bfloat16


def write(path: Path, state: State) -> None:
    """A file in the order of the dict, as torch's own writers leave it; `save_file` sorts."""
    table: dict[str, Any] = {}
    data = b""
    for name, value in state.items():
        blob = save({"x": value})
        (length,) = struct.unpack("<Q", blob[:8])
        kind = json.loads(blob[8 : 8 + length])["x"]["dtype"]
        bits = blob[8 + length :]
        table[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": [len(data), len(data) + len(bits)]}
        data += bits
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def header(path: Path) -> dict[str, Any]:
    blob = path.read_bytes()
    (length,) = struct.unpack("<Q", blob[:8])
    found: dict[str, Any] = json.loads(blob[8 : 8 + length])
    found.pop("__metadata__", None)
    return found


def test_names_order_dtypes_files_and_assets_are_those_of_the_reference(
    checkpoint: Path, reference: Path, tmp_path: Path
) -> None:
    made = ckpttool.export(checkpoint, tmp_path / "out", like=reference, only="model", check=True)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in reference.iterdir()}
    for file in FILES:
        ours, theirs = header(tmp_path / "out" / file), header(reference / file)
        assert ours == theirs
        assert [*ours] == [*theirs]
    ours, theirs = (json.loads((at / INDEX).read_text())["weight_map"] for at in (tmp_path / "out", reference))
    assert [*ours.items()] == [*theirs.items()]
    written = load_file(tmp_path / "out" / FILES[0]) | load_file(tmp_path / "out" / FILES[1])
    assert all(torch.equal(written[name], value.to(dtype_of(name))) for name, value in trained().items())
    assert made.assets == ["config.json", "tokenizer.json"]
    assert "# Released" not in (tmp_path / "out" / "README.md").read_text()
    assert made.like == str(reference)
    assert made.ties == [] and any(f"`{HEAD}` is `{EMBEDDING}`" in note for note in made.notes)


def test_a_dtype_replaces_those_of_the_reference(checkpoint: Path, reference: Path, tmp_path: Path) -> None:
    ckpttool.export(checkpoint, tmp_path / "out", like=reference, only="model", dtype=["*norm*=float32", "float16"])
    for file in FILES:
        # What would not be aligned otherwise is sorted by dtype, as torch reads it.
        for name, value in load_file(tmp_path / "out" / file).items():
            assert value.dtype == (torch.float32 if "norm" in name else torch.float16)
        assert header(tmp_path / "out" / file).keys() == header(reference / file).keys()


def test_a_head_that_the_reference_stores_is_stored(checkpoint: Path, reference: Path, tmp_path: Path) -> None:
    state = trained() | {HEAD: torch.zeros(64, 16)}
    save_file(state, tmp_path / "base.safetensors")
    made = ckpttool.export(checkpoint, tmp_path / "out", like=tmp_path / "base.safetensors", only="model", check=True)
    written = load_file(tmp_path / "out" / "base.safetensors")
    assert written.keys() == state.keys()
    assert torch.equal(written[HEAD], trained()[EMBEDDING])
    assert made.files[0].path == "base.safetensors"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model.norm.weight": None}, CorruptError, "1 tensor of the reference is missing: `model.norm.weight`"),
        ({"extra.weight": torch.ones(3)}, LossError, "1 tensor is not in the reference: `extra.weight`"),
        ({"model.norm.weight": torch.ones(8)}, CorruptError, "`model.norm.weight` of another shape: found [8], exp"),
        ({HEAD: torch.ones(64, 16)}, LossError, f"1 tensor is not in the reference: `{HEAD}`"),
        ({"model.norm.weight": torch.ones(16, dtype=torch.int8)}, UsageError, "a cast does not quantise"),
    ],
)
def test_what_does_not_fit_is_an_error(
    change: dict[str, torch.Tensor | None], error: type[Exception], message: str, reference: Path, tmp_path: Path
) -> None:
    state = {name: value for name, value in (trained() | change).items() if value is not None}
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(error) as raised:
        ckpttool.export(tmp_path / "x.pt", tmp_path / "out", like=reference)
    assert message in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_missing_tensors_are_filled_and_listed(reference: Path, tmp_path: Path) -> None:
    state = trained()
    vision = {f"vision.{i}.weight": torch.full((8, 8), float(i)) for i in range(3)}
    save_file(state | vision, reference / "model.safetensors")
    for file in (*FILES, INDEX):
        (reference / file).unlink()
    torch.save({"model": state}, tmp_path / "x.pt")
    made = ckpttool.export(tmp_path / "x.pt", tmp_path / "out", like=reference, fill_from=reference, check=True)
    assert made.filled == [*vision] and made.filled_from == str(reference)
    assert any("no optimizer" in note for note in made.notes)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], value) for name, value in (state | vision).items())
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| Filled | 3 tensors are not of the checkpoint but of `released`: `vision.0.weight`" in card
    assert str(tmp_path) not in card
    options = {"like": reference, "fill_from": reference}
    with pytest.raises(CorruptError, match=r"2 tensors of the reference are missing: `vision\.0\.weight`"):
        ckpttool.export(tmp_path / "x.pt", tmp_path / "two", **options, fill="vision.1.*")
    with pytest.raises(UsageError, match=r'`fill="audio\.\*"` matches nothing'):
        ckpttool.export(tmp_path / "x.pt", tmp_path / "two", **options, fill="audio.*")
    torch.save({"model": state | {"vision.1.weight": torch.ones(8, 8)}}, tmp_path / "x.pt")
    made = ckpttool.export(tmp_path / "x.pt", tmp_path / "two", **options, fill="vision.*")
    assert made.filled == [*vision] and made.dropped == ["model.vision.1.weight"]


@pytest.mark.parametrize("ids", [False, True])
def test_what_was_trained_is_not_filled(ids: bool, checkpoint: Path, reference: Path, tmp_path: Path) -> None:
    state = torch.load(checkpoint)
    if ids:
        optimizer = state["optim"]
        optimizer["state"] = dict(enumerate(optimizer["state"].values()))
        optimizer["param_groups"][0]["params"] = [*range(len(trained()))]
        torch.save(state, checkpoint)
    options = {"like": reference, "fill_from": reference, "only": "model"}
    for more in ({"exclude": "*norm*"}, {"fill": "model.norm.weight"}):
        with pytest.raises(LossError, match=r"trained: the optimizer has .*`model\.norm\.weight`"):
            ckpttool.export(checkpoint, tmp_path / "out", **options, **more)
    if ids:
        return
    del state["model"]["model.norm.weight"]
    torch.save(state, checkpoint)
    with pytest.raises(LossError, match=r"1 tensor would be filled .* was trained"):
        ckpttool.export(checkpoint, tmp_path / "out", **options)
    optimizer = state["optim"]
    optimizer["state"].pop("model.norm.weight")
    with pytest.raises(LossError):  # it is in a group
        ckpttool.export(checkpoint, tmp_path / "out", **options)
    optimizer["param_groups"][0]["params"].remove("model.norm.weight")
    torch.save(state, checkpoint)
    assert ckpttool.export(checkpoint, tmp_path / "out", **options).filled == ["model.norm.weight"]


def test_a_trained_expert_in_a_stack_is_not_filled(tmp_path: Path) -> None:
    """The optimizer has the names in memory, the reference those of files."""
    stacked = {
        "model.layers.0.mlp.experts.gate_up_proj": torch.randn(2, 8, 4),
        "model.layers.0.mlp.gate.weight": torch.randn(2, 4),
    }
    stacked |= {"model.layers.0.mlp.experts.down_proj": torch.randn(2, 4, 4)}
    optimizer = {"state": {}, "param_groups": [{"params": [*stacked]}]}
    released = {
        f"model.layers.0.mlp.experts.{e}.{one}_proj.weight": torch.zeros(4, 4)
        for e in range(2)
        for one in ("gate", "up", "down")
    }
    released["model.layers.0.mlp.gate.weight"] = torch.zeros(2, 4)
    folder = tmp_path / "released"
    folder.mkdir()
    save_file(released, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    torch.save({"model": stacked, "optim": optimizer}, tmp_path / "x.pt")
    options = {"like": folder, "fill_from": folder, "fill": "*.experts.1.up_proj.weight"}
    with pytest.raises(LossError, match=r"experts\.1\.up_proj"):
        ckpttool.export(tmp_path / "x.pt", tmp_path / "out", **options)
    made = ckpttool.export(tmp_path / "x.pt", tmp_path / "out", like=folder)
    assert made.key_map
    up = load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.mlp.experts.1.up_proj.weight"]
    assert torch.equal(up, stacked["model.layers.0.mlp.experts.gate_up_proj"][1, 4:])


@pytest.mark.parametrize("name", ["ema", "ema.module"])
def test_take_exports_a_tree_in_place_of_the_model(
    name: str, checkpoint: Path, reference: Path, tmp_path: Path
) -> None:
    made = ckpttool.export(checkpoint, tmp_path / "out", like=reference, take=name)
    written = load_file(tmp_path / "out" / FILES[0]) | load_file(tmp_path / "out" / FILES[1])
    assert all(torch.equal(written[n], (value * 2).to(dtype_of(n))) for n, value in trained().items())
    assert made.take == name and "tree `ema" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("key", ["ema_model", "model_ema", "ema_state_dict", "averaged"])
@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod."])
def test_take_finds_trees_under_any_key(key: str, wrapper: str, tmp_path: Path) -> None:
    ema = {wrapper + name: value * 3 for name, value in trained().items()}
    torch.save({"model": trained(), key: ema, "step": 3}, tmp_path / "x.pt")
    ckpttool.export(tmp_path / "x.pt", tmp_path / "out", take=key)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: value.tolist() for name, value in written.items()} == {
        name: (value * 3).tolist() for name, value in trained().items()
    }


def test_take_lists_the_trees_there_are(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no tree `emma` .*; there are: `ema` \(8 of 9 tensors\)"):
        ckpttool.export(checkpoint, tmp_path / "out", take="emma")
    with pytest.raises(UsageError, match=r"lacks 1 tensor of the model: `lm_head\.weight`"):
        ckpttool.export(checkpoint, tmp_path / "out", take="ema")
    made = ckpttool.export(checkpoint, tmp_path / "out", take="ema", strict=False)
    assert any("lacks 1 tensor" in note for note in made.notes)
    torch.save({"model": trained()}, tmp_path / "y.pt")
    with pytest.raises(UsageError, match=r"no tree `ema` .*, and no other tree has them"):
        ckpttool.export(tmp_path / "y.pt", tmp_path / "two", take="ema")


def test_the_command(checkpoint: Path, reference: Path, tmp_path: Path) -> None:
    src, out, like = str(checkpoint), str(tmp_path / "out"), str(reference)
    base = ["export", src, out, "--like", like]
    done = run("export", src, out, "--like", like, "--take", "ema", "--dry-run")
    assert done.exit_code == 0 and "taken" in done.stdout and "like" in done.stdout
    done = run(*base, "--only", "model", "--exclude", "*norm*", "--fill-from", str(reference))
    assert done.exit_code == 5 and "trained" in done.stderr
    assert run("export", str(checkpoint), str(tmp_path / "out"), "--fill-from", str(reference)).exit_code == 2
    assert run(*base, "--fill", "x").exit_code == 2
    assert run(*base, "--take", "ema", "--only", "model").exit_code == 2
    torch.save({"model": {n: v for n, v in trained().items() if "norm" not in n}}, checkpoint)
    done = run("export", src, out, "--like", like, "--fill-from", like, "--fill", "*norm*", "--json")
    assert {*json.loads(done.stdout)["filled"]} == {name for name in trained() if "norm" in name}


def test_buffers_that_are_not_averaged_are_filled_from_the_model(tmp_path: Path) -> None:
    state = trained() | {"model.scale": torch.full((3,), 7.0)}
    ema = {name: value * 2 for name, value in trained().items()}
    optimizer = {"state": {}, "param_groups": [{"params": [*trained()]}]}
    torch.save({"model": state, "ema": ema, "optim": optimizer}, tmp_path / "x.pt")
    save_file(state, tmp_path / "released.safetensors")
    options = {"like": tmp_path / "released.safetensors", "take": "ema"}
    with pytest.raises(CorruptError, match=r"missing: `model\.scale`"):
        ckpttool.export(tmp_path / "x.pt", tmp_path / "out", **options)
    made = ckpttool.export(tmp_path / "x.pt", tmp_path / "out", **options, fill_from=tmp_path / "x.pt")
    written = load_file(tmp_path / "out" / "released.safetensors")
    assert made.filled == ["model.scale"]
    assert all(torch.equal(written[name], value) for name, value in (state | ema).items())


def in_house(layers: int, *, is_fused: bool) -> tuple[State, State]:
    """A model by the names of a framework that nobody knows, and by those of its release."""
    generator = torch.Generator().manual_seed(1)
    own, released = {}, {}
    for layer in range(layers):
        begin, end = f"trunk.{layer}", f"decoder.layers.{layer}"
        for here, there, shape in (("ffn.down_proj", "mlp.down_proj", (8, 20)), ("scale", "norm", (8,))):
            value = torch.randn(*shape, generator=generator)
            own[f"{begin}.{here}.weight"] = released[f"{end}.{there}.weight"] = value
        gate, up = (torch.randn(20, 8, generator=generator) for _ in range(2))
        released |= {f"{end}.mlp.gate_proj.weight": gate, f"{end}.mlp.up_proj.weight": up}
        own |= (
            {f"{begin}.ffn.gate_up_proj.weight": torch.cat((gate, up))}
            if is_fused
            else {f"{begin}.ffn.a.weight": gate, f"{begin}.ffn.b.weight": up}
        )
    return own, released


def test_names_that_no_map_knows_are_matched(tmp_path: Path) -> None:
    own, released = in_house(3, is_fused=True)
    torch.save({"model": own}, tmp_path / "x.pt")
    save_file({name: torch.zeros_like(value) for name, value in released.items()}, tmp_path / "released.safetensors")
    result = ckpttool.export(tmp_path / "x.pt", tmp_path / "out", like=tmp_path / "released.safetensors")
    made = load_file(tmp_path / "out" / "released.safetensors")
    assert made.keys() == released.keys() and all(torch.equal(made[name], released[name]) for name in released)
    assert result.key_map == "matched"
    (note,) = (note for note in result.notes if "`ckpttool match` finds" in note)
    assert "all 12: " in note
    # What `match` would write does the same.
    ckpttool.match(tmp_path / "x.pt", tmp_path / "released.safetensors", output=tmp_path / "map.json")
    ckpttool.export(
        tmp_path / "x.pt",
        tmp_path / "by_map",
        like=tmp_path / "released.safetensors",
        key_map=str(tmp_path / "map.json"),
    )
    assert (tmp_path / "by_map" / "released.safetensors").read_bytes() == (
        tmp_path / "out" / "released.safetensors"
    ).read_bytes()


def test_what_may_be_made_in_several_ways_is_not_guessed(tmp_path: Path) -> None:
    own, released = in_house(3, is_fused=False)
    torch.save({"model": own}, tmp_path / "x.pt")
    save_file(released, tmp_path / "released.safetensors")
    with pytest.raises(CorruptError, match=r"12 tensors of the reference are missing") as raised:
        ckpttool.export(tmp_path / "x.pt", tmp_path / "out", like=tmp_path / "released.safetensors")
    assert "ckpttool match" in str(raised.value.hint) and not (tmp_path / "out").exists()
    # `none` is for names as they are.
    own, released = in_house(3, is_fused=True)
    torch.save({"model": own}, tmp_path / "y.pt")
    with pytest.raises(CorruptError):
        ckpttool.export(tmp_path / "y.pt", tmp_path / "out", like=tmp_path / "released.safetensors", key_map="none")


def test_a_reference_of_two_models_names_the_way(checkpoint: Path, tmp_path: Path) -> None:
    torch.save({"model": trained(), "critic": trained()}, tmp_path / "two.pt")
    with pytest.raises(UsageError, match=r"reference is one model, and there are 2: `model`, `critic`") as raised:
        ckpttool.export(checkpoint, tmp_path / "out", only="model", like=tmp_path / "two.pt")
    assert f"ckpttool convert {tmp_path / 'two.pt'} reference.safetensors --only model" in str(raised.value.hint)


def test_a_map_that_lacks_a_number_is_an_open_question(tmp_path: Path) -> None:
    """Meta's files beside no config: rows of query and key lie in another order, which no shape shows, and the map of
    another family has the same names."""
    generator = torch.Generator().manual_seed(3)
    heads, width, hidden, names = 4, 32, 48, ("q", "k", "v", "o")
    own = {
        name: torch.randn(20, width, generator=generator) for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    meta = {"tok_embeddings.weight": own["model.embed_tokens.weight"], "output.weight": own["lm_head.weight"]}
    own["model.norm.weight"] = meta["norm.weight"] = torch.randn(width, generator=generator)
    for name in names:
        value = torch.randn(width, width, generator=generator)
        own[f"model.layers.0.self_attn.{name}_proj.weight"] = value
        if name in "qk":  # the inverse of `permute` in `convert_llama_weights_to_hf.py` of transformers
            value = value.view(heads, 2, width // heads // 2, width).transpose(1, 2).reshape(width, width)
        meta[f"layers.0.attention.w{name}.weight"] = value
    for new, old, shape in (
        ("w1", "mlp.gate_proj", (hidden, width)),
        ("w2", "mlp.down_proj", (width, hidden)),
        ("w3", "mlp.up_proj", (hidden, width)),
    ):
        value = torch.randn(*shape, generator=generator)
        own[f"model.layers.0.{old}.weight"] = meta[f"layers.0.feed_forward.{new}.weight"] = value
    for new, old_norm in (("attention_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")):
        value = torch.randn(width, generator=generator)
        own[f"model.layers.0.{old_norm}.weight"] = meta[f"layers.0.{new}.weight"] = value
    torch.save({"model": own}, tmp_path / "x.pt")
    save_file({name: value.contiguous() for name, value in meta.items()}, tmp_path / "consolidated.safetensors")
    how = {"like": tmp_path / "consolidated.safetensors"}
    with pytest.raises(UsageError, match=r"`llama-meta reversed`, which cannot be applied.*`head_dim`") as caught:
        ckpttool.export(tmp_path / "x.pt", tmp_path / "out", **how)
    assert "--head-dim" in str(caught.value.hint) and not (tmp_path / "out").exists()
    ckpttool.export(tmp_path / "x.pt", tmp_path / "out", **how, head_dim=width // heads)
    made = load_file(tmp_path / "out" / "consolidated.safetensors")
    assert made.keys() == meta.keys() and all(torch.equal(made[name], meta[name]) for name in meta)


def test_rows_with_values_are_not_trimmed_nor_invented(tmp_path: Path) -> None:
    """A vocabulary with added tokens that were trained, one with padding, and a smaller one."""
    own, released = in_house(3, is_fused=True)
    rows = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    save_file(released | {"decoder.embed_tokens.weight": rows}, tmp_path / "released.safetensors")
    added = torch.randn(5, 8, generator=torch.Generator().manual_seed(2))
    for name, vocabulary, message in (
        ("trained", torch.cat((rows, added)), r"rows 96 to 101 of `trunk.wte.weight` are not padding"),
        ("one", torch.cat((rows, added[:1])), r"rows 96 to 97 of `trunk.wte.weight` are not padding"),
        ("smaller", rows[:90], r"`trunk.wte.weight` has 90 rows"),
        ("padded", torch.cat((rows, torch.zeros(32, 8))), None),
        ("alike", torch.cat((rows, added[:1].expand(7, 8))), None),
    ):
        torch.save({"model": own | {"trunk.wte.weight": vocabulary.clone()}}, tmp_path / f"{name}.pt")
        how = {"like": tmp_path / "released.safetensors"}
        if message is not None:
            with pytest.raises(LossError, match=message) as caught:
                ckpttool.export(tmp_path / f"{name}.pt", tmp_path / name, **how)
            assert "ckpttool match" in str(caught.value.hint) and not (tmp_path / name).exists()
            ckpttool.match(tmp_path / f"{name}.pt", tmp_path / "released.safetensors", output=tmp_path / f"{name}.json")
            how["key_map"] = str(tmp_path / f"{name}.json")  # whoever names the map wants it so
        result = ckpttool.export(tmp_path / f"{name}.pt", tmp_path / name, **how)
        made = load_file(tmp_path / name / "released.safetensors")["decoder.embed_tokens.weight"]
        assert torch.equal(made[:90], rows[:90]) and made.shape == rows.shape
        assert message is not None or "padding rows at the end are dropped" in " ".join(result.notes)
