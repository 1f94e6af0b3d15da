"""Times DeepSpeed's own converters and ckpttool on one checkpoint of ZeRO-3: `python samples/bench/zero.py [FOLDER]`.

The checkpoint has 4 ranks and 1 GiB of float32 weights and moments, in files as `stage3.py` of DeepSpeed 0.19 saves.
Where DeepSpeed is not installed, only ckpttool is timed. `make bench` installs it beside the other packages.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

RANKS, LAYERS, WIDTH = 4, 12, 768
REPEATS = 3


def shapes() -> OrderedDict[str, Any]:
    import torch

    found: OrderedDict[str, torch.Size] = OrderedDict({"embed.weight": torch.Size((5000, WIDTH))})
    for i in range(LAYERS):
        for name in ("q", "k", "v", "o"):
            found[f"layers.{i}.attention.{name}.weight"] = torch.Size((WIDTH, WIDTH))
        found[f"layers.{i}.up.weight"] = torch.Size((4 * WIDTH, WIDTH))
        found[f"layers.{i}.down.weight"] = torch.Size((WIDTH, 4 * WIDTH))
        found[f"layers.{i}.norm.weight"] = torch.Size((WIDTH,))
    return found


def write(folder: Path) -> None:
    """Write the checkpoint, to `run` in a folder."""
    import torch

    step, params = folder / "run" / "global_step2", shapes()
    step.mkdir(parents=True)
    part = sum(-(-shape.numel() // RANKS) for shape in params.values())
    for rank in range(RANKS):
        flat = [torch.randn(part, generator=torch.Generator().manual_seed(3 * rank + i)) for i in range(3)]
        state = {"step": torch.tensor(2.0), "exp_avg": flat[1], "exp_avg_sq": flat[2].abs()}
        inner = {"state": {0: state}, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0]}]}
        optimizer = {"zero_stage": 3, "partition_count": RANKS, "optimizer_state_dict": inner}
        optimizer |= {"fp32_flat_groups": [flat[0]], "overflow": False}
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": optimizer, "ds_version": "0.19.8"}, step / f"{name}_optim_states.pt")
        module = {one: torch.empty(0, dtype=torch.bfloat16) for one in params}
        counters = {"global_steps": 2, "dp_world_size": RANKS, "mp_world_size": 1, "skipped_steps": 0}
        model: dict[str, Any] = {"module": module, "buffer_names": [], "param_shapes": [params], "shared_params": {}}
        model |= {"frozen_param_shapes": None, "frozen_param_fragments": None, "ds_version": "0.19.8", **counters}
        torch.save(model, step / f"{name}_model_states.pt")
    (folder / "run" / "latest").write_text("global_step2")


def timed(command: list[str], result: Path) -> tuple[float, float, float]:
    """Return the best of the seconds that a command takes, of those of processors, and the most memory in MiB of a
    process of it."""
    seconds, processor, memory = [], [], 0.0
    for _ in range(REPEATS):
        shutil.rmtree(result, ignore_errors=True)
        result.unlink(missing_ok=True)
        start = time.perf_counter()
        pid = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid
        _, status, usage = os.wait4(pid, 0)
        seconds.append(time.perf_counter() - start)
        processor.append(usage.ru_utime + usage.ru_stime)
        memory = max(memory, usage.ru_maxrss / 1024)
        assert status == 0, command
    return min(seconds), min(processor), memory


def main(folder: Path) -> None:
    # In another process: what a process takes counts what the one took that started it.
    subprocess.run([sys.executable, __file__, "--write", str(folder)], check=True)
    run = folder / "run"
    size = sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
    print(f"{size / 2**30:.2f} GiB in {RANKS} ranks, best of {REPEATS}; memory of the largest process")
    ours, python = [sys.executable, "-m", "ckpttool"], sys.executable
    weights, universal = folder / "out.safetensors", folder / "global_step2_universal"
    to_universal = [*ours, "convert", str(run), str(universal), "--producer", "deepspeed:universal"]
    jobs = {
        "weights: ckpttool convert --only model": (
            [*ours, "convert", str(run), str(weights), "--only", "model"],
            weights,
        ),
        "universal: ckpttool convert --producer deepspeed:universal": (to_universal, universal),
    }
    for stage in (2, 3):
        layout = ["--producer", f"deepspeed:zero{stage}", "--to-world", "3"]
        command = [*ours, "convert", str(run), str(folder / "other"), *layout]
        jobs[f"another world: ckpttool convert {' '.join(layout)}"] = (command, folder / "other")
    if importlib.util.find_spec("deepspeed") is not None:
        places = ["--input_folder", str(run / "global_step2"), "--output_folder", str(universal)]
        merge = [python, "-m", "deepspeed.checkpoint.ds_to_universal", *places]
        theirs = [python, "-m", "deepspeed.utils.zero_to_fp32", str(run), str(folder / "fp32"), "--safe_serialization"]
        jobs["weights: zero_to_fp32.py --safe_serialization"] = (theirs, folder / "fp32")
        jobs["universal: ds_to_universal.py"] = (merge, universal)
    for name, (command, result) in sorted(jobs.items()):
        seconds, processor, memory = timed(command, result)
        print(f"  {name:72} {seconds:6.2f} s  {processor:6.2f} s of processors  {memory:6.0f} MiB")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        write(Path(sys.argv[2]))
        raise SystemExit
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as scratch:
        main(Path(scratch))
