"""Checkpoints of other tools: each is recognised as what it is, and nothing of one is converted that is not all there.

`samples/checkpoints/other` were written by the tools themselves; what GPTQ, AWQ, DeepSeek, gpt-oss and RL trainers
leave is written here with their names, dtypes and shapes.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cli import run
from support.paths import CHECKPOINTS

import ckpttool
from ckpttool.catalogue.entries import Catalogue
from ckpttool.errors import CorruptError, ReadError
from ckpttool.producers import foreign
from ckpttool.serialization.directory import Directory

TOOLS = CHECKPOINTS / "other"
# Of the models in `samples/generators/other_tools.py`: counted by hand, tied weights once.
LLAMA = 2 * 32 * 64 + 2 * (7 * 64 * 64 + 2 * 64) + 64
WEIGHTS = 2 * 7  # that are quantised


def recognised(path: Path) -> dict[str, Any]:
    fact: dict[str, Any] = ckpttool.inspect(path).facts["recognised"]
    return fact


def warnings_of(catalogue: Catalogue) -> list[str]:
    return [str(warning) for warning in catalogue.warnings]


# Samples of the tools themselves --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "title", "parallelism", "parameters"),
    [
        ("megatron_torch_dist_tp2", "Megatron torch_dist", "2 tensor-parallel", 32 * 8 + 2 * 24 * 8),
        ("megatron_legacy_tp2", "Megatron legacy checkpoint version 3.0", "2 tensor-parallel", None),
        ("tiny.gguf", "GGUF model of llama.cpp version 3", None, 32 * 64 + 2 * (64 * 64 + 64)),
        ("orbax", "Orbax (JAX)", None, None),
        ("orbax/10/state", "Orbax (JAX)", None, None),
        ("paddle", "PaddlePaddle distributed", "1 rank", None),
        ("peft_dora", "PEFT adapter, LORA + DoRA", None, 2 * 2 * (4 * 64 * 2 + 64)),
        ("bitsandbytes_nf4", "quantised model, bitsandbytes", None, LLAMA),
        ("bitsandbytes_int8", "quantised model, bitsandbytes", None, LLAMA),
        ("torchao_int8", "quantised model, torchao", None, LLAMA),
        ("compressed_tensors_float", "quantised model, compressed-tensors", None, LLAMA),
        ("compressed_tensors_pack", "quantised model, compressed-tensors", None, LLAMA),
        ("compressed_tensors_nvfp4_pack", "quantised model, compressed-tensors", None, LLAMA),
    ],
)
def test_what_it_is(path: str, title: str, parallelism: str | None, parameters: int | None) -> None:
    fact = recognised(TOOLS / path)
    assert (fact["title"], fact["parallelism"], fact["parameters"]) == (title, parallelism, parameters)
    assert fact["can"] and fact["cannot"]
    done = run("inspect", str(TOOLS / path))
    assert done.exit_code == 0 and title in done.stdout and "not supported" in done.stdout
    document = json.loads(run("inspect", "--json", str(TOOLS / path)).stdout)
    assert document["recognised"] == fact
    assert document["parameters"] == parameters or parameters is None


@pytest.mark.parametrize("path", ["megatron_legacy_tp2", "tiny.gguf", "orbax", "paddle"])
def test_what_is_not_opened_is_refused_by_everything_else(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = str(TOOLS / path)
    title = recognised(TOOLS / path)["title"]
    for arguments in (["convert", source, "out.pt"], ["verify", source], ["diff", source, source]):
        done = run(*arguments)
        assert done.exit_code == ReadError.exit_code, done.stderr
        assert f"{title}, which `inspect` describes" in done.stderr and "hint: " in done.stderr
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("path", [path.name for path in TOOLS.iterdir() if "_nf4" in path.name or "int8" in path.name])
def test_scales_are_found(path: str) -> None:
    details = recognised(TOOLS / path)["details"]
    assert details["scales"] == f"found for {WEIGHTS} of {WEIGHTS}"
    assert run("verify", str(TOOLS / path)).exit_code == 0


def test_megatron_divides_into_parts(tmp_path: Path) -> None:
    catalogue = ckpttool.inspect(TOOLS / "megatron_torch_dist_tp2")
    of_optimizer = {t.name for t in catalogue.tensors if t.part.kind == "optimizer"}
    assert {name.split(".decoder")[0] for name in of_optimizer} == {"optimizer.state.param", "optimizer.state.exp_avg"}
    ckpttool.convert(TOOLS / "megatron_torch_dist_tp2", tmp_path / "model.pt", only=["model"])
    model = torch.load(tmp_path / "model.pt")
    generator = torch.Generator().manual_seed(0)
    layers = [torch.randn(24, 8, generator=generator).bfloat16() for _ in range(2)]
    assert model["decoder.layers.self_attention.linear_qkv.weight"].equal(torch.stack(layers))
    assert not any(name.startswith("optimizer") for name in model)


def test_the_empty_weights_of_zero_3_are_not_converted(tmp_path: Path) -> None:
    file = TOOLS / "deepspeed_zero3_w2" / "global_step2" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    with pytest.raises(CorruptError, match=r"8 weights of ZeRO-3 are in partitions"):
        ckpttool.convert(file, tmp_path / "model.safetensors", only=["model"])
    assert any("in partitions" in text for text in warnings_of(ckpttool.inspect(file)))
    ckpttool.convert(file, tmp_path / "rest.pt", drop=["model"])
    assert torch.load(tmp_path / "rest.pt", weights_only=False)["global_steps"] == 2


def without(name: str, folder: Path, remove: str) -> Path:
    shutil.copytree(TOOLS / name, folder / name)
    path = folder / name / remove
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return folder / name


@pytest.mark.parametrize(
    ("name", "remove", "expected"),
    [
        ("megatron_legacy_tp2", "iter_0000010/mp_rank_01", "mp_rank_01` is missing"),
        ("paddle", "0.metadata", "there is no `*.metadata`"),
    ],
)
def test_what_is_missing(name: str, remove: str, expected: str, tmp_path: Path) -> None:
    path = without(name, tmp_path, remove)
    assert any(expected in text for text in warnings_of(ckpttool.inspect(path))), ckpttool.inspect(path).warnings


def test_a_truncated_gguf(tmp_path: Path) -> None:
    whole = (TOOLS / "tiny.gguf").read_bytes()
    path = tmp_path / "short.gguf"
    path.write_bytes(whole[:-1000])
    assert any("truncated" in text for text in warnings_of(ckpttool.inspect(path)))
    assert run("inspect", "--strict", str(path)).exit_code == CorruptError.exit_code
    path.write_bytes(whole[:100])
    with pytest.raises(CorruptError, match="header ends at byte"):
        ckpttool.inspect(path)


# Written here, as the tools name them ---------------------------------------------------------------------------------


def fp8(out: int, width: int) -> dict[str, torch.Tensor]:
    scales = torch.ones(-(-out // 128), -(-width // 128))
    return {"weight": torch.zeros(out, width).to(torch.float8_e4m3fn), "weight_scale_inv": scales}


def gptq(out: int, width: int, bits: int = 4, group: int = 32) -> dict[str, torch.Tensor]:
    return {
        "qweight": torch.zeros(width * bits // 32, out, dtype=torch.int32),
        "qzeros": torch.zeros(width // group, out * bits // 32, dtype=torch.int32),
        "scales": torch.ones(width // group, out, dtype=torch.float16),
        "g_idx": torch.zeros(width, dtype=torch.int32),
    }


def awq(out: int, width: int, bits: int = 4, group: int = 32) -> dict[str, torch.Tensor]:
    return {
        "qweight": torch.zeros(width, out * bits // 32, dtype=torch.int32),
        "qzeros": torch.zeros(width // group, out * bits // 32, dtype=torch.int32),
        "scales": torch.ones(width // group, out, dtype=torch.float16),
    }


def modelopt(out: int, width: int) -> dict[str, torch.Tensor]:
    return {
        "weight": torch.zeros(out, width // 2, dtype=torch.uint8),
        "weight_scale": torch.ones(out, width // 16).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.ones(()),
        "input_scale": torch.ones(()),
    }


SCHEMES: dict[str, tuple[Callable[[int, int], dict[str, torch.Tensor]], dict[str, Any]]] = {
    "FP8 blocks": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "GPTQ": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32}),
    "AWQ": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32}),
    "NVFP4 (ModelOpt)": (modelopt, {"quant_method": "modelopt"}),
}


def save(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))
    return folder


def model_of(scheme: str, sizes: tuple[int, int] = (256, 192)) -> dict[str, torch.Tensor]:
    layers = {f"model.layers.{i}.mlp.up_proj": SCHEMES[scheme][0](*sizes) for i in range(3)}
    tensors = {f"{layer}.{name}": value for layer, part in layers.items() for name, value in part.items()}
    return {"model.norm.weight": torch.ones(192), **tensors}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes(scheme: str, tmp_path: Path) -> None:
    fact = recognised(save(tmp_path / "m", model_of(scheme), SCHEMES[scheme][1]))
    assert fact["parameters"] == 3 * 256 * 192 + 192
    assert fact["details"]["quantised weights"] == f"3 {scheme}"
    assert recognised(save(tmp_path / "bare", model_of(scheme)))["parameters"] == fact["parameters"]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_bits_of_gptq(bits: int, tmp_path: Path) -> None:
    tensors = {f"a.{name}": value for name, value in gptq(96, 64, bits).items()}
    assert recognised(save(tmp_path / "m", tensors))["parameters"] == 96 * 64


def test_blocks_of_gpt_oss(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    blocks = torch.zeros(4, 64, 3, 16, dtype=torch.uint8)
    tensors = {f"{name}_blocks": blocks, f"{name}_scales": torch.zeros(4, 64, 3, dtype=torch.uint8)}
    path = save(tmp_path / "m", {**tensors, f"{name}_bias": torch.ones(4, 64)}, {"quant_method": "mxfp4"})
    assert recognised(path)["parameters"] == 4 * 64 * 96 + 4 * 64


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_weight_without_its_scale_is_damage(scheme: str, tmp_path: Path) -> None:
    tensors = model_of(scheme)
    scale = next(name for name in SCHEMES[scheme][0](128, 128) if name not in ("weight", "qweight", "g_idx"))
    del tensors[f"model.layers.1.mlp.up_proj.{scale}"]
    done = run("verify", str(save(tmp_path / "m", tensors, SCHEMES[scheme][1])))
    assert done.exit_code == CorruptError.exit_code, done.stdout
    assert "1 quantised weight without its scale: `model.layers.1.mlp.up_proj." in done.stdout


def test_a_weight_without_any_scale_and_a_scale_without_its_weight(tmp_path: Path) -> None:
    tensors = model_of("FP8 blocks")
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"], tensors["model.layers.2.mlp.up_proj.weight"]
    done = run("verify", str(save(tmp_path / "m", tensors)))
    assert done.exit_code == CorruptError.exit_code
    assert "1 quantised weight without its scale: `model.layers.0.mlp.up_proj.weight`" in done.stdout
    assert "1 scale without a weight: `model.layers.2.mlp.up_proj.weight_scale_inv`" in done.stdout


def test_scales_of_another_shape(tmp_path: Path) -> None:
    tensors = model_of("FP8 blocks")
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(2, 3)
    done = run("verify", str(save(tmp_path / "m", tensors)))
    assert done.exit_code == CorruptError.exit_code
    assert "is [2, 3] for a weight of [256, 192], where [2, 2] belong" in done.stdout


def test_one_file_of_several_is_not_judged(tmp_path: Path) -> None:
    tensors = model_of("FP8 blocks")
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]
    save_file(tensors, tmp_path / "model-00001-of-00002.safetensors")
    assert run("verify", str(tmp_path / "model-00001-of-00002.safetensors")).exit_code == 0


@pytest.mark.parametrize(
    "tensors",
    [
        {
            "scales": torch.ones(3),
            "a.weight": torch.ones(4),
            "b.weight_scale": torch.ones(4),
            "b.weight": torch.ones(4),
        },
        {"a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "b.weight": torch.ones(4, 4)},
        {"a.weight": torch.ones(4, 4, dtype=torch.int8), "blocks.0.weight": torch.ones(4)},
    ],
)
def test_what_only_looks_so_is_not_quantised(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = save(tmp_path / "m", tensors)
    assert "recognised" not in ckpttool.inspect(path).facts
    assert run("verify", str(path)).exit_code == 0


def test_half_an_adapter(tmp_path: Path) -> None:
    tensors = load_file(TOOLS / "peft_dora" / "adapter_model.safetensors")
    shutil.copytree(TOOLS / "peft_dora", tmp_path / "a")
    removed = next(name for name in tensors if "lora_B" in name)
    save_file({k: v for k, v in tensors.items() if k != removed}, tmp_path / "a" / "adapter_model.safetensors")
    assert any(
        "1 adapter module has only one of lora_A and lora_B" in t for t in warnings_of(ckpttool.inspect(tmp_path / "a"))
    )


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_weight_updates(encoding: str, tmp_path: Path) -> None:
    name = "model-00000-of-00001.safetensors"
    save_file({"a.weight": torch.zeros(9, dtype=torch.uint8)}, tmp_path / name, {"a.weight": "00000001"})
    metadata = {"version": "000007", "base_version": "000006", "delta_encoding": encoding, "compression_format": "zstd"}
    index = {"metadata": metadata, "weight_map": {"a.weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    fact = recognised(tmp_path)
    assert fact["title"] == "weight update version 000007"
    assert fact["details"]["base version"] == "000006" and fact["details"]["encoding"] == encoding


def test_weight_updates_of_trl_and_slime(tmp_path: Path) -> None:
    indices = {"a.indices": torch.zeros(3, dtype=torch.int32), "a.values": torch.ones(3)}
    save_file(indices, tmp_path / "step.safetensors", {"sparse": "True", "model_version": "11"})
    assert recognised(tmp_path / "step.safetensors")["title"] == "weight update of TRL version 11"
    positions = {"__positions__": torch.zeros(8, dtype=torch.uint8), "__values__": torch.ones(3)}
    save_file(positions, tmp_path / "flush.safetensors")
    assert recognised(tmp_path / "flush.safetensors")["name"] == "weight update of slime"


def test_an_ordinary_checkpoint_has_no_recognition() -> None:
    for name in ("dcp/fsdp2_w2", "hf/llama", "torch/full"):
        path = next((CHECKPOINTS / name).glob("ckpt*"))
        assert "recognised" not in ckpttool.inspect(path).facts


# Probes ---------------------------------------------------------------------------------------------------------------


def test_steps_with_zeros_before_the_number(tmp_path: Path) -> None:
    """Names of Meta Lingua, lerobot: a folder is opened by its name, whatever number that is."""
    shutil.copytree(TOOLS / "orbax" / "10", tmp_path / "orbax" / "0010")
    shutil.copytree(TOOLS / "orbax" / "10", tmp_path / "orbax" / "009")
    fact = recognised(tmp_path / "orbax")
    assert (fact["title"], fact["details"]["step"]) == ("Orbax (JAX)", 10)
    for step in (500, 1000):
        shutil.copytree(CHECKPOINTS / "dcp" / "fsdp2_w2" / "ckpt", tmp_path / "run" / "checkpoints" / f"{step:010}")
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        catalogue = ckpttool.inspect(path)
        assert [f["step"] for f in catalogue.facts["run"]] == [500, 1000]
        assert [f["name"] for f in catalogue.facts["run"] if f["taken"]] == ["0000001000"]


def test_a_folder_whose_name_is_a_number_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "run" / "007").mkdir(parents=True)
    with pytest.raises(ReadError, match=r"contains no checkpoint of a known format \(007\)"):
        ckpttool.inspect(tmp_path / "run")
    deep = tmp_path / "deep"
    (deep / "/".join("1" * 500)).mkdir(parents=True)
    with pytest.raises(ReadError, match=r"contains no checkpoint of a known format \(1\)"):
        ckpttool.inspect(deep)


def test_data_files_in_a_folder_whose_name_is_a_number(tmp_path: Path) -> None:
    """As s3torchconnector spreads them over prefixes: `0000000000/__0_0.distcp` in the index."""
    from torch.distributed.checkpoint import FileSystemReader, load

    saved = CHECKPOINTS / "dcp" / "fsdp2_w2" / "ckpt"
    path = tmp_path / "ckpt"
    shutil.copytree(saved, path)
    metadata = FileSystemReader(str(saved)).read_metadata()
    for rank in (0, 1):
        (path / f"{rank:010}").mkdir()
        shutil.move(path / f"__{rank}_0.distcp", path / f"{rank:010}" / f"__{rank}_0.distcp")
    for info in metadata.storage_data.values():
        info.relative_path = f"{info.relative_path[2]:>010}/{info.relative_path}"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    ckpttool.convert(path, tmp_path / "out.pt", to="torch")
    found = torch.load(tmp_path / "out.pt", weights_only=False)["model"]
    expected = {f"model.{name}": torch.zeros_like(value) for name, value in found.items()}
    load(expected, storage_reader=FileSystemReader(str(path)), no_dist=True)
    assert found and all(value.equal(expected[f"model.{name}"]) for name, value in found.items())


@pytest.mark.parametrize("error", [ReadError("`somewhere/else`: cannot read: permission denied"), KeyError("step")])
def test_a_probe_that_fails_keeps_no_other_from_looking(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(directory: Directory) -> None:
        raise error

    monkeypatch.setattr(foreign, "_DIRECTORIES", ((r"\d+/", "Orbax", fails), *foreign._DIRECTORIES))
    shutil.copytree(CHECKPOINTS / "dcp" / "fsdp2_w2" / "ckpt", tmp_path / "ckpt")
    (tmp_path / "ckpt" / "0").mkdir()
    said = [w for w in ckpttool.inspect(tmp_path / "ckpt").warnings if w.kind == "not-looked"]
    assert len(said) == 1 and str(said[0]).startswith("Orbax: could not look (`")
    # What is of no known format may be what could not be looked for.
    (tmp_path / "other" / "0").mkdir(parents=True)
    with pytest.raises((ReadError, CorruptError), match=r"permission denied|KeyError: 'step'"):
        ckpttool.inspect(tmp_path / "other")
