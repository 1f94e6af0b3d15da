"""The jobs, and who does them: a table of contenders.

A job is one conversion of one source; a peer is compared with ours only on the same job. `cat` copies the bytes of a
source to one file and is the limit: `cat all` for jobs that move the whole state, `cat model` for its model part. For
statistics it only reads: `cat bfloat16`, `cat float32`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from checkpoint import Checkpoint

OURS = "ckpttool"
SURE = {"--check": 1.6, "--manifest": 1.8}  # how many times the processor time of the same conversion without it
IMPORTS = "import torch"
TRAINING, VERIFIED = "train 12 steps", f"{OURS} verify-resume run"
ENGINES, LAUNCHED = ("mesh", "bytes"), (2, 4)
PEER = "dcp.load and dcp.save"
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Contender:
    """One tool on one job: a command, what it reads, and what its result is compared with."""

    job: str
    tool: str
    command: tuple[str, ...]
    inputs: tuple[Path, ...]
    result: Path | None
    part: str  # `all`, `model`, `bfloat16` ...: which bytes it moves, so which `cat` is its limit; `none` for none
    check: bool = True
    stdout: Path | None = None
    dtype: str = ""  # of its floating-point tensors, if it casts them

    @property
    def moves(self) -> bool:
        """Whether it is a conversion, and so has bytes per second."""
        return self.part != "none"


def ckpttool(*arguments: str | Path) -> tuple[str, ...]:
    """Our command line."""
    return (sys.executable, "-m", "ckpttool", *map(str, arguments))


def ours(job: str, source: Path, target: Path, to: str, *flags: str, part: str = "all") -> Contender:
    """`ckpttool convert`."""
    command = ckpttool("convert", source, target, "--to", to, *flags)
    return Contender(job, OURS, command, (source,), target, part)


def peer(job: str, name: str, source: Path, target: Path, part: str = "all", result: Path | None = None) -> Contender:
    """One function of `peers`."""
    command = (sys.executable, str(HERE / "peers.py"), name, str(source), str(target))
    return Contender(job, name, command, (source,), result or target, part)


def cat(part: str, source: Path, out: Path) -> Contender:
    """`cat *.distcp > out`, which the harness then syncs like every other output."""
    files = tuple(sorted(source.glob("*.distcp")))
    target = out / "cat"
    return Contender(f"cat {part}", "cat", ("cat", *map(str, files)), files, target, part, check=False, stdout=target)


def casts(source: Path, target: Path) -> list[Contender]:
    """The model in bfloat16."""
    job, flags = "dcp -> bfloat16", ("--only", "model", "--dtype", "bfloat16")
    members = ours(job, source, target, "safetensors", *flags), peer(job, "dcp_load_cast_save_model", source, target)
    return [replace(member, part="model", dtype="bfloat16") for member in members]


def made_sure(state: Checkpoint, out: Path) -> list[Contender]:
    """Conversions that read their result again, and those that hash all of it; the peer hashes as much."""
    to = {"dcp -> torch": ("torch", "all.pt"), "dcp -> dcp": ("dcp", "dcp")}
    rows = [
        ours(
            f"{job}{suffix}", state.train, out / name, target, *flags, *(("--to-world", "4") if target == "dcp" else ())
        )
        for job, (target, name) in to.items()
        for suffix, flags in (
            *([("", ())] if job == "dcp -> dcp" else []),
            (", --check", ("--check",)),
            (", --manifest", ("--manifest", str(out / "manifest.json"))),
        )
    ]
    hashed = peer("dcp -> torch, --manifest", "dcp_to_torch_save_hashed", state.train, out / "all.pt")
    return [*rows, hashed]


def reshards(source: Path, target: Path) -> list[Contender]:
    """Onto 8 ranks: we alone, in two processes of torchrun, and torch in eight."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node")
    ours = ("reshard", str(source), str(target), "--to-world", "8")
    theirs = (*torchrun, "8", str(HERE / "resharding_peer.py"), str(source), str(target))
    job = "reshard onto 8"
    return [
        Contender(job, OURS, ckpttool(*ours), (source,), target, "all"),
        Contender(
            f"{job}, 2 processes",
            f"{OURS}, torchrun",
            (*torchrun, "2", "-m", "ckpttool", *ours),
            (source,),
            target,
            "all",
        ),
        Contender(job, "torchrun, dcp.load and dcp.save", theirs, (source,), target, "all", check=False),
    ]


