"""JSON beside tensors, as a target: the first byte of an input says which file it is, the rest is what the file says.

Each lies in a folder of small honest files of its kind, which `inspect` then reads as a whole.
"""

from __future__ import annotations

import atexit
import json
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from support.paths import CHECKPOINTS

from ckpttool.analysis.describe.document import document
from ckpttool.formats.safetensors.state_json import SCHEMA
from ckpttool.layout import key_maps
from ckpttool.operations.inspect import inspect
from ckpttool.serialization import manifest, strict_json
from ckpttool.storage.stores import locate

NAMES = ("model.layers.0.w.weight", "model.layers.0.w.scale", "lm_head.weight")
_HEADER = {
    name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [24 * n, 24 * n + 24]} for n, name in enumerate(NAMES)
}


def shard(metadata: bytes = b'{"format": "pt"}', header: dict[str, Any] | None = None) -> bytes:
    """A safetensors file, with these bytes in the place of its `__metadata__`."""
    table = json.dumps(_HEADER if header is None else header).encode()[1:]
    text = b'{"__metadata__": ' + metadata + b", " + table
    return struct.pack("<Q", len(text)) + text + bytes(72)


def _look(folder: Path) -> None:
    "".join(document(inspect(folder), "folder"))


class Side(NamedTuple):
    """A side file: its name, what lies beside it, honest ones to begin with, and what reads it."""

    name: str
    beside: dict[str, bytes]
    honest: tuple[Any, ...]
    read: Callable[[Path], object] = _look
    spelt: Callable[[bytes], bytes] = bytes  # the file with this JSON in it


_STATE = {
    "schema": SCHEMA,
    "writer": "ckpttool",
    "containers": [{"path": ["optim"], "kind": "OrderedDict", "attributes": {"a": 1}}],
}
_VALUES = [
    {"$tuple": [0.9, {"$float": "nan"}, {"$int": "0x1fffffffffffffff"}]},
    {"$dict": [[{"$tuple": [n, {"$int": hex(n * (2**61 - 1))}]}, n] for n in range(4)]},
    {"$OrderedDict": [[1, {"$frozenset": [1, 2]}]], "attributes": {"b": {"$set": [{"$bytes": "AAAA"}]}}},
    {"$call": ["a.b", "C"], "args": [{"$name": ["torch", "float32"]}], "state": [{"d": 1}], "pairs": [[1, 2]]},
    {"$function": ["torch._utils", "_rebuild_tensor_v2"]},
    {"$tuple": [{"$tensor": ["w"]}, {"$size": [2, 3]}, {"$complex": [1, 2]}, {"$str": "7aCA"}]},
]
_ENTRIES = [
    {"path": ["w"], "file": "model.safetensors", "name": NAMES[0]},
    {"path": ["v", {"$tuple": [1]}], "file": "model.safetensors", "name": NAMES[1], "embedded": True},
    *({"path": ["optim", n], "value": value} for n, value in enumerate(_VALUES)),
]
_INDEX = {"metadata": {"total_size": 72}, "weight_map": dict.fromkeys(NAMES, "model.safetensors")}
_QUANTIZED = [
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:.*": {}}},
    {"quant_method": "compressed-tensors", "config_groups": {"0": {"weights": {"num_bits": 4}, "targets": ["Linear"]}}},
]
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 3,
    "vocab_size": 2,
    "tie_word_embeddings": True,
    "dtype": "float32",
}
_CONFIGS = (_CONFIG, *({**_CONFIG, "quantization_config": one} for one in _QUANTIZED))
_ADAPTER = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj"],
    "base_model_name_or_path": "a/b",
    "rank_pattern": {"q": 4},
}
_TRAINER = {"global_step": 4, "log_history": [{"loss": 2.5, "step": 1}], "best_model_checkpoint": "checkpoint-4"}
_MANIFEST = {
    "algorithm": "sha256",
    "files": {"a": "0" * 64},
    "sizes": {"a": 3},
    "tensors": [{"name": "w", "dtype": "float32", "shape": [3, 2], "sha256": "0" * 64}],
}
_KEY_MAP = {
    "name": "mine",
    "model_types": ["m"],
    "needs": ["w"],
    "never": ["x"],
    "rules": [
        {"from": "v.{n}", "to": ["m.{n}.{e}", "b"]},
        {"from": "u*", "to": None},
        {"from": "h", "to": "k", "rows": "halves"},
    ],
}
_TIES = {"format": "pt", "tied": NAMES[0], "lm_head": NAMES[2], "DCP_VERSION": "1.0"}
_OFFSETS = {name: {"saved_offsets": [0, 0]} for name in NAMES}

_MODEL = {"model.safetensors": shard()}
_STEP = "checkpoint-4/"
SIDES = (
    Side("ckpttool.json", _MODEL, ({**_STATE, "entries": _ENTRIES},)),
    Side("model.safetensors.index.json", _MODEL, (_INDEX,)),
    Side("config.json", _MODEL, _CONFIGS),
    Side("adapter_config.json", {"adapter_model.safetensors": shard()}, (_ADAPTER,)),
    Side(f"{_STEP}trainer_state.json", {f"{_STEP}model.safetensors": shard()}, (_TRAINER,)),
    Side("metadata.json", _MODEL, ({"sharded_backend": "torch_dist", "sharded_backend_version": 1},)),
    Side("integrity.json", {}, (_MANIFEST,), lambda folder: manifest.read(locate(str(folder / "integrity.json")))),
    Side("map.json", {}, (_KEY_MAP,), lambda folder: key_maps.parse(_parsed(folder / "map.json"), "map.json")),
    Side("model.safetensors", {}, (_TIES,), spelt=shard),
    Side(
        "sharded/shard-00001-model-00001-of-00001.safetensors",
        {},
        (_OFFSETS,),
        spelt=lambda text: shard(json.dumps({"DCP_SHARDING_INFO": text.decode("utf-8", "replace")}).encode()),
    ),
    Side("fsdp_config.json", {}, (json.loads((CHECKPOINTS / "rank/verl_fsdp1_w1/ckpt/fsdp_config.json").read_text()),)),
)


WHOLE = next(n for n, side in enumerate(SIDES) if side.name == "model.safetensors")


def _parsed(path: Path) -> Any:
    return strict_json.parse(path.read_bytes(), "map.json")


@cache
def _folder(kind: int) -> Path:
    """One for each kind, removed when the process ends."""
    root = Path(tempfile.mkdtemp(prefix="side-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    side = SIDES[kind]
    if side.name == "fsdp_config.json":
        shutil.copytree(CHECKPOINTS / "rank/verl_fsdp1_w1/ckpt", root, dirs_exist_ok=True)
    for name, data in side.beside.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    (root / side.name).parent.mkdir(parents=True, exist_ok=True)
    return root


def read(data: bytes) -> None:
    """Read such a file."""
    kind = (data[0] if data else 0) % len(SIDES)
    side, folder = SIDES[kind], _folder(kind)
    (folder / side.name).write_bytes(side.spelt(data[1:]))
    side.read(folder)


def look_at(data: bytes) -> None:
    """Read a safetensors file as `inspect` does."""
    (path := _folder(WHOLE) / SIDES[WHOLE].name).write_bytes(data)
    _look(path)


def seeds() -> Iterator[bytes]:
    """An honest one of each."""
    return (bytes((n,)) + json.dumps(one).encode() for n, side in enumerate(SIDES) for one in side.honest)
