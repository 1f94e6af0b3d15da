"""Whether a script of the corpus resumes exactly, and whether a fault shows in its window: by torch, without ckpttool.

A script is run in a fork of this process, which has imported torch: to the last step; to the step of the stop; and, in
the folder of that, resumed. What the two that end there have written is compared, value by value.
"""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first step of an optimizer imports it, which takes longer than the training in each fork
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from support.resume_corpus import SCRIPTS, Fault, Script, switch_of, window_of

# What is not the state of a training: the time, and the words of the command.
_ASIDE = re.compile(r"saved_at|training_args|max_steps|num_train_epochs|(config)?\.(resume|steps|out)$")
_DATED = re.compile(r"\d{4}-\d\d-\d\d_[\d-]+/")


def differing(script: Script, fault: Fault | None, folder: Path) -> list[str]:
    """Return the names of values that differ between a run that went on and one that was stopped and resumed; on
    another number of ranks, between one that resumed without the fault and one with it."""
    whole, stopped = folder / "whole", folder / "stopped"
    at, until = window_of(script, fault)
    if script.worlds is None:
        _run(script, fault, script.command, whole, until)
    else:
        _run(script, None, _on(script.worlds[0], script.command), whole, at)
        resumed = script.resumed(whole, _saved_at(script, whole, at))
        _run(script, None, _on(script.worlds[1], resumed), whole, until)
    world = script.worlds or (0, 0)
    _run(script, fault, _on(world[0], script.command), stopped, at)
    resumed = script.resumed(stopped, _saved_at(script, stopped, at))
    _run(script, fault, _on(world[1], resumed), stopped, until, seed="2")
    one, other = (dict(_values(each)) for each in (whole, stopped))
    names = sorted(one.keys() | other.keys())
    return [name for name in names if not _same(one.get(name), other.get(name)) and not _ASIDE.search(name)]


def _on(world: int, words: list[str]) -> list[str]:
    return [word.replace("{world}", str(world)) for word in words]


def _saved_at(script: Script, out: Path, at: int) -> Path:
    """Return the checkpoint of the step of the stop."""
    parts = re.split(r"(\{step[^}]*\})", (script.checkpoints or "OUT/checkpoint-{step}").removeprefix("OUT/"))
    number = f"0*{at}"
    pattern = "".join(number if part.startswith("{step") else re.escape(part).replace(r"\*", "[^/]*") for part in parts)
    found = [path for path in out.rglob("*") if re.fullmatch(pattern, str(path.relative_to(out)))]
    assert found, (script.name, pattern, sorted(map(str, out.rglob("*"))))
    return found[0]


def _run(script: Script, fault: Fault | None, words: list[str], out: Path, steps: int, seed: str = "1") -> None:
    """Run a script in a fork, with its words and variables. The words before it, `env A=B python`, are variables."""
    at = next(index for index, word in enumerate(words) if word.startswith(str(SCRIPTS)))
    variables = dict(word.split("=", 1) for word in words[:at] if "=" in word)
    given = [word.replace("OUT", str(out)) for word in words[at + 1 :]]
    variables = {name: value.replace("OUT", str(out)) for name, value in variables.items()}
    out.mkdir(exist_ok=True, parents=True)
    if "STEPS" in variables:
        variables["STEPS"] = str(steps)
    else:
        given += ["--steps", str(steps)]
    log = out.parent / "log.txt"
    variables["FAULT"] = switch_of(fault)
    if "-m" in script.launcher or variables["FAULT"] == "order of a set":  # what a fork has, or is the same in
        own = {**os.environ, **variables, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        with open(log, "w") as stream:
            subprocess.run([*words[: at + 1], *given], env=own, check=True, stdout=stream, stderr=stream, timeout=300)
        return
    if (child := os.fork()) == 0:
        code = 1
        try:
            with open(log, "w") as stream:
                os.dup2(stream.fileno(), 1)
                os.dup2(stream.fileno(), 2)
                sys.stdout = sys.stderr = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), write_through=True)
                os.environ.update(variables)
                sys.argv = [words[at], *given]
                sys.path.insert(0, str(SCRIPTS))
                sys.modules.pop("tiny", None)  # whoever has read a pickled module has imported it without the fault
                try:
                    runpy.run_path(words[at], run_name="__main__")
                    code = 0
                except BaseException:
                    traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0, (script.name, switch_of(fault), steps, log.read_text()[-2000:])


def _values(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield all values of all files, by the file and the place in it."""
    if str(SCRIPTS) not in sys.path:
        sys.path.insert(0, str(SCRIPTS))  # of pickled modules
    for metadata in sorted(folder.rglob(".metadata")):
        name = str(metadata.parent.relative_to(folder))
        dcp_to_torch_save(metadata.parent, folder.parent / "whole.pt")
        yield from _leaves(name, torch.load(folder.parent / "whole.pt", weights_only=False))
    for path in sorted(folder.rglob("*")):
        name = _DATED.sub("", str(path.relative_to(folder)))
        if path.is_dir() or path.is_symlink() or (path.parent / ".metadata").exists():
            continue
        if path.suffix == ".json":
            yield from _leaves(name, json.loads(path.read_text()))
        elif path.suffix == ".safetensors":
            yield from _leaves(name, load_file(path))
        elif path.name in ("latest",):
            yield name, path.read_text()
        else:
            yield from _leaves(name, torch.load(path, weights_only=False))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.nn.Module) or hasattr(value, "state_dict"):
        value = value.state_dict()
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _leaves(f"{name}.{key}", one)
    elif isinstance(value, (list, tuple)) and len(value) < 100:
        for index, one in enumerate(value):
            yield from _leaves(f"{name}.{index}", one)
    else:
        yield name, value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if hasattr(one, "tobytes") and hasattr(other, "tobytes"):
        return bool(one.tobytes() == other.tobytes())
    return bool(type(one) is type(other) and one == other)
