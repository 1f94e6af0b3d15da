"""A reference on the Hub: `check` fetches what its headers say."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from support.hub_server import Hub, Stored

import ckpttool


def test_check_against_a_model_of_600_gb_fetches_its_headers(hub: Hub, tmp_path: Path) -> None:
    """Sparse files stand for its shards: the client and the server see their true sizes."""
    shape, nbytes = [4096, 14336], 4096 * 14336 * 2
    projections = ("gate_proj", "up_proj", "down_proj")
    files: dict[str, Stored | bytes] = {}
    every: list[str] = []
    index: dict[str, str] = {}
    for layer in range(27):
        experts = (f"model.layers.{layer}.mlp.experts.{e}.{one}.weight" for e in range(64) for one in projections)
        names, file = [*experts], f"model-{layer + 1:05}-of-00027.safetensors"
        files[file] = sparse_shard(hub.store, names, shape, nbytes)
        index |= dict.fromkeys(names, file)
        every += names
    total = nbytes * len(every)
    assert total > 600e9
    files["model.safetensors.index.json"] = json.dumps(
        {"metadata": {"total_size": total}, "weight_map": index}
    ).encode()
    hub.make("me/large")
    hub.commit("me/large", files)
    local = sparse_shard(tmp_path, every[:-1], shape, nbytes)
    assert local.sha256 is not None
    (tmp_path / local.sha256).rename(tmp_path / "x.safetensors")
    hub.seen.clear()
    found = ckpttool.check(tmp_path / "x.safetensors", "hf://me/large")
    assert [one.names for one in found.mismatches] == [[every[-1]]]
    assert found.matched == len(every) - 1
    assert sum(one.sent for one in hub.seen) < 5e6


def sparse_shard(folder: Path, names: list[str], shape: list[int], nbytes: int) -> Stored:
    entries = {
        name: {"dtype": "BF16", "shape": shape, "data_offsets": [i * nbytes, (i + 1) * nbytes]}
        for i, name in enumerate(names)
    }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    oid = hashlib.sha256(header).hexdigest()
    with open(folder / oid, "wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + nbytes * len(names))
    return Stored(8 + len(header) + nbytes * len(names), oid, "0" * 40, None)
