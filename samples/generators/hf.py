"""Samples of safetensors files and of what Hugging Face libraries write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import safetensors.torch
import torch
import torch.distributed.checkpoint as torch_dcp
import transformers
from dcp import fsdp2_run, name_save
from sample import sample
from tensors import raw
from torch.distributed.tensor import DTensor
from training import detached, seed, train


def load_single(folder: Path) -> Any:
    """Read `ckpt.safetensors` with the safetensors library."""
    return safetensors.torch.load_file(folder / "ckpt.safetensors")


def load_folder(folder: Path) -> Any:
    """Read all safetensors files of `ckpt/` with the safetensors library."""
    state: dict[str, torch.Tensor] = {}
    for path in sorted((folder / "ckpt").glob("*.safetensors")):
        state.update(safetensors.torch.load_file(path))
    return state


def untied() -> dict[str, torch.Tensor]:
    """The trained model without the second name of the tied head."""
    state = detached(train().model.state_dict())
    del state["lm_head.weight"]
    return state


SAFE_DTYPES = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "complex64",
]


@sample(
    "safetensors/single",
    what="one file: the model, a tensor of every dtype that safetensors has, user metadata",
    trap="empty and 0-d tensors, sub-byte dtype, a `__metadata__` of strings, names outside ASCII",
    writer="safetensors 0.8 `save_file`",
    load=load_single,
)
def safetensors_single(folder: Path) -> Any:
    """Everything that fits in one safetensors file."""
    state = untied()
    state |= {f"dtype.{name}": raw(getattr(torch, name), 6, first=i) for i, name in enumerate(SAFE_DTYPES)}
    state |= {"dtype.bool": torch.tensor([True, False, True]), "empty": torch.empty(3, 0, 2), "имя 🙂": torch.ones(2)}
    metadata = {"format": "pt", "step": "3", "note": 'héllo "quoted" \n line'}
    safetensors.torch.save_file(state, folder / "ckpt.safetensors", metadata=metadata)
    return state


@sample(
    "safetensors/indexed",
    what="several files and `model.safetensors.index.json`",
    trap="weight map, total size, tied head left out and noted in the metadata",
    writer="huggingface_hub 2.4 `save_torch_state_dict`, 1500 bytes a file",
    load=load_folder,
)
def safetensors_indexed(folder: Path) -> Any:
    """A model too large for one file."""
    (folder / "ckpt").mkdir()
    huggingface_hub.save_torch_state_dict(
        train().model.state_dict(), folder / "ckpt", max_shard_size=1500, metadata={"step": "3"}
    )
    return untied()


def fsdp2_model() -> tuple[dict[str, Any], dict[str, Any]]:
    """The float weights of a sharded model, as they are saved and as they are whole."""
    model = fsdp2_run()[0].model.state_dict()
    model = {key: value for key, value in model.items() if isinstance(value, DTensor) and key != "lm_head.weight"}
    return model, detached({key: value.full_tensor() for key, value in model.items()})


def load_shards(folder: Path) -> Any:
    """Put the shards of `ckpt/` together with torch's own `HuggingFaceStorageReader`."""
    reader = torch_dcp.HuggingFaceStorageReader(str(folder / "ckpt"))
    metadata = reader.read_metadata().state_dict_metadata
    state = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in metadata.items()}
    torch_dcp.load(state, storage_reader=reader, no_dist=True)
    return state


@sample(
    "hf/sharded_w2",
    what="model of 2 FSDP2 ranks, a safetensors file for each rank",
    trap="pieces, not tensors: offsets in `DCP_SHARDING_INFO` of the metadata; no index, no global shape; empty pieces",
    writer="torch 2.13 `HuggingFaceStorageWriter(save_distributed=True)`",
    load=load_shards,
    world=2,
)
def hf_sharded(folder: Path) -> Any:
    """Two files a rank, by `fqn_to_index_mapping`."""
    state, whole = fsdp2_model()
    name_save(folder)
    index = {key: 1 + (key.startswith("layers.1")) for key in state}
    writer = torch_dcp.HuggingFaceStorageWriter(str(folder / "ckpt"), index, save_distributed=True)
    torch_dcp.save(state, storage_writer=writer)
    return whole


@sample(
    "hf/consolidated_w2",
    what="model of 2 FSDP2 ranks, `sharded/` and the consolidated model above it",
    trap="header without metadata and without padding: payloads are not aligned",
    writer="torch 2.13 `HuggingFaceStorageWriter(save_distributed=True, enable_consolidation=True)`",
    load=load_folder,
    world=2,
)
def hf_consolidated(folder: Path) -> Any:
    """Floats of one dimension or more: the consolidation of torch 2.13 fails on the others."""
    state, whole = fsdp2_model()
    name_save(folder)
    index = {key: 1 + (key.startswith("layers.1")) for key in state}
    path = str(folder / "ckpt")
    writer = torch_dcp.HuggingFaceStorageWriter(path, index, save_distributed=True, enable_consolidation=True)
    torch_dcp.save(state, storage_writer=writer)
    return whole


@sample(
    "hf/llama",
    what="tiny random Llama with tied embeddings",
    trap="`lm_head.weight` is left out; `config.json` says that it is tied",
    writer="transformers 5.23 `save_pretrained`",
    load=load_folder,
)
def hf_llama(folder: Path) -> Any:
    """In bfloat16, as such models are."""
    seed()
    config = transformers.LlamaConfig(
        vocab_size=29,
        hidden_size=8,
        intermediate_size=13,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    return save_pretrained(transformers.LlamaForCausalLM(config).bfloat16(), folder)


@sample(
    "hf/gpt2",
    what="tiny random GPT-2",
    trap="`Conv1D` weights are transposed with regard to `Linear`",
    writer="transformers 5.23 `save_pretrained`",
    load=load_folder,
)
def hf_gpt2(folder: Path) -> Any:
    """In float32."""
    seed()
    config = transformers.GPT2Config(
        vocab_size=29, n_positions=11, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return save_pretrained(transformers.GPT2LMHeadModel(config), folder)


def save_pretrained(model: transformers.PreTrainedModel, folder: Path) -> dict[str, Any]:
    """Save a model with a tied head; the answer is its state dict without that head."""
    model.save_pretrained(folder / "ckpt")
    state = dict(detached(model.state_dict()))
    del state["lm_head.weight"]
    return state
