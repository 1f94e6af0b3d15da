"""The upload of a model to the Hub: `ckpttool export` beside `hf upload` of the files that it makes, in turns.

Both are new processes, which send to one server on this machine, over LFS and over Xet; each round to a new repository,
and to an empty store. What `hf upload` does not do, the conversion of a checkpoint, is in the time of the export. On a
busy machine, the best round and the processor time tell more than the median.

    python samples/bench/hub_upload.py [MIB] [ROUNDS] [FOLDER]
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.hub_server import WRITER, Hub

WIDTH = 4096


def main() -> None:
    given = (*sys.argv[1:], *("2048", "3", "/dev/shm")[len(sys.argv) - 1 :])
    mebibytes, rounds = int(given[0]), int(given[1])
    with tempfile.TemporaryDirectory(dir=given[2]) as name:
        folder = Path(name)
        made = [sys.executable, __file__, "make", str(mebibytes), str(folder)]
        subprocess.run(made, check=True)
        for path in ("lfs", "xet"):
            compare(folder, path, rounds)


def make(mebibytes: int, folder: Path) -> None:
    """The checkpoint, saved by torch, and its export."""
    import torch
    import torch.distributed.checkpoint as dcp

    import ckpttool

    count = max(1, mebibytes * (1 << 20) // (4 * WIDTH * WIDTH))
    dcp.save({f"layers.{i}.weight": torch.randn(WIDTH, WIDTH) for i in range(count)}, checkpoint_id=folder / "ckpt")
    ckpttool.export(folder / "ckpt", folder / "model", max_shard_size="1GiB", card=False)


def serve(folder: Path) -> None:
    """The server, in a process of its own; each line that it reads empties its store."""
    hub = Hub(folder)
    print(hub.url, flush=True)
    for _ in sys.stdin:
        for store in (hub.store, hub.xet):
            shutil.rmtree(store, ignore_errors=True)
        hub.store.mkdir()
        print("empty", flush=True)


def compare(folder: Path, path: str, rounds: int) -> None:
    server = subprocess.Popen(
        [sys.executable, __file__, "serve", str(folder / path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None and server.stdout is not None
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "PYTHONDONTWRITE"))}
    environment |= {"HF_ENDPOINT": server.stdout.readline().strip(), "HF_TOKEN": WRITER, "TMPDIR": str(folder)}
    environment |= {"HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if path == "lfs":
        environment["HF_HUB_DISABLE_XET"] = "1"
    jobs = {
        "ckpttool export": [
            "-m",
            "ckpttool",
            "export",
            folder / "ckpt",
            "REPO",
            "--max-shard-size",
            "1GiB",
            "--no-card",
        ],
        "hf upload": ["-m", "huggingface_hub.cli.hf", "upload", "REPO", folder / "model"],
    }
    seconds: dict[str, list[float]] = {job: [] for job in jobs}
    processor: dict[str, list[float]] = {job: [] for job in jobs}
    for count in range(rounds + 1):
        for number, (job, words) in enumerate(jobs.items()):
            server.stdin.write("\n")
            server.stdin.flush()
            server.stdout.readline()
            shutil.rmtree(folder / "home", ignore_errors=True)
            repo = f"me/model-{count}-{number}"
            where = f"hf://{repo}" if job.startswith("ckpttool") else repo
            start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
            done = subprocess.run(
                [sys.executable, *(where if word == "REPO" else str(word) for word in words)],
                env=environment,
                capture_output=True,
                text=True,
            )
            taken, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
            worked = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            assert done.returncode == 0, done.stderr
            if count:  # the first round is not counted
                seconds[job].append(taken)
                processor[job].append(worked)
                print(f"{path}: {job}: {taken:.2f} s, {worked:.2f} s of processor", flush=True)
    ratios = {}
    for name, figures in (("seconds", seconds), ("processor", processor)):
        for kind, of in (("median", statistics.median), ("best", min)):
            ours, theirs = (of(taken) for taken in figures.values())
            ratios[f"{kind} {name}"] = round(ours / theirs, 2)
    print(json.dumps({"path": path, "ratios": ratios, "seconds": seconds, "processor": processor}), flush=True)
    server.stdin.close()
    server.wait()
    shutil.rmtree(folder / path)


if sys.argv[1:2] == ["make"]:
    make(int(sys.argv[2]), Path(sys.argv[3]))
elif sys.argv[1:2] == ["serve"]:
    serve(Path(sys.argv[2]))
else:
    main()
