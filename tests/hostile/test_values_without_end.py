"""Values that are short to write and endless to spell, in every place of a torch file and before every command: none
ends in an internal error, takes the machine, or keeps a command from its answer.

A process looks at all of them, with the limits of `run_with_limits.py`: what does not end is ended there.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.lying_files import integer, many, saved, tensor, tree
from support.lying_shards import MESHES, dtensor, items, new, placement, spec
from support.paths import ROOT
from support.pickle_payloads import call, named, text

HERE = Path(__file__).resolve().parent
BUG = 70


def put(value: bytes) -> bytes:
    return value + b"r" + struct.pack("<I", 1)


GET = b"j" + struct.pack("<I", 1)


def shared(before: bytes, after: bytes, between: bytes = b"") -> bytes:
    """Forty containers, each of which holds the one before twice."""
    value = b"]"
    for _ in range(40):
        value = put(value) + b"0" + before + GET + between + GET + after
    return value


CLASS = named("some", "Class")
VALUES = {
    "shared lists": shared(b"](", b"e"),
    "shared dicts": shared(b"}(" + text("a"), b"u", text("b")),
    "shared objects": shared(CLASS, b"\x86R"),
    "a list in itself": put(b"]") + GET + b"a",
    "lists, 120 deep": b"]" * 120 + b"a" * 119,
    "objects, 55 deep": CLASS * 55 + b")" + b"\x85R" * 55,
    "tuples, 2,000 deep": b")" + b"\x85" * 2000,
    "an integer of 100,000 digits": integer(10**100_000),
    "a list": items(map(integer, range(3))),
    "NaN": b"G" + struct.pack(">d", float("nan")),
}


def optimizer(lr: bytes, step: bytes) -> bytes:
    group = tree(lr=lr, betas=lr, eps=lr, params=items([integer(0)]))
    state = b"}(" + integer(0) + tree(step=step, exp_avg=tensor(), exp_avg_sq=tensor()) + b"u"
    return tree(model=tree(w=tensor()), optimizer=tree(state=state, param_groups=items([group])))


def mesh(**fields: bytes) -> bytes:
    layout = new("torch.distributed._mesh_layout", "_MeshLayout", tree(shape=many(integer(2)), stride=many(integer(1))))
    ranks = items(map(integer, range(2)))
    made = {
        "_layout": layout,
        "_flatten_rank_map": ranks,
        "_rank": integer(0),
        "_coordinate_on_dim": items([integer(0)]),
    }
    return tree(w=dtensor(spec(new(MESHES, "DeviceMesh", tree(**{**made, **fields})), placement()), (4, 3)))


def nested_layout(value: bytes) -> bytes:
    return mesh(_layout=new("torch.distributed._mesh_layout", "_MeshLayout", tree(shape=value, stride=value)))


def storage(value: bytes) -> bytes:
    pid = many(text("storage"), named("torch", "FloatStorage"), text("0"), value, integer(6))
    return tree(w=tensor(at=pid + b"Q"), v=tensor(at=many(value, named("torch", "FloatStorage")) + b"Q"))


PLACES: dict[str, Callable[[bytes], bytes]] = {
    "a value": lambda v: tree(model=tree(w=tensor()), extra=v, step=v, args=v),
    "a key": lambda v: b"}(" + text("w") + tensor() + v + b"Nu",
    "a learning rate": lambda v: optimizer(v, tensor((), ())),
    "a step": lambda v: optimizer(integer(1), v),
    "a scheduler and a scaler": lambda v: tree(
        model=tree(w=tensor()), scheduler=tree(last_epoch=v), scaler=tree(scale=v)
    ),
    "the state of an object": lambda v: tree(w=tensor(), o=new("some", "Class", tree(a=v)), p=call(CLASS, v)),
    "attributes": lambda v: tree(w=tensor(), o=call(named("collections", "OrderedDict")) + tree(_metadata=v) + b"b"),
    "the layout of a mesh": nested_layout,
    "the names of a mesh": lambda v: mesh(_mesh_dim_names=v),
    "a storage": storage,
}


def commands(path: Path, folder: Path) -> dict[str, list[str]]:
    src, other, dst = str(path), str(path.with_name("b.pt")), str(folder / "out")
    return {
        "inspect": ["inspect", src, "--json"],
        "diff": ["diff", src, other],
        "to safetensors": ["convert", src, f"{dst}.s", "--to", "safetensors", "--overwrite"],
        "audit": ["verify-resume", "audit", src],
        "text": ["inspect", src],
        "against": ["verify", src, "--against", other],
        "to torch": ["convert", src, f"{dst}.t", "--to", "torch", "--overwrite"],
        "to dcp": ["convert", src, f"{dst}.d", "--to", "dcp", "--overwrite", "--check"],
        "stats": ["stats", src, "--no-cache"],
        "report": ["report", src, "-o", f"{dst}.html", "--overwrite"],
        "reshard": ["reshard", src, f"{dst}.r", "--to-world", "2", "--overwrite"],
        "export": ["export", src, f"{dst}.e", "--overwrite"],
        "match": ["match", src, "--like", other],
        "check": ["check", src, "--against", other],
    }


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.long)])
def test_no_value_is_without_end(quick: bool, tmp_path: Path) -> None:
    jobs: list[tuple[str, list[str]]] = []
    for number, (value, place) in enumerate((value, place) for value in VALUES for place in PLACES):
        folder = tmp_path / f"case_{number}"
        folder.mkdir()
        for name in ("a.pt", "b.pt"):
            (folder / name).write_bytes(saved(PLACES[place](VALUES[value])))
        tried = commands(folder / "a.pt", folder)
        for at, (verb, words) in enumerate(tried.items()):
            # Each case through one of the commands, and each command with some of the cases; the others take minutes.
            if (at == number % len(tried)) == quick:
                jobs.append((f"{value} as {place}: {verb}", words))
    done = subprocess.run(
        [sys.executable, str(HERE / "run_with_limits.py")],
        input=json.dumps(jobs), capture_output=True, text=True, cwd=tmp_path, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests"))), "MALLOC_ARENA_MAX": "1"},
    )  # fmt: skip
    said = [json.loads(line) for line in done.stdout.splitlines()]
    wrong = [
        f"{one['name']}: {one['code']} {one['err']}"
        for one in said
        if one["code"] == BUG or "Traceback" in one["err"] or one["taken"] > 300 << 20
    ]
    assert not wrong, "\n".join(wrong)
    assert len(said) == len(jobs), f"{jobs[len(said)][0]} does not end"
