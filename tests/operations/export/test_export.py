"""`ckpttool export` to a directory, without transformers: names, ties, dtypes, files, assets, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from support.paths import CHECKPOINTS
from support.weights_read import same, weights_in

import ckpttool
from ckpttool import errors
from ckpttool.models.assets import CARD, with_dtype
from ckpttool.operations.export import plan as planning
from ckpttool.operations.write import WriteOptions
from ckpttool.storage.stores import local_path


def weights() -> dict[str, torch.Tensor]:
    """A small model of nobody's: an embedding, layers, a head."""
    torch.manual_seed(5)
    return {
        "model.embed_tokens.weight": torch.randn(11, 8),
        "model.layers.0.norm.weight": torch.ones(8),
        "model.layers.1.norm.weight": torch.ones(8),
        "model.layers.0.w.weight": torch.randn(8, 8) * 1e5,
        "model.layers.0.ids": torch.arange(5),
        "model.layers.0.mask": torch.tensor([True, False]),
        "lm_head.weight": torch.randn(11, 8),
    }


def saved(path: Path, state: Any) -> Path:
    """A file of torch.save."""
    torch.save(state, path)
    return path


def digest(data: bytes) -> str:
    """SHA-256, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


# Which tensors, under which names -------------------------------------------------------------------------------------


def test_only_the_model_without_wrappers(tmp_path: Path) -> None:
    wrapped = {"module._orig_mod." + n.replace("layers.0.", "layers.0._fsdp_wrapped_module."): v
               for n, v in weights().items()}  # fmt: skip
    state = {"model": wrapped, "optim": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": []}, "epoch": 3}
    made = ckpttool.export(saved(tmp_path / "a.pt", state), tmp_path / "out", check=True)
    assert same(weights_in(tmp_path / "out"), weights())
    names = [entry.name for entry in ckpttool.inspect(tmp_path / "a.pt").entries.values()]
    assert made.dropped == [name for name in names if not name.startswith("model.")]


def test_what_is_left_out_is_named_as_by_convert(tmp_path: Path) -> None:
    src = CHECKPOINTS / "dcp/fsdp2_w2/ckpt"
    exported = ckpttool.export(src, tmp_path / "out", exclude="tokens_seen", dry_run=True)
    converted = ckpttool.convert(src, tmp_path / "out.safetensors", only="model", exclude="tokens_seen", dry_run=True)
    assert exported.dropped == converted.dropped and "model.tokens_seen" in exported.dropped


def test_a_directory_that_may_be_meant_as_a_repository_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "a.pt", weights())
    said = "`org/name` is a directory of this machine; a repository of the Hub is written `hf://org/name`"
    assert said in ckpttool.export("a.pt", "org/name").notes
    assert not any("hf://" in note for note in ckpttool.export("a.pt", "org/other").notes)  # `org` is there


def test_two_names_that_become_one_are_refused(tmp_path: Path) -> None:
    state = {"a.module.w": torch.ones(2), "a.w": torch.zeros(2)}
    with pytest.raises(errors.UsageError, match=r"would both be called `a\.w`"):
        ckpttool.export(saved(tmp_path / "a.pt", state), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_of_two_models_one_is_asked_for(tmp_path: Path) -> None:
    state = {"model": weights(), "critic": {name: value * 2 for name, value in weights().items()}}
    path = saved(tmp_path / "a.pt", state)
    with pytest.raises(errors.UsageError, match="2 models") as caught:
        ckpttool.export(path, tmp_path / "out")
    assert "--only critic" in (caught.value.hint or "")
    ckpttool.export(path, tmp_path / "out", only="critic")
    assert same(weights_in(tmp_path / "out"), state["critic"])
    with pytest.raises(errors.UsageError, match="no part `emu`"):
        ckpttool.export(path, tmp_path / "other", only="emu")


def test_no_model_is_said(tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError, match="there is no model in this checkpoint"):
        ckpttool.export(saved(tmp_path / "a.pt", {"epoch": 3}), tmp_path / "out")


def test_renaming_by_rules_and_by_files_of_rules(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {f"net.{name}": value for name, value in weights().items()})
    (tmp_path / "rules.txt").write_text("# the author's own names\nmodel.layers.*=model.blocks.*   # all\n\n")
    ckpttool.export(
        path, tmp_path / "out", strip_prefix="net", rename=[f"@{tmp_path}/rules.txt", "lm_head=head"], exclude="*.ids"
    )
    expected = {name.replace("layers", "blocks").replace("lm_head", "head"): v for name, v in weights().items()}
    expected.pop("model.blocks.0.ids")
    assert same(weights_in(tmp_path / "out"), expected)
    (tmp_path / "rules.txt").write_text("a=b\nnonsense\n")
    with pytest.raises(errors.UsageError, match="line 2"):
        ckpttool.export(path, tmp_path / "other", rename=f"@{tmp_path}/rules.txt")
    for flags in ({"rename": "nothing=x"}, {"exclude": "nothing*"}, {"strip_prefix": "nothing"}):
        with pytest.raises(errors.UsageError, match=r"matches nothing|changes no name|has this prefix"):
            ckpttool.export(path, tmp_path / "other", **flags)  # type: ignore[arg-type]


def test_an_adapter_is_written_as_peft_does(tmp_path: Path) -> None:
    base = "base_model.model.model.layers.0.q_proj"
    state = {
        f"{base}.base_layer.weight": torch.randn(4, 4),
        f"{base}.lora_A.default.weight": torch.randn(2, 4),
        f"{base}.lora_B.default.weight": torch.randn(4, 2),
        "base_model.model.score.original_module.weight": torch.randn(2, 4),
        "base_model.model.score.modules_to_save.default.weight": torch.randn(2, 4),
    }
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "base" / "config.json").write_text("{}")
    path = saved(tmp_path / "a.pt", {"model": state})
    made = ckpttool.export(path, tmp_path / "out", assets=tmp_path / "base", check=True)
    assert made.adapter
    assert sorted(os.listdir(tmp_path / "out")) == [CARD, "adapter_config.json", "adapter_model.safetensors"]
    # The names that `get_peft_model_state_dict` gives.
    assert same(
        weights_in(tmp_path / "out"),
        {
            f"{base}.lora_A.weight": state[f"{base}.lora_A.default.weight"],
            f"{base}.lora_B.weight": state[f"{base}.lora_B.default.weight"],
            "base_model.model.score.weight": state["base_model.model.score.modules_to_save.default.weight"],
        },
    )
    assert len(made.dropped) == 2 and all("lora" not in name for name in made.dropped)
    state |= {f"{base}.lora_A.other.weight": torch.randn(2, 4)}
    with pytest.raises(errors.UsageError, match="2 adapters"):
        ckpttool.export(saved(tmp_path / "b.pt", {"model": state}), tmp_path / "both")


@pytest.mark.parametrize("inside", [True, False])
def test_a_manifest_of_what_is_written(inside: bool, tmp_path: Path) -> None:
    """Against hashlib over the files, config and card too, and over the tensors as safetensors reads them."""
    path, out = saved(tmp_path / "a.pt", {"model": weights(), "epoch": 3}), tmp_path / "out"
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"model_type": "own", "dtype": "float32"}')
    listed = out / "integrity.json" if inside else tmp_path / "m.json"
    options: dict[str, Any] = {"assets": tmp_path / "base", "dtype": "bfloat16", "max_shard_size": 300}
    ckpttool.export(path, out, manifest=listed, dry_run=True, **options)
    assert not out.exists() and not listed.exists()
    ckpttool.export(path, out, manifest=listed, **options)
    said = json.loads(listed.read_text())
    there = {file.name: file.read_bytes() for file in out.iterdir() if file != listed}
    assert len(there) > 4 and {"config.json", CARD} < there.keys()
    assert said["files"] == {name: digest(data) for name, data in there.items()}
    assert said["sizes"] == {name: len(data) for name, data in there.items()}
    assert {row["name"]: row["sha256"] for row in said["tensors"]} == {
        name: digest(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        for name, tensor in weights_in(out).items()
    }
    assert ckpttool.verify(out, manifest=listed).findings == []
    (out / "config.json").write_text("{}")
    assert [f.file for f in ckpttool.verify(out, manifest=listed).findings] == ["config.json"]
    if inside:
        ckpttool.export(path, out, manifest=listed, overwrite=True, **options)
        assert ckpttool.verify(out).findings == []
    else:
        with pytest.raises(errors.OverwriteError, match=r"m\.json"):
            ckpttool.export(path, tmp_path / "again", manifest=listed, **options)
        assert not (tmp_path / "again").exists()


def test_a_manifest_of_an_adapter(tmp_path: Path) -> None:
    names = [f"base_model.model.a.lora_{side}" for side in "AB"]
    path = saved(tmp_path / "a.pt", {f"{name}.default.weight": torch.randn(2, 2) for name in names})
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    ckpttool.export(path, tmp_path / "out", assets=tmp_path / "base", manifest=tmp_path / "m.json")
    said = json.loads((tmp_path / "m.json").read_text())
    assert set(said["files"]) == set(os.listdir(tmp_path / "out"))
    assert [row["name"] for row in said["tensors"]] == [f"{name}.weight" for name in names]
    assert ckpttool.verify(tmp_path / "out", manifest=tmp_path / "m.json").findings == []


def test_where_no_manifest_can_be(tmp_path: Path) -> None:
    path, out = saved(tmp_path / "a.pt", weights()), tmp_path / "out"
    with pytest.raises(errors.OverwriteError, match=r"README\.md` is a file of the checkpoint"):
        ckpttool.export(path, out, manifest=out / "README.md")
    with pytest.raises(errors.UsageError, match="`manifest` lists local files") as caught:
        ckpttool.export(path, "hf://me/model", manifest=tmp_path / "m.json")
    assert "hf upload" in (caught.value.hint or "")
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


# Ties -----------------------------------------------------------------------------------------------------------------


def tied(path: Path, *, sharded: bool) -> tuple[Path, dict[str, torch.Tensor]]:
    """A tied head: one storage in a file of torch.save, twice the same bytes in a directory of DCP."""
    state = weights()
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    if not sharded:
        return saved(path, {"model": state}), state
    torch_dcp.save({"model": {n: v.clone() for n, v in state.items()}}, checkpoint_id=path, no_dist=True)
    return path, state


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("said", [None, True, False])
def test_tied_weights_are_written_once_unless_the_config_says_no(
    sharded: bool, said: bool | None, tmp_path: Path
) -> None:
    path, state = tied(tmp_path / "a", sharded=sharded)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps({} if said is None else {"tie_word_embeddings": said}))
    made = ckpttool.export(path, tmp_path / "out", assets=tmp_path / "base")
    names = weights_in(tmp_path / "out").keys()
    if said is False:
        assert names == state.keys()
        assert any("ties nothing" in note for note in made.notes)
    else:
        # Layer norms are all ones and no twins.
        assert names == state.keys() - {"lm_head.weight"}
        assert made.ties == [("lm_head.weight", "model.embed_tokens.weight")]


def test_a_head_that_was_saved_before_its_embedding_is_the_one_that_is_left_out(tmp_path: Path) -> None:
    shared = torch.rand(8, 4)
    path = saved(tmp_path / "a.pt", {"lm_head.weight": shared, "model.embed_tokens.weight": shared})
    made = ckpttool.export(path, tmp_path / "out")
    assert [*weights_in(tmp_path / "out")] == ["model.embed_tokens.weight"]
    assert made.ties == [("lm_head.weight", "model.embed_tokens.weight")]


def test_a_head_of_its_own_is_no_tie_whatever_the_config_says(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"tie_word_embeddings": true}')
    made = ckpttool.export(saved(tmp_path / "a.pt", weights()), tmp_path / "out", assets=tmp_path / "base")
    assert same(weights_in(tmp_path / "out"), weights())
    assert any("has values of its own" in note for note in made.notes)


def test_the_embedding_is_kept_in_place_of_the_head_whatever_it_is_called(tmp_path: Path) -> None:
    weight = torch.randn(29, 7)
    path = saved(tmp_path / "a.pt", {"lm_head.weight": weight, "embed.weight": weight, "norm.weight": torch.ones(7)})
    ckpttool.export(path, tmp_path / "out")
    assert weights_in(tmp_path / "out").keys() == {"embed.weight", "norm.weight"}


# Dtypes and files -----------------------------------------------------------------------------------------------------


def test_dtypes_are_cast_as_torch_casts(tmp_path: Path) -> None:
    state = {**weights(), "quantized": torch.randn(4).to(torch.float8_e4m3fn)}
    path = saved(tmp_path / "a.pt", state)
    made = ckpttool.export(path, tmp_path / "out", dtype=["*norm.weight=float32", "float16"], check=True)
    there = weights_in(tmp_path / "out")
    for name, value in state.items():
        plain = "norm" in name or not value.is_floating_point() or value.element_size() == 1
        expected = value if plain else value.to(torch.float16)
        assert there[name].dtype == expected.dtype
        assert torch.equal(there[name].view(torch.uint8), expected.view(torch.uint8))
    assert any("out of range of their new dtype" in note for note in made.notes)
    assert made.parameters == {"float16": 240, "float32": 16, "int64": 5, "float8_e4m3fn": 4, "bool": 2}
    with pytest.raises(errors.UsageError, match="matches nothing"):
        ckpttool.export(path, tmp_path / "other", dtype="nothing*=float32")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_torchs_to_the_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    # Every exponent and sign, and what lies halfway between two values of bfloat16.
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(3)).to(torch.int32)
    bits[::4] = bits[::4] & ~0xFFFF | 0x8000
    values = bits.view(torch.float32).view(64, 64)
    path = saved(tmp_path / "a.pt", {"w": values})
    ckpttool.export(path, tmp_path / "out", dtype=str(dtype).removeprefix("torch."))
    made, expected = weights_in(tmp_path / "out")["w"], values.to(dtype)
    number = ~expected.isnan()
    assert torch.equal(made.isnan(), expected.isnan())
    assert torch.equal(made[number].view(torch.int16), expected[number].view(torch.int16))
    assert not torch.equal(made[number].float(), values[number])


def test_files_are_split_as_huggingface_hub_splits_them(tmp_path: Path) -> None:
    made = ckpttool.export(saved(tmp_path / "a.pt", weights()), tmp_path / "out", max_shard_size=400, check=True)
    wanted = split_torch_state_dict_into_shards(weights(), max_shard_size=400)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == wanted.tensor_to_filename
    assert index["metadata"]["total_parameters"] == sum(v.numel() for v in weights().values())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in weights().values()) == made.payload_bytes
    for name, tensors in wanted.filename_to_tensors.items():
        with safe_open(tmp_path / "out" / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert set(file.keys()) == set(tensors)
        head = int.from_bytes((tmp_path / "out" / name).read_bytes()[:8], "little")
        assert head % 8 == 0
    assert same(weights_in(tmp_path / "out"), weights())


def test_the_same_source_gives_the_same_bytes_and_each_file_alone(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {"model": weights()})
    for name in ("one", "two"):
        ckpttool.export(path, tmp_path / name / "out", max_shard_size="400B")
    folders = [{f.name: f.read_bytes() for f in (tmp_path / n / "out").iterdir()} for n in ("one", "two")]
    assert folders[0] == folders[1]
    seen: list[tuple[int, int]] = []
    options = planning.ExportOptions(max_shard_size=400)
    how = WriteOptions(progress=lambda done, total: seen.append((done, total)))
    result = planning.Exported(str(path), "", "out", "safetensors")
    with planning.planned(result, options, how) as plan:
        # Backwards, and twice: none needs another.
        for i, file in enumerate([*reversed(plan.files), plan.files[0]]):
            file.write(local_path(str(tmp_path / str(i))))
            assert (tmp_path / str(i)).read_bytes() == folders[0][file.name]
            assert (tmp_path / str(i)).stat().st_size == file.size
    assert max(done for done, _ in seen) == seen[0][1]


def test_what_safetensors_cannot_hold_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {**weights(), "z": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(errors.LossError, match="complex128") as caught:
        ckpttool.export(path, tmp_path / "out")
    assert "--exclude 'z'" in (caught.value.hint or "")


def test_nothing_is_left_when_the_source_is_damaged(tmp_path: Path) -> None:
    path, _ = tied(tmp_path / "a", sharded=True)
    data = next(path.glob("*.distcp"))
    text = bytearray(data.read_bytes())
    place = text.index(weights()["model.layers.0.w.weight"].numpy().tobytes())
    text[place] ^= 1
    data.write_bytes(text)
    with pytest.raises(errors.CorruptError, match="CRC"):
        ckpttool.export(path, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


# Assets ---------------------------------------------------------------------------------------------------------------

CONFIG = (
    '{\n    "model_type": "own", "sub": {"dtype": "float64"},\n  "torch_dtype": "float32",\n\t"text": "\\"dtype\\"",'
    '\n"auto_map": {"AutoModel": "modeling_own.Own"}\n}'
)


def base(folder: Path) -> Path:
    """A directory of assets, with things in it that are none."""
    folder.mkdir()
    for name, text in {
        "config.json": CONFIG, "tokenizer.json": "{ }", "merges.txt": "a b", "chat_template.jinja": "{{ x }}",
        "modeling_own.py": "raise SystemExit\n", "LICENSE": "mine", "model.safetensors.index.json": "{}",
        "pytorch_model.bin": "x", "trainer_state.json": "{}", ".secret": "x",
    }.items():  # fmt: skip
        (folder / name).write_text(text)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool.jinja").write_text("{{ y }}")
    return folder


def test_assets_are_copied_as_files_and_one_word_is_changed(tmp_path: Path) -> None:
    folder = base(tmp_path / "base")
    path = saved(tmp_path / "a.pt", weights())
    made = ckpttool.export(path, tmp_path / "out", assets=folder, dtype="bfloat16")
    copied = {"tokenizer.json", "merges.txt", "chat_template.jinja", "modeling_own.py", "LICENSE"}
    copied |= {"additional_chat_templates/tool.jinja"}
    assert set(made.assets) == copied | {"config.json"}
    assert all((tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes() for name in copied)
    text = (tmp_path / "out" / "config.json").read_text()
    assert text == CONFIG.replace('"torch_dtype": "float32"', '"torch_dtype": "bfloat16"')
    assert any("`torch_dtype` of `config.json` is changed from `float32` to `bfloat16`" in note for note in made.notes)
    assert {p.name for p in (tmp_path / "out").iterdir()} >= {"model.safetensors", CARD}


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ('{"dtype": null}', '{"dtype": "bfloat16"}'),
        ('{"dtype":"torch.bfloat16"}', '{"dtype":"torch.bfloat16"}'),
        ('{"a": ["dtype", {"dtype": "x"}], "dtype" : "" }', '{"a": ["dtype", {"dtype": "x"}], "dtype" : "bfloat16" }'),
        ('{"a": "dtype"}', '{"a": "dtype"}'),
        ('{"dtype": {"a": 1}}', '{"dtype": {"a": 1}}'),
        ('{"text_config": {"dtype": null, "b": {"dtype": "x"}}}',
         '{"text_config": {"dtype": "bfloat16", "b": {"dtype": "x"}}}'),
        ('{"dtype": "x", "vision_config": {"torch_dtype": "y", "text_encoder": {"dtype": "z"}}}',
         '{"dtype": "bfloat16", "vision_config": {"torch_dtype": "bfloat16", "text_encoder": {"dtype": "bfloat16"}}}'),
        ('{"quantization_config": {"dtype": "x"}, "some_config": [{"dtype": "x"}]}',
         '{"quantization_config": {"dtype": "x"}, "some_config": [{"dtype": "x"}]}'),
        ('{"d\\u0074ype": "x", "torch_dtype": "y"}', '{"d\\u0074ype": "bfloat16", "torch_dtype": "bfloat16"}'),
    ],
)  # fmt: skip
def test_the_dtype_of_a_config(text: str, changed: str) -> None:
    assert with_dtype(text, "bfloat16")[0] == changed


def test_a_dtype_of_a_config_inside_that_is_null_stays_so(tmp_path: Path) -> None:
    """As of MPT, whose config of the attention `save_pretrained` writes with null."""
    small = transformers.MptConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=40, max_seq_len=16)
    transformers.MptForCausalLM(small).save_pretrained(tmp_path / "mpt")
    text = (tmp_path / "mpt/config.json").read_text()
    assert json.loads(text)["attn_config"]["dtype"] is None
    assert with_dtype(text, "float32") == (text, [])
    assert with_dtype(text, "bfloat16")[0] == text.replace('"dtype": "float32"', '"dtype": "bfloat16"')
    assert with_dtype('{"dtype": null}', "bfloat16")[0] == '{"dtype": "bfloat16"}'


def test_links_that_lead_out_of_the_assets_are_not_followed(tmp_path: Path) -> None:
    folder = base(tmp_path / "base")
    (tmp_path / "secret.json").write_text("{}")
    (folder / "added_tokens.json").symlink_to("tokenizer.json")
    path = saved(tmp_path / "a.pt", weights())
    made = ckpttool.export(path, tmp_path / "out", assets=folder)
    assert not (tmp_path / "out" / "added_tokens.json").is_symlink()
    assert "added_tokens.json" in made.assets
    (folder / "vocab.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(errors.ReadError, match="leads out"):
        ckpttool.export(path, tmp_path / "other", assets=folder)
    torch.save(weights(), folder / "pytorch_model.bin")
    for name in ("model.safetensors.index.json", "trainer_state.json"):
        (folder / name).unlink()
    made = ckpttool.export(folder, tmp_path / "beside")
    assert any("leads out" in note for note in made.notes)
    assert "vocab.json" not in made.assets
    assert "tokenizer.json" in made.assets


def test_a_card_is_made_when_there_is_none(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", weights())
    ckpttool.export(path, tmp_path / "out", dtype="bfloat16")
    card = (tmp_path / "out" / CARD).read_text()
    assert all(text in card for text in ("# out", "`a.pt`, torch", "263 in 7 tensors", "bfloat16", "sha256:"))
    assert "training checkpoint, and cast." in card and "from float32 to bfloat16 |" in card
    assert str(tmp_path) not in card
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / CARD).write_text("mine")
    made = ckpttool.export(path, tmp_path / "mine", assets=tmp_path / "base")
    assert ((tmp_path / "mine" / CARD).read_text(), made.card) == ("mine", False)
    ckpttool.export(path, tmp_path / "same")
    card = (tmp_path / "same" / CARD).read_text()
    assert "training checkpoint bit for bit." in card and "| Cast |" not in card
    ckpttool.export(path, tmp_path / "bare", card=False)
    assert os.listdir(tmp_path / "bare") == ["model.safetensors"]


def test_the_card_of_a_base_model_is_not_that_of_the_export(tmp_path: Path) -> None:
    folder, path = base(tmp_path / "base"), saved(tmp_path / "a.pt", weights())
    (folder / "README.md").write_text("# The base\n")
    (folder / "pytorch_model.bin").unlink()
    # A folder of config, tokenizer and a card, which somebody has made for this.
    made = ckpttool.export(path, tmp_path / "own", assets=folder)
    assert (tmp_path / "own" / "README.md").read_text() == "# The base\n" and not made.card
    # A model of its own.
    torch.save(weights(), folder / "pytorch_model.bin")
    (folder / "model.safetensors.index.json").unlink()
    (folder / "trainer_state.json").unlink()
    made = ckpttool.export(path, tmp_path / "out", assets=folder)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "The base" not in card and "| Made by | ckpttool" in card and made.card
    assert "README.md" not in made.assets and "tokenizer.json" in made.assets
    note = next(note for note in made.notes if "README.md" in note)
    assert note.startswith(f"`README.md` of `{folder}` is not copied: it is about the model there")
    ckpttool.export(path, tmp_path / "none", assets=folder, card=False)
    assert not (tmp_path / "none" / "README.md").exists()
    # The model itself, in other files: its card is about it.
    for n, assets in enumerate((None, folder)):
        ckpttool.export(folder, tmp_path / f"same{n}", assets=assets)
        assert (tmp_path / f"same{n}" / "README.md").read_text() == "# The base\n"


def test_assets_that_are_none(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", weights())
    (tmp_path / "empty").mkdir()
    for folder, why in (("nowhere", "not a directory"), ("empty", "has no config")):
        with pytest.raises(errors.UsageError, match=why):
            ckpttool.export(path, tmp_path / "out", assets=tmp_path / folder)
    (tmp_path / "empty" / "config.json").write_text("{")
    with pytest.raises(errors.CorruptError, match=r"config\.json"):
        ckpttool.export(path, tmp_path / "out", assets=tmp_path / "empty")


# The destination ------------------------------------------------------------------------------------------------------


def test_the_destination_is_whole_or_not_there(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", weights())
    plan = ckpttool.export(path, tmp_path / "out", dry_run=True)
    assert not (tmp_path / "out").exists()
    made = ckpttool.export(path, tmp_path / "out")
    assert made.files == plan.files == [(n, (tmp_path / "out" / n).stat().st_size) for n, _ in made.files]
    with pytest.raises(errors.OverwriteError):
        ckpttool.export(path, tmp_path / "out")
    ckpttool.export(path, tmp_path / "out", overwrite=True, max_shard_size=400)
    assert not (tmp_path / "out" / "model.safetensors").exists()
    with pytest.raises(errors.UsageError, match="an export is a directory"):
        ckpttool.export(path, tmp_path / "x.safetensors")
    with pytest.raises(errors.UsageError, match="source"):
        ckpttool.export(tmp_path / "out", tmp_path / "out" / "in", overwrite=True)


def test_an_embedding_and_a_head_without_rows_or_chunks(tmp_path: Path) -> None:
    """DCP may list no chunk of a tensor that has no elements."""
    path = tmp_path / "ckpt"
    state = {
        "embed_tokens.weight": torch.empty(0, 4),
        "lm_head.weight": torch.empty(0, 4),
        "norm.weight": torch.ones(4),
    }
    torch_dcp.save({"model": state}, checkpoint_id=path, no_dist=True)
    metadata = torch_dcp.FileSystemReader(path).read_metadata()
    for name in ("embed_tokens", "lm_head"):
        metadata.state_dict_metadata[f"model.{name}.weight"].chunks = []
    metadata.storage_data = {i: info for i, info in metadata.storage_data.items() if "norm" in i.fqn}
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    ckpttool.export(path, tmp_path / "out")
    assert weights_in(tmp_path / "out")["norm.weight"].tolist() == [1, 1, 1, 1]
