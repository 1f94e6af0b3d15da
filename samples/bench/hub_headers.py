"""The headers of 60 shards on the Hub: ckpttool beside `get_safetensors_metadata` of huggingface_hub, in turns.

Both ask one server on this machine, which waits 50 ms before each answer. The first round is not counted.

    python samples/bench/hub_headers.py [SHARDS] [MILLISECONDS] [ROUNDS]
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.hub_server import WRITER, Handler, Hub

import ckpttool


def main() -> None:
    shards, milliseconds, rounds = (int(given) for given in (*sys.argv[1:], *("60", "50", "3")[len(sys.argv) - 1 :]))
    import torch
    from safetensors.torch import save

    def late(handler: Handler) -> bool:
        time.sleep(milliseconds / 1000)
        return False

    with tempfile.TemporaryDirectory() as folder:
        hub = Hub(Path(folder, "hub"))
        os.environ |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": WRITER, "HF_HOME": folder, "HF_HUB_DISABLE_XET": "1"}
        files: dict[str, bytes] = {"config.json": b"{}"}
        weight_map = {}
        for i in range(shards):
            name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            files[name] = save({f"layers.{i}.weight": torch.randn(256, 256)}, {"format": "pt"})
            weight_map[f"layers.{i}.weight"] = name
        index = {"metadata": {"total_size": shards << 18}, "weight_map": weight_map}
        files["model.safetensors.index.json"] = json.dumps(index).encode()
        hub.make("me/model", files)
        for method in ("GET", "HEAD", "POST"):
            hub.fail(method, "^/", act=late)
        from huggingface_hub import get_safetensors_metadata

        seconds: dict[str, list[float]] = {}
        jobs: dict[str, Any] = {
            "ckpttool": lambda: ckpttool.inspect("hf://me/model"),
            "get_safetensors_metadata": lambda: get_safetensors_metadata("me/model"),
        }
        for count in range(rounds + 1):
            for job, do in jobs.items():
                hub.seen.clear()
                start = time.perf_counter()
                do()
                if count:
                    seconds.setdefault(job, []).append(time.perf_counter() - start)
                    print(f"{job}: {seconds[job][-1]:.2f} s, {len(hub.seen)} requests", flush=True)
        medians = {job: statistics.median(taken) for job, taken in seconds.items()}
        print(json.dumps(medians), f"ratio {medians['ckpttool'] / medians['get_safetensors_metadata']:.2f}")
        hub.close()


main()
