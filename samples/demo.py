"""Train with FSDP2, save with DCP, inspect, convert, read everything back with the upstream libraries, and train on.

    python samples/demo.py [--dir DIR] [--check]

    torchrun demo_train.py     2 ranks    -> run/dcp, reference.pt
    ckpttool inspect, convert             -> run/safetensors, run/model.safetensors, run/full.pt, ...
    torchrun demo_readback.py  2 ranks    -> readings.json, shown as a table
    ckpttool verify-resume trial          2 ranks, then 4 and 1 through safetensors -> trial-on-4.html, trial-on-1.html

Each step is one line; what its command printed goes to log.txt, and to the screen if it fails.

The exit code is 0 only when every tensor and every object of every reading is equal to the reference, which torch made
in the training processes before anything of ours ran, and training resumes exactly.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

HERE = Path(__file__).resolve().parent
MARK = ".made-by-demo"
LOG = "log.txt"
RANKS = 2
COMMANDS = (
    "inspect run/dcp",
    "convert run/dcp run/safetensors --to safetensors",
    "convert run/dcp run/model.safetensors --only model",
    "convert run/dcp run/full.pt --to torch",
    f"convert run/full.pt run/dcp-again --to dcp --to-world {RANKS}",
    "convert run/safetensors run/full-again.pt --to torch",
)
READINGS = 7
RESUMED_ON = (4, 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the answer is the exit code."""
    parser = argparse.ArgumentParser(description="Train, save, inspect, convert, read back, compare, train on.")
    parser.add_argument("--dir", type=Path, default=Path("demo"), help="where everything goes (%(default)s)")
    parser.add_argument("--check", action="store_true", help="only read back what an earlier run left in DIR")
    options = parser.parse_args(arguments)
    folder: Path = options.dir
    began = time.monotonic()
    try:
        if options.check:
            require_ours(folder)
        else:
            make(folder)
        (folder / "readings.json").unlink(missing_ok=True)
        torchrun(f"read everything back with the upstream libraries, on {RANKS} ranks", "demo_readback.py", folder)
    except subprocess.CalledProcessError:
        return 1
    last, equal = report(json.loads((folder / "readings.json").read_text()))
    resumed = [resume(folder, ranks) for ranks in RESUMED_ON if not options.check]
    exact = all(resumed)
    say(painted(f"\n{last}", equal))
    if resumed:
        verdict = "exact resume" if exact else "resume is not exact"
        say(painted(f"trained on {RANKS} ranks, resumed on {' and '.join(map(str, RESUMED_ON))}: {verdict}", exact))
    say(f"{time.monotonic() - began:.0f} s; what each command printed is in {folder / LOG}")
    if resumed:
        say(f"open {page_of(folder, RESUMED_ON[0])} for the report of the resume")
    return 0 if equal and exact else 1


def make(folder: Path) -> None:
    """Train and save, then inspect and convert, each command as a person would type it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        require_ours(folder)
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()
    torchrun(f"train a tiny transformer with FSDP2 on {RANKS} gloo ranks, save with DCP", "demo_train.py", folder)
    for command in COMMANDS:
        step(f"ckpttool {command}", [program(), *shlex.split(command)], folder)


def resume(folder: Path, ranks: int) -> bool:
    """Train on `RANKS` ranks, resume on `ranks` through safetensors; return whether the resume is exact."""
    page = page_of(folder, ranks)
    page.unlink(missing_ok=True)
    words = ["--via", "safetensors", "--world", str(RANKS), "--to-world", str(ranks), "--steps", "3", "--more", "2"]
    words = ["--recipe", str(HERE / "recipe_fsdp2.py"), *words, "--no-gradients", "--html", page.name]
    title = f"ckpttool verify-resume trial: {RANKS} ranks -> safetensors -> {ranks} rank{'s' * (ranks > 1)}"
    try:
        step(title, [program(), "verify-resume", "trial", *words], folder)
    except subprocess.CalledProcessError:
        return False
    return True


def page_of(folder: Path, ranks: int) -> Path:
    """The report of the resume on `ranks`."""
    return folder / f"trial-on-{ranks}.html"


def program() -> str:
    """The command as it is installed beside this Python."""
    return str(Path(sysconfig.get_path("scripts")) / "ckpttool")


def step(title: str, command: Sequence[str], folder: Path, env: dict[str, str] | None = None) -> None:
    """Run one command in `folder`, its output going to the log, and print a line for it.

    Raises CalledProcessError if it fails, after printing its output.
    """
    began = time.monotonic()
    done = subprocess.run(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    with open(folder / LOG, "a") as log:
        log.write(f"$ {shlex.join(command)}\n{done.stdout}\n")
    good = done.returncode == 0
    say(f"{painted('✓' if good else '✗', good)} {title:82} {time.monotonic() - began:5.1f} s")
    if not good:
        say(f"\n$ {shlex.join(command)}\n{done.stdout}\nerror: exit code {done.returncode}\n")
    done.check_returncode()


def painted(text: str, good: bool) -> str:
    """In green or red, where the terminal shows colours."""
    if os.environ.get("NO_COLOR") or not (sys.stdout.isatty() or os.environ.get("FORCE_COLOR")):
        return text
    return f"\x1b[{'32' if good else '1;31'}m{text}\x1b[0m"


def require_ours(folder: Path) -> None:
    """End the program unless an earlier run made this directory: what is in it is about to go."""
    if not (folder / MARK).is_file():
        raise SystemExit(f"error: `{folder}` was not made by this demo, and is left alone\nhint: pass another `--dir`")


def torchrun(title: str, script: str, folder: Path) -> None:
    """Run a script of this directory on `RANKS` ranks, `folder` being its working directory."""
    launch = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={RANKS}"]
    command = [sys.executable, "-m", "torch.distributed.run", *launch, str(HERE / script)]
    # torch warns when it has to choose the threads, and when a machine without a network has a name nobody knows.
    quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    step(title, command, folder, {**os.environ, **quiet})


def report(result: dict[str, Any]) -> tuple[str, bool]:
    """Print the table. The last line, and whether all is equal."""
    readings = result["readings"]
    rows = [[r["what"], r["reader"], r["tensors"], r["objects"], r["verdict"]] for r in readings]
    headers = ["what", "read back with", "tensors", "objects", "verdict"]
    table = tabulate(rows, headers, maxcolwidths=[None, None, None, None, 60], disable_numparse=True)
    say("\n" + "".join(f"  {line}\n" for line in table.splitlines()))
    wrong = sum(r["verdict"] != "equal" for r in readings) + abs(READINGS - len(readings))
    if wrong:
        return f"not equal: {wrong} of {READINGS} readings", False
    return f"all equal: {result['tensors']} tensors, {result['objects']} objects, in {len(readings)} readings", True


def say(text: str) -> None:
    """Print before the next process does."""
    print(text, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
