"""`ckpttool export` of models of diffusers and sentence-transformers: names and folders are those that these write.

The lists of files were written by diffusers 0.42.1 and sentence-transformers 6.2.0 from models of the same shape.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.weights_read import same, weights_in

import ckpttool
from ckpttool.errors import UsageError
from ckpttool.models import architecture, architecture_process, float32_names


def saved(path: Path, model: dict[str, torch.Tensor]) -> Path:
    """A training state."""
    torch.save({"model": model, "optimizer": {"state": {}, "param_groups": []}, "epoch": 3}, path)
    return path


def files(folder: Path) -> set[str]:
    """The names of all files below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("x.gguf", "convert_hf_to_gguf.py"),
        ("x.pt", "x.pt --only model"),
        ("x.BIN", "x.BIN --only model"),
        ("x.onnx", "optimum-cli export onnx"),
        ("x.safetensors", "x.safetensors --only model"),
    ],
)
def test_a_name_of_a_file_is_no_directory(name: str, hint: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "a.pt", {"w": torch.ones(2)})
    with pytest.raises(UsageError, match="an export is a directory") as caught:
        ckpttool.export(source, tmp_path / name)
    assert hint in str(caught.value.hint)
    assert files(tmp_path) == {"a.pt"}
    ckpttool.export(source, f"{tmp_path / name}/")
    assert f"{name}/model.safetensors" in files(tmp_path)


# diffusers ------------------------------------------------------------------------------------------------------------

UNET = {"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.42.1", "sample_size": 8}


def unet() -> dict[str, torch.Tensor]:
    """A part of a UNet."""
    torch.manual_seed(8)
    return {"conv_in.weight": torch.randn(8, 4, 3, 3), "conv_in.bias": torch.randn(8), "conv_out.bias": torch.randn(4)}


def test_the_files_of_a_model_of_diffusers(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(UNET))
    source = saved(tmp_path / "a.pt", unet())
    ckpttool.export(source, tmp_path / "one", assets=tmp_path / "base", check=True)
    assert files(tmp_path / "one") == {"config.json", "diffusion_pytorch_model.safetensors", "README.md"}
    assert "library_name: diffusers" in (tmp_path / "one" / "README.md").read_text()
    ckpttool.export(source, tmp_path / "two", assets=tmp_path / "base", max_shard_size=1160, card=False, check=True)
    assert files(tmp_path / "two") == {
        "config.json",
        "diffusion_pytorch_model-00001-of-00002.safetensors",
        "diffusion_pytorch_model-00002-of-00002.safetensors",
        "diffusion_pytorch_model.safetensors.index.json",
    }
    assert same(weights_in(tmp_path / "one"), unet()) and same(weights_in(tmp_path / "two"), unet())


# Dtypes ---------------------------------------------------------------------------------------------------------------


def routed(kind: str) -> Any:
    """A tiny model of transformers with experts, whose routers have a bias."""
    import transformers

    torch.manual_seed(7)
    names = "hidden_size intermediate_size moe_intermediate_size n_routed_experts num_attention_heads num_hidden_layers"
    ones = "num_key_value_heads num_experts_per_tok n_group topk_group first_k_dense_replace"
    sizes = dict(zip(names.split(), (16, 16, 8, 8, 2, 2), strict=True)) | dict(
        zip(ones.split(), (2, 2, 2, 1, 1), strict=True)
    )
    sizes |= {"vocab_size": 32, "max_position_embeddings": 32}
    own = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 4}
    more = own if kind == "DeepseekV3" else {"head_dim": 8}
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes, **more))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.01)
    return model.eval()


BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("DeepseekV3", "bfloat16"),
        pytest.param("DeepseekV3", "float16", marks=pytest.mark.long),
        pytest.param("Glm4Moe", "bfloat16", marks=pytest.mark.long),
        pytest.param("Glm4Moe", "float16", marks=pytest.mark.long),
    ],
)
def test_what_transformers_keeps_in_float32_stays(
    kind: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = routed(kind)
    model.save_pretrained(tmp_path / "base")
    source = saved(tmp_path / "a.pt", model.state_dict())
    own = type(model).from_pretrained(tmp_path / "base", dtype=getattr(torch, dtype))
    own.save_pretrained(tmp_path / "own")
    # In this process, which has imported transformers.
    made = ckpttool.export(source, tmp_path / "out", assets=tmp_path / "base", dtype=dtype)
    assert made.compared and same(weights_in(tmp_path / "out"), weights_in(tmp_path / "own"))
    assert any(BIAS in note and "transformers" in note and "--dtype-strict" in note for note in made.notes)
    loaded, tokens = type(model).from_pretrained(tmp_path / "out", dtype="auto"), torch.arange(16)[None]
    assert loaded.dtype == own.dtype and torch.equal(loaded(tokens).logits, own(tokens).logits)
    made = ckpttool.export(source, tmp_path / "strict", assets=tmp_path / "base", dtype=dtype, dtype_strict=True)
    assert weights_in(tmp_path / "strict")[BIAS].dtype == getattr(torch, dtype)
    # The list, for where transformers is not installed or does not run the code that a config names.
    stays = float32_names.kept(model.config.architectures[0], dtype)
    found = weights_in(tmp_path / "own")
    assert (
        [name for name in found if stays(name)] == [n for n, t in found.items() if t.dtype == torch.float32] == [BIAS]
    )


@pytest.mark.parametrize(
    "name", ["LlamaForTokenClassification", pytest.param("LlavaForConditionalGeneration", marks=pytest.mark.long)]
)
def test_a_model_inside_another_is_cast_with_it(name: str, tmp_path: Path) -> None:
    """Its class is made by the config, whose dtype is that of the training."""
    import transformers
    from support import tiny_models

    kind = getattr(transformers, name)
    model = kind(tiny_models.config(kind.config_class.model_type))
    model.save_pretrained(tmp_path / "base")
    source = saved(tmp_path / "a.pt", model.state_dict())
    own = kind.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    own.save_pretrained(tmp_path / "own")
    made = ckpttool.export(source, tmp_path / "out", assets=tmp_path / "base", dtype="bfloat16")
    assert same(weights_in(tmp_path / "out"), weights_in(tmp_path / "own"))
    assert not any("--dtype-strict" in note for note in made.notes)


def test_what_transformers_4_would_round_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its class of DeepSeek-V3 does not say that the bias stays float32, and what it wrote is loaded by 5, too."""
    import transformers

    model = routed("DeepseekV3")
    model.save_pretrained(tmp_path / "base")
    source = saved(tmp_path / "a.pt", model.state_dict())
    monkeypatch.setattr(transformers, "__version__", "4.57.6")
    monkeypatch.setattr(architecture_process, "_float32_patterns", lambda model, dtype: [])
    made = ckpttool.export(source, tmp_path / "out", assets=tmp_path / "base", dtype="bfloat16")
    assert made.compared and any(BIAS in note and "--dtype-strict" in note for note in made.notes)
    assert torch.equal(weights_in(tmp_path / "out")[BIAS], model.state_dict()[BIAS])
    ckpttool.export(source, tmp_path / "all", assets=tmp_path / "base", dtype="bfloat16", dtype_strict=True)
    assert weights_in(tmp_path / "all")[BIAS].dtype == torch.bfloat16


@pytest.mark.long
def test_the_list_has_what_each_class_of_transformers_says() -> None:
    """Also the classes that cannot be built of a default config."""
    transformers = pytest.importorskip("transformers")
    missing, count = [], 0
    for name, module in transformers._class_to_module.items():
        # Those whose names are in a list of architectures; the base of a family is not.
        if ".modeling_" not in module or not name[:1].isupper() or name.endswith("PreTrainedModel"):
            continue
        with contextlib.suppress(ImportError, RuntimeError):  # of libraries of sounds, which are not here
            kind = getattr(transformers, name)
            half, both = (getattr(kind, f"_keep_in_fp32_modules{end}", None) or () for end in ("", "_strict"))
            for word, dtype in [(word, "float16") for word in {*half, *both}] + [(word, "bfloat16") for word in both]:
                stays = float32_names.kept(name, dtype)
                count += 1
                if not (stays(f"model.{word}.weight") or stays(f"model.{word}")):
                    missing.append((name, word, dtype))
    assert count > 600 and not missing


@pytest.mark.parametrize(
    ("config", "dtype", "kept"),
    [
        ({"architectures": ["DeepseekV3ForCausalLM"], "auto_map": {"AutoModel": "m.M"}}, ["bfloat16"], {BIAS}),
        ({"architectures": ["T5ForConditionalGeneration"]}, ["float16"], {"wo.weight"}),
        ({"architectures": ["T5ForConditionalGeneration"]}, ["bfloat16"], set()),
        ({"_class_name": "WanTransformer3DModel"}, ["bfloat16"], {"blocks.0.norm1.weight"}),
        ({}, ["bfloat16"], {BIAS}),
        ({}, ["bfloat16", f"{BIAS}=bfloat16"], set()),
        ({}, ["float32"], {BIAS, "wo.weight", "blocks.0.norm1.weight", "half"}),
    ],
)
def test_without_transformers_a_list_says_what_stays(
    config: dict[str, Any], dtype: list[str], kept: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(architecture, "find_spec", lambda name: None)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    names = {BIAS, "wo.weight", "blocks.0.norm1.weight"}
    model = {**{name: torch.tensor([1.003, 7.1]) for name in sorted(names)}, "half": torch.ones(2).bfloat16()}
    made = ckpttool.export(saved(tmp_path / "a.pt", model), tmp_path / "out", assets=tmp_path / "base", dtype=dtype)
    found = weights_in(tmp_path / "out")
    assert {name for name, tensor in found.items() if tensor.dtype == torch.float32} == kept
    assert all(torch.equal(found[name], model[name].to(found[name].dtype)) for name in model)
    assert any("--dtype-strict" in note for note in made.notes) == (bool(kept) and dtype != ["float32"])


@pytest.mark.parametrize(
    ("model", "scales"),
    [
        ({"l.weight": torch.ones(8, 8).to(torch.float8_e4m3fn), "l.weight_scale_inv": torch.rand(1, 1)}, 1),
        ({"l.weight": torch.ones(8, 8).to(torch.int8), "l.SCB": torch.rand(8)}, 1),
        (
            {
                "l.weight": torch.ones(32, 1).to(torch.uint8), "l.weight.absmax": torch.rand(1),
                "l.weight.quant_map": torch.rand(16),
                "l.weight.quant_state.bitsandbytes__nf4": torch.ones(80).to(torch.uint8),
            },
            2,
        ),
        (
            {
                "l.qweight": torch.ones(1, 8).int(), "l.qzeros": torch.ones(1, 1).int(),
                "l.scales": torch.rand(1, 8).half(), "l.g_idx": torch.arange(8).int(),
            },
            1,
        ),
    ],
)  # fmt: skip
def test_scales_of_quantised_weights_are_not_rounded(
    model: dict[str, torch.Tensor], scales: int, tmp_path: Path
) -> None:
    source = saved(tmp_path / "a.pt", {**model, "norm.weight": torch.rand(8)})
    made = ckpttool.export(source, tmp_path / "out", dtype="bfloat16")
    found = weights_in(tmp_path / "out")
    assert found.pop("norm.weight").dtype == torch.bfloat16
    assert same(found, model)
    assert any(note.startswith(f"{scales} scale") and "--dtype-strict" in note for note in made.notes)
    ckpttool.export(source, tmp_path / "named", dtype=["bfloat16", "l.*=float64"])
    assert any(value.dtype == torch.float64 for value in weights_in(tmp_path / "named").values())
    ckpttool.export(source, tmp_path / "strict", dtype="bfloat16", dtype_strict=True)
    kinds = {value.dtype for value in weights_in(tmp_path / "strict").values() if value.dtype.itemsize > 1}
    assert {kind for kind in kinds if kind.is_floating_point} == {torch.bfloat16}
    made = ckpttool.convert(source, tmp_path / "b.pt", dtype="bfloat16")
    found = torch.load(tmp_path / "b.pt")["model"]
    assert found.pop("norm.weight").dtype == torch.bfloat16
    assert same(found, model)
    assert any(note.startswith(f"{scales} scale") and "=bfloat16'" in note for note in made.notes)


def test_convert_says_what_it_rounds(tmp_path: Path) -> None:
    source = saved(tmp_path / "a.pt", {BIAS: torch.tensor([1.003]), "w": torch.ones(2)})
    made = ckpttool.convert(source, tmp_path / "b.pt", dtype="bfloat16")
    assert any(BIAS in note and "--dtype '*e_score_correction_bias=float32'" in note for note in made.notes)
    made = ckpttool.convert(source, tmp_path / "c.pt", dtype=["bfloat16", "*e_score_correction_bias=float32"])
    assert not [note for note in made.notes if BIAS in note]
    assert torch.load(tmp_path / "c.pt")["model"][BIAS].dtype == torch.float32


# Directories of several models ----------------------------------------------------------------------------------------


def pipeline(folder: Path) -> Path:
    """A pipeline with the files that StableDiffusionPipeline.save_pretrained writes, in small."""
    index = {
        "_class_name": "StableDiffusionPipeline", "_diffusers_version": "0.42.1", "feature_extractor": [None, None],
        "requires_safety_checker": False, "scheduler": ["diffusers", "PNDMScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"], "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"], "vae": ["diffusers", "AutoencoderKL"],
    }  # fmt: skip
    texts: dict[str, Any] = {
        "model_index.json": index, "scheduler/scheduler_config.json": {}, "text_encoder/config.json": {},
        "tokenizer/tokenizer.json": {}, "tokenizer/tokenizer_config.json": {}, "unet/config.json": UNET,
        "vae/config.json": {"_class_name": "AutoencoderKL"},
    }  # fmt: skip
    for name, value in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(value))
    save_file({name: tensor * 0 for name, tensor in unet().items()}, folder / PIPELINE_UNET)
    save_file({"encoder.weight": torch.ones(3)}, folder / "vae" / "diffusion_pytorch_model.safetensors")
    save_file({"text_model.weight": torch.ones(4)}, folder / "text_encoder" / "model.safetensors")
    return folder


PIPELINE_UNET = "unet/diffusion_pytorch_model.safetensors"


def test_a_pipeline_goes_along_with_its_component(tmp_path: Path) -> None:
    base = pipeline(tmp_path / "base")
    (base / "unet" / "diffusion_pytorch_model.fp16.safetensors").write_bytes(b"a variant")
    made = ckpttool.export(saved(tmp_path / "a.pt", unet()), tmp_path / "out", assets=base, check=True)
    wanted = files(base) - {"unet/diffusion_pytorch_model.fp16.safetensors"}
    assert files(tmp_path / "out") == wanted | {"README.md"}
    assert same(load_file(tmp_path / "out" / PIPELINE_UNET), unet())
    others = wanted - {PIPELINE_UNET}
    assert all((tmp_path / "out" / name).read_bytes() == (base / name).read_bytes() for name in others)
    assert set(made.assets) == others


def test_a_pipeline_that_would_not_load_is_refused(tmp_path: Path) -> None:
    base = pipeline(tmp_path / "base")
    source, out = saved(tmp_path / "a.pt", unet()), tmp_path / "out"
    with pytest.raises(UsageError, match="no component of this pipeline has these tensors"):
        ckpttool.export(saved(tmp_path / "b.pt", {"w": torch.ones(2)}), out, assets=base)
    (base / "vae" / "diffusion_pytorch_model.safetensors").rename(base / "vae" / "diffusion_pytorch_model.bin")
    with pytest.raises(UsageError, match="the weights of `vae` are not safetensors"):
        ckpttool.export(source, out, assets=base)
    shutil.rmtree(base / "vae")
    with pytest.raises(UsageError, match="names `vae`, and there is no such folder"):
        ckpttool.export(source, out, assets=base)
    shutil.copytree(base / "unet", base / "vae")
    with pytest.raises(UsageError, match="2 components of this pipeline have these tensors") as caught:
        ckpttool.export(source, out, assets=base)
    assert f"--assets {base}/unet" in str(caught.value.hint) and not out.exists()
    ckpttool.export(source, out, assets=base / "unet")
    assert files(out) == {"config.json", "diffusion_pytorch_model.safetensors", "README.md"}


def sentences(folder: Path, path: str = "") -> Path:
    """A model with the files that SentenceTransformer.save writes, in small; `path` is that of its first module."""
    kinds = ["base.modules.transformer.Transformer", "sentence_transformer.modules.pooling.Pooling"]
    kinds += ["base.modules.dense.Dense", "base.modules.normalize.Normalize"]
    paths = [path, "1_Pooling", "2_Dense", "3_Normalize"]
    modules = [
        {"idx": number, "name": str(number), "path": where, "type": f"sentence_transformers.{kind}"}
        for number, (where, kind) in enumerate(zip(paths, kinds, strict=True))
    ]
    texts: dict[str, Any] = {
        "modules.json": modules, "config_sentence_transformers.json": {}, "1_Pooling/config.json": {},
        "2_Dense/config.json": {"in_features": 4}, "sentence_bert_config.json": {},
        f"{path}/config.json".lstrip("/"): {"model_type": "own", "dtype": "float32"},
    }  # fmt: skip
    for name, value in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(value))
    save_file({"linear.weight": torch.zeros(2, 4)}, folder / "2_Dense" / "model.safetensors")
    return folder


@pytest.mark.parametrize("path", ["", "0_Transformer"])
@pytest.mark.parametrize("inner", ["model.", "auto_model.", None])
def test_the_modules_of_a_sentence_transformer(path: str, inner: str | None, tmp_path: Path) -> None:
    base = sentences(tmp_path / "base", path)
    bert = {"embeddings.weight": torch.randn(5, 4), "encoder.weight": torch.randn(4, 4)}
    state = bert if inner is None else {f"0.{inner}{name}": tensor for name, tensor in bert.items()}
    dense = {"linear.weight": torch.randn(2, 4)}
    if inner is not None:
        state |= {f"2.{name}": tensor for name, tensor in dense.items()}
    made = ckpttool.export(saved(tmp_path / "a.pt", state), tmp_path / "out", assets=base, dtype="bfloat16", check=True)
    where = f"{path}/" if path else ""
    assert files(tmp_path / "out") == files(base) | {f"{where}model.safetensors", "README.md"}
    rounded = {name: tensor.bfloat16() for name, tensor in bert.items()}
    assert same(load_file(tmp_path / "out" / f"{where}model.safetensors"), rounded)
    found = load_file(tmp_path / "out" / "2_Dense" / "model.safetensors")
    assert same(found, {"linear.weight": dense["linear.weight"].bfloat16() if inner else torch.zeros(2, 4)})
    assert json.loads((tmp_path / "out" / f"{where}config.json").read_text())["dtype"] == "bfloat16"
    assert any("the weights of `2_Dense` are copied" in note for note in made.notes) == (inner is None)


@pytest.mark.parametrize(
    ("state", "modules", "gone", "why"),
    [
        (["w"], {}, "2_Dense/model.safetensors", "`2_Dense` has no weights, and neither has the checkpoint"),
        (["w"], {}, "1_Pooling/config.json", "names `1_Pooling`, and there is no such folder"),
        (["0.model.w", "2.other"], {}, None, "the tensors of module `2` are not those of `2_Dense`"),
        (["2.linear.weight"], {}, None, "none of `0`"),
        (["w"], {"path": "../x"}, None, "points outside of it"),
        (["w"], {"type": "sentence_transformers.models.Router"}, None, "has a Router"),
    ],
)
def test_a_sentence_transformer_that_would_not_load_is_refused(
    state: list[str], modules: dict[str, str], gone: str | None, why: str, tmp_path: Path
) -> None:
    base = sentences(tmp_path / "base")
    listed = json.loads((base / "modules.json").read_text())
    listed[1] |= modules
    (base / "modules.json").write_text(json.dumps(listed))
    if gone is not None:
        (base / gone).unlink()
        if not [*(base / gone).parent.iterdir()]:
            (base / gone).parent.rmdir()
    source = saved(tmp_path / "a.pt", {name: torch.ones(2) for name in state})
    with pytest.raises(UsageError) as caught:
        ckpttool.export(source, tmp_path / "out", assets=base)
    assert why in str(caught.value) and not (tmp_path / "out").exists()


def test_transformers_4_writes_other_names_than_those_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `save_pretrained` of 4.57.6 did with the mapping of Qwen2.5-VL and of Llava."""
    from transformers import modeling_utils

    from ckpttool.models import architecture_process

    class QwenVLLike:
        _checkpoint_conversion_mapping: ClassVar = {
            "^visual": "model.visual",
            r"^model(?!\.(language_model|visual))": "model.language_model",
        }

    class Plain(QwenVLLike):
        pass

    Plain.__mro__[1].__name__ = "Qwen2_5_VLForConditionalGeneration"
    monkeypatch.setattr(modeling_utils, "VLMS", ["qwen2_5_vl"], raising=False)
    monkeypatch.setitem(sys.modules, "transformers.core_model_loading", None)
    names = {
        "model.visual.blocks.0.attn.qkv.weight": "visual.blocks.0.attn.qkv.weight",
        "model.language_model.layers.0.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight",
        "lm_head.weight": "lm_head.weight",
    }
    for kind in (Plain, QwenVLLike):
        found = architecture_process._in_files(kind(), dict.fromkeys(names, 1))
        assert list(found) == list(names.values())
    monkeypatch.setattr(modeling_utils, "VLMS", ["llava"])
    assert list(architecture_process._in_files(Plain(), dict.fromkeys(names, 1))) == list(names)