def launched(source: Path, target: Path, ranks: int) -> list[Contender]:
    """Onto as many ranks as torchrun starts: our two engines and torch."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks))
    ours = (*torchrun, "-m", "ckpttool", "reshard", str(source), str(target), "--to-world", str(ranks))
    theirs = (*torchrun, str(HERE / "resharding_peer.py"), str(source), str(target))
    commands = {engine: (*ours, "--engine", engine) for engine in ENGINES} | {PEER: theirs}
    job = f"torchrun, onto {ranks}"
    return [Contender(job, tool, words, (source,), target, "all", check=False) for tool, words in commands.items()]


def verifying(source: Path) -> list[Contender]:
    """Reading everything and comparing its checksums, beside reading it and computing them."""
    script = (sys.executable, str(HERE / "bare_crc.py"))
    commands = {
        OURS: ckpttool("verify", source, "-q", "-j", "2"),
        "pread and crc32": (*script, str(source)),
        f"{OURS}, timed inside": (*script, "--verify", str(source)),
    }
    return [
        Contender("verify dcp", tool, words, (source,), None, "all", check=False) for tool, words in commands.items()
    ]


def comparing(state: Checkpoint) -> list[Contender]:
    """Two equal checkpoints of different formats, beside `cmp` on two files of that size."""
    dcp, file = state.tensors, state.tensors_safetensors
    words = ("diff", dcp, file, "-q", "-j", "2")
    again = state.root / "again.safetensors"
    if not again.exists():
        shutil.copyfile(file, again)
    return [
        Contender("diff dcp, safetensors", OURS, ckpttool(*words), (dcp, file), None, "all", check=False),
        Contender(
            "diff dcp, safetensors", "cmp", ("cmp", str(file), str(again)), (file, again), None, "all", check=False
        ),
    ]


def looking(state: Checkpoint, out: Path) -> list[Contender]:
    """Statistics of every tensor on one core, beside reading the bytes and beside loops of numpy and of torch."""
    if not state.bfloat16_safetensors.exists():
        maker = (sys.executable, str(HERE / "make_bfloat16.py"))
        subprocess.run([*maker, state.tensors_safetensors, state.bfloat16_safetensors], check=True)
    one_core = ("taskset", "--cpu-list", str(min(os.sched_getaffinity(0)))) if shutil.which("taskset") else ()
    members = []
    for dtype, file in (("bfloat16", state.bfloat16_safetensors), ("float32", state.tensors_safetensors)):
        commands = {
            "cat": ("sh", "-c", 'cat "$0" > /dev/null', str(file)),
            OURS: ckpttool("stats", file, "--no-cache", "-q", "-j", "1"),
            **{name: peer("", name, file, out).command for name in ("numpy_statistics", "torch_statistics")},
        }
        members += [
            Contender(
                f"{'cat' if tool == 'cat' else 'stats'} {dtype}", tool, one_core + command, (file,), None, dtype, False
            )
            for tool, command in commands.items()
        ]
    return members


def training(out: Path) -> list[Contender]:
    """A training alone, with the hook of `verify-resume run` in its process, and verified, which takes two of them."""
    script = (sys.executable, str(HERE / "train_resumed.py"))
    commands = {
        "alone": (*script, str(out)),
        "hook": (sys.executable, str(HERE / "train_hooked.py"), str(out / "hook"), *script, str(out / "run")),
        VERIFIED: ckpttool("verify-resume", "run", "--checkpoints", "OUT/newest.pt", "--", *script, "OUT"),
    }
    return [Contender(TRAINING, tool, words, (), None, "none", check=False) for tool, words in commands.items()]


def exports_with_operations(state: Checkpoint, out: Path) -> list[Contender]:
    """The export of the same model with each matrix transposed, in another order of rows, and split into tensors."""
    matrix = {"from": "{name*}.weight", "to": "{name*}.weight"}
    operations = {
        "transpose": matrix | {"operations": [{"transpose": [0, 1]}]},
        "rows": matrix | {"operations": [{"rows": {"to": "halves", "head_dim": 64}}]},
        "rows back": matrix | {"operations": [{"rows": {"to": "neighbours", "head_dim": 64}}]},
        "interleave": matrix | {"operations": [{"rows": {"to": "neighbours", "heads": 1}}]},
        "split": matrix | {"to": ["{name*}.a", "{name*}.b"]},
    }
    one_dimension = {"from": "{name*}norm.weight", "to": "{name*}norm.weight"}
    return [mapped(state, out, name, state.weights, [one_dimension, rule]) for name, rule in operations.items()]


def exports_of_experts(state: Checkpoint, out: Path) -> list[Contender]:
    """Experts that are one tensor become tensors of their own, and the other way round, also those of all layers."""
    if not state.expert_list.exists():
        facts = state.facts
        maker = (sys.executable, str(HERE / "make_experts.py"))
        subprocess.run([*maker, state.root, str(facts["bytes"]), str(facts["ranks"])], check=True)
    one = "layers.{n}.experts."
    parts = [f"{one}{{e}}.{name}.weight" for name in ("w1", "w3", "w2")]
    unstack = [
        {"from": f"{one}w13", "to": parts[:2], "operations": [{"split": 1}, {"unstack": 0}]},
        {"from": f"{one}w2", "to": parts[2]},
    ]
    stack = [
        {"from": parts[:2], "to": f"{one}w13", "operations": [{"concat": 0}, {"stack": 0}]},
        {"from": parts[2], "to": f"{one}w2"},
    ]
    both = [
        {"from": parts[:2], "to": "experts.w13", "operations": [{"concat": 0}, {"stack": 0}, {"stack": 0}]},
        {"from": parts[2], "to": "experts.w2", "operations": [{"stack": 0}, {"stack": 0}]},
    ]
    return [
        cat("experts", state.experts, out),
        mapped(state, out, "unstack", state.experts, unstack, "experts"),
        mapped(state, out, "stack", state.expert_list, stack, "experts"),
        mapped(state, out, "stack twice", state.expert_list, both, "experts"),
    ]


def mapped(
    state: Checkpoint, out: Path, name: str, source: Path, rules: Sequence[object], part: str = "all"
) -> Contender:
    """`ckpttool export --map` with these rules."""
    file, target = state.root / f"{name}.json", out / name
    file.write_text(json.dumps({"format": 2, "name": name, "rules": rules}))
    command = ckpttool("export", source, target, "--map", file, "--no-strict")
    return Contender(f"export, {name}", OURS, command, (source,), target, part, check=False)


def contenders(state: Checkpoint, out: Path) -> list[Contender]:
    """All of them, in the order in which every round runs them: peers next to ours."""
    file, model, pt, dcp = out / "all.safetensors", out / "model.safetensors", out / "all.pt", out / "dcp"
    folder = out / "state"
    return [
        cat("all", state.train, out),
        ours("dcp -> safetensors", state.train, folder, "safetensors"),
        peer("dcp -> safetensors", "dcp_load_save_file", state.tensors, file),
        ours("dcp -> torch", state.train, pt, "torch"),
        peer("dcp -> torch", "dcp_to_torch_save", state.train, pt),
        ours("torch -> dcp", state.train_pt, dcp, "dcp", "--to-world", "4"),
        peer("torch -> dcp", "torch_save_to_dcp", state.train_pt, dcp),
        ours("torch -> safetensors", state.train_pt, folder, "safetensors"),
        peer("torch -> safetensors", "torch_load_save_file", state.tensors_pt, file),
        ours("safetensors -> dcp", state.tensors_safetensors, dcp, "dcp"),
        ours("safetensors -> torch", state.tensors_safetensors, pt, "torch"),
        ours("dcp -> dcp, 2 ranks", state.train, dcp, "dcp", "--to-world", "2"),
        *made_sure(state, out),
        *reshards(state.train, dcp),
        Contender(
            IMPORTS, "torch", (sys.executable, "-c", "import torch.distributed.rendezvous"), (), None, "none", False
        ),
        *(one for ranks in LAUNCHED for one in launched(state.train, dcp, ranks)),
        Contender(
            "export",
            OURS,
            ckpttool("export", state.weights, out / "exported"),
            (state.weights,),
            out / "exported",
            "all",
        ),
        peer("export", "dcp_load_save_pretrained", state.weights, out / "pretrained"),
        *exports_with_operations(state, out),
        *exports_of_experts(state, out),
        cat("model", state.accelerate, out),
        ours("dcp -> model", state.train, model, "safetensors", "--only", "model", part="model"),
        peer("dcp -> model", "dcp_load_save_model", state.train, model, "model"),
        *casts(state.train, model),
        ours("accelerate -> model", state.accelerate, model, "safetensors", "--only", "model", part="model"),
        peer("accelerate -> model", "accelerate_merge", state.accelerate, out / "merged", "model"),
        ours("hf shards -> model", state.hf, model, "safetensors", part="model"),
        peer("hf shards -> model", "hf_consolidate", state.hf, out / "merged", "model"),
        ours("rank files -> model", state.ranks, model, "safetensors", "--only", "model", part="model"),
        peer("rank files -> model", "merge_ranks", state.ranks, model, "model"),
        ours("rank files -> dcp", state.ranks, dcp, "dcp"),
        ours("dcp -> rank files", state.train, out / "ranks", "fsdp1", "--tensor-class", "dtensor"),
        *verifying(state.train),
        *comparing(state),
        *looking(state, out),
        *training(out),
        Contender("inspect dcp", OURS, ckpttool("inspect", state.train), (state.train,), None, "none", check=False),
    ]
