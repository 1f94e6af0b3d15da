"""What cannot be loaded: every rank raises the same error, at once, and nothing was changed."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import practices
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
import training_scripts
from support import damage
from support.upstream_readers import expected_of, path_of
from torch.distributed.checkpoint.state_dict import get_state_dict
from training import Run, Sizes
from training_scripts import KINDS, difference

import ckpttool
from ckpttool.layout.rename import strip_wrappers
from ckpttool.training import save as saving


def refused(run: Run, path: str | Path, *words: str, **options: Any) -> str:
    """All ranks say the same, with these words in it, and the model is as it was."""
    before = training_scripts.whole(run)
    try:
        ckpttool.load(path, run.model, run.optimizer, **options)
    except ckpttool.CkptError as error:
        said = error.message
    else:
        return "it was loaded"
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, said)
    if set(every) != {said}:
        return f"the ranks say {every}"
    missing = [word for word in words if word not in said]
    return f"no {missing} in: {said}" if missing else difference(training_scripts.whole(run), before)


def saved(place: Path, sizes: Sizes = training_scripts.SMALL) -> Path:
    """A full file with names and two groups."""
    run = practices.fresh("plain", trained=True)
    if sizes != training_scripts.SMALL:
        model = training_scripts.bare(sizes)
        run = Run(model, torch.optim.AdamW(model.parameters()), None)
    if dist.get_rank() == 0:
        torch.save({"model": run.model.state_dict(), "optim": run.optimizer.state_dict()}, place)
    dist.barrier()
    return place


def other_shapes(kind: str, strategy: str) -> str:
    """Both shapes are named."""
    place = saved(practices.folder() / "full.pt", Sizes(vocab=19, width=6, hidden=10, layers=1))
    return refused(practices.fresh(kind), place, "`embed.weight`", "[19, 6]", "[17, 6]", strategy=strategy)


def other_names(kind: str, strategy: str) -> str:
    """Names as torch says them, with the nearest; all of it is returned when it is not strict."""
    place = practices.folder() / "model.pt"
    state = training_scripts.bare(training_scripts.SMALL).state_dict()
    state["layers.0.up.weights"] = state.pop("layers.0.up.weight")
    if dist.get_rank() == 0:
        torch.save(state, place)
    dist.barrier()
    run = practices.fresh(kind)
    run = Run(run.model, None, None)
    words = (
        "missing key: `layers.0.up.weight` (is it `layers.0.up.weights`?)",
        "unexpected key: `layers.0.up.weights`",
    )
    try:
        ckpttool.load(place, run.model, strategy=strategy)
    except ckpttool.CkptError as error:
        if [word for word in words if word not in error.message]:
            return error.message
    else:
        return "it was loaded"
    loaded = ckpttool.load(place, run.model, strategy=strategy, strict=False)
    found = (loaded.missing, loaded.unexpected)
    return "equal" if found == (["layers.0.up.weight"], ["layers.0.up.weights"]) else str(found)


def other_groups(kind: str, strategy: str) -> str:
    """torch would merge the groups without a word, or mix them up."""
    place = saved(practices.folder() / "full.pt")
    model = KINDS[kind](training_scripts.bare(training_scripts.SMALL))
    one = Run(model, torch.optim.AdamW(model.parameters()), None)
    return refused(one, place, "group 0", "differently", strategy=strategy)


def without_moments(kind: str, strategy: str) -> str:
    """A parameter that is trained and has no state, which torch's own functions load without a word."""
    run, place = practices.fresh("plain", trained=True), practices.folder() / "full.pt"
    lost = next(name for name, of in run.model.named_parameters() if of is run.optimizer.param_groups[0]["params"][1])
    run.optimizer.state.pop(run.optimizer.param_groups[0]["params"][1])
    if dist.get_rank() == 0:
        model, optim = get_state_dict(run.model, run.optimizer)
        torch.save({"model": model, "optim": optim}, place)
    dist.barrier()
    said = refused(practices.fresh(kind), place, f"no state of `{lost}`", strategy=strategy)
    if said != "equal":
        return said
    if "flat" in kind:
        return refused(practices.fresh(kind), place, f"`{lost}`, but of others", strategy=strategy, strict=False)
    other = practices.fresh(kind)
    found = ckpttool.load(place, other.model, other.optimizer, strategy=strategy, strict=False).without_state
    if found != [lost]:
        return str(found)
    # Frozen, it needs none.
    other = practices.fresh(kind)
    for name, parameter in other.model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and strip_wrappers(name) != lost)
    found = ckpttool.load(place, other.model, other.optimizer, strategy=strategy).without_state
    return "equal" if found == [] else str(found)


def one_rank_blind(kind: str, strategy: str) -> str:
    """A path that only the first rank sees: it says so for all, or reads for all."""
    place, there = saved(practices.folder() / "full.pt"), os.getcwd()
    own = place.parent if dist.get_rank() == 0 else place.parent / "empty"
    own.mkdir(exist_ok=True)
    os.chdir(own)
    try:
        run = practices.fresh(kind)
        if strategy == "parallel":
            return refused(run, place.name, "full.pt", strategy=strategy)
        loaded = ckpttool.load(place.name, run.model, run.optimizer)
        return "equal" if loaded.strategy == "broadcast" and "rank 1" in loaded.why else loaded.why
    finally:
        os.chdir(there)


def two_checkpoints(kind: str, strategy: str) -> str:
    """Ranks that name different ones, which torch's own functions load without a word; and one by several paths."""
    place, rank = practices.folder(), dist.get_rank()
    saved(place / "one.pt")
    if rank == 0:
        shutil.copy(place / "one.pt", place / "other.pt")
        (place / "link.pt").symlink_to("one.pt")
        (place / "again").mkdir()
        state = torch.load(place / "one.pt", weights_only=False)
        torch.save({**state, "step": 3}, place / "again" / "one.pt")
    dist.barrier()
    run = practices.fresh(kind)
    for words, mine in (
        ("rank 1 loads another checkpoint than rank 0: ", place / ("other.pt" if rank else "one.pt")),
        ("absent.pt", place / ("absent.pt" if rank else "one.pt")),
    ):
        said = refused(run, mine, words, strategy=strategy)
        if said != "equal":
            return said
    ckpttool.load(place / ("link.pt" if rank else "one.pt"), run.model, run.optimizer, strategy=strategy)
    ckpttool.save(place / "set", run.model, run.optimizer, format="fsdp1")
    ckpttool.load(place / "set" / f"rank{rank}.pt", run.model, run.optimizer, strategy=strategy)
    if strategy == "broadcast":
        return "equal"
    # One path on disks of their own: another name of the node is all that tells.
    there, host = os.getcwd(), f"node{rank}"
    os.chdir(place / ("again" if rank else "."))
    try:
        with mock.patch("platform.node", lambda: host):
            return refused(run, "one.pt", "`one.pt` is another checkpoint on rank 1", strategy=strategy)
    finally:
        os.chdir(there)


def damaged(kind: str, strategy: str) -> str:
    """A file whose index is right and whose middle is not, so that reading fails under way."""
    run, place = practices.fresh("fsdp2", trained=True), practices.folder() / "dcp"
    model, optim = get_state_dict(run.model, run.optimizer)
    torch_dcp.save({"model": model, "optim": optim}, checkpoint_id=place)
    if dist.get_rank() == 0:
        file = place / "__1_0.distcp"
        data = bytearray(file.read_bytes())
        data[len(data) // 3 :] = bytes(len(data) - len(data) // 3)
        file.write_bytes(data)
    dist.barrier()
    run = practices.fresh(kind)
    try:
        ckpttool.load(place, run.model, run.optimizer, strategy=strategy)
    except ckpttool.CkptError as error:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, error.message)
        return "equal" if set(every) == {error.message} and "__1_0.distcp" in error.message else str(every)
    return "it was loaded"


def another_save(kind: str, strategy: str) -> str:
    """A data file of another save, of which every rank reads a part: all of them compare it with the manifest."""
    folder = practices.folder()
    if dist.get_rank() == 0:
        for seed in (0, 1):
            state = training_scripts.bare(training_scripts.SMALL).state_dict()
            for value in state.values():
                value.fill_(seed)
            torch.save({"model": state}, folder / f"{seed}.pt")
            ckpttool.convert(folder / f"{seed}.pt", folder / str(seed), to="dcp", to_world=2)
        shutil.copy(folder / "1/__1_0.distcp", folder / "0")
    dist.barrier()
    model = practices.fresh(kind).model
    ckpttool.load(folder / "1", model, strategy=strategy)
    try:
        ckpttool.load(folder / "0", model, strategy=strategy)
    except ckpttool.CkptError as error:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, error.message)
        words = "__1_0.distcp` has CRC-32 ", " in the manifest beside it"
        if set(every) != {error.message} or error.exit_code != 4 or any(word not in error.message for word in words):
            return str(every)
    else:
        return "it was loaded"
    ckpttool.load(folder / "0", model, strategy=strategy, check=False)
    ckpttool.save(folder / "saved", model)
    crcs = {path.name: f"{zlib.crc32(path.read_bytes()):08x}" for path in (folder / "saved").glob("*.distcp")}
    listed = json.loads((folder / "saved/integrity.json").read_text())["crc32"]
    return "equal" if crcs and listed == crcs else f"{listed}, but {crcs}"


# Half a row is long enough to be read by itself.
WIDE = Sizes(vocab=64, width=256, hidden=512, layers=1)


def _copies(place: Path, format: str, name: str) -> tuple[Path, Path]:
    """A checkpoint by torch, and a copy with one bit flipped in a tensor: what is in `place` of each rank."""
    if format == "rank":
        whole = Path(path_of("rank/fsdp2_w4"))
    else:
        whole = place / {"torch": "whole.pt", "dcp": "whole"}[format]
        model = KINDS["fsdp2" if format == "dcp" else "plain"](training_scripts.bare(WIDE))
        run = Run(model, torch.optim.AdamW(model.parameters()), None)
        training_scripts.steps(run, WIDE.vocab, 1)
        state = dict(zip(("model", "optim"), get_state_dict(run.model, run.optimizer), strict=True))
        if format == "dcp":
            torch_dcp.save(state, checkpoint_id=whole)
        elif dist.get_rank() == 0:
            torch.save(state, whole)
    if dist.get_rank() == 0 and format == "rank":
        shutil.copytree(whole, place / "flipped")
        _pickle, *storages = damage.payload_of_torch(place / "flipped" / name)
        longest = max(storages, key=len)
        damage.flip(place / "flipped" / name, longest.start + len(longest) // 2)
    elif dist.get_rank() == 0:
        (place / "copy").mkdir()
        damage.flipped_copy(whole, name, place / "copy").rename(place / "flipped")
    dist.barrier()
    return whole, place / "flipped"


def flipped(format: str, name: str, kind: str, strategy: str) -> str:
    """One bit: all ranks raise the same error, which names file, tensor and both checksums, as zlib computes them; and
    only `check=False` loads it. Without damage everything is checked."""
    whole, place = _copies(practices.folder(), format, name)
    sizes = training_scripts.SMALL if format == "rank" else WIDE
    if format == "rank":
        sizes = training_scripts.sizes_of(expected_of("rank/fsdp2_w4")["model"])
    model = KINDS[kind](training_scripts.bare(sizes))
    optimizer = torch.optim.AdamW(model.parameters()) if format != "rank" else None
    loaded = ckpttool.load(whole, model, optimizer, strategy=strategy)
    if loaded.unchecked or loaded.bytes_checked < (loaded.bytes_read > 0):
        return f"of {loaded.bytes_read} bytes {loaded.bytes_checked} checked, {loaded.unchecked} not"
    for load in (
        lambda **options: ckpttool.load(place, model, optimizer, strategy=strategy, **options),
        lambda **options: ckpttool.load_into(
            place, {"model": model} | ({"optim": optimizer} if optimizer else {}), strategy=strategy, **options
        ),
    ):
        try:
            load()
        except ckpttool.CkptError as error:
            said = type(error).__name__, error.exit_code, error.message, error.facts
        else:
            return "it was loaded"
        loaded = load(check=False)
        if loaded.bytes_checked or (set(loaded.unchecked) != {"check=False"} and loaded.bytes_read):
            return f"unchecked: {loaded.bytes_checked} bytes checked, {loaded.unchecked}"
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, said)
    if any(one != said for one in every) or said[:2] != ("CorruptError", 4):
        return f"the ranks say {every}"
    facts, original = said[3], whole if whole.is_file() else whole / Path(said[3]["file"]).name
    run = slice(facts["offset"], facts["offset"] + facts["nbytes"])
    now = Path(facts["file"]).read_bytes()[run]
    then = original.read_bytes()[run]
    found = f"{zlib.crc32(now):08x}", f"{zlib.crc32(then):08x}"
    if now == then or found != (facts["found"], facts["expected"]):
        return f"{found}, but {facts}"
    named = facts["tensor"] if format != "rank" else Path(facts["file"]).name
    return "equal" if named == name and name in said[2] else f"{name} is not in {said}"


def chance(kind: str, strategy: str) -> str:
    """A buffer on the meta device on all ranks that is in no checkpoint."""
    place = practices.folder() / "model.pt"
    state = training_scripts.bare(training_scripts.SMALL).state_dict()
    if dist.get_rank() == 0:
        torch.save(state, place)
    dist.barrier()
    model = KINDS[kind](with_angles())
    try:
        ckpttool.load(place, model, strategy=strategy)
    except ckpttool.CkptError as error:
        if "`angles`" not in error.message or "`init_buffers=`" not in (error.hint or ""):
            return error.message
    else:
        return "it was loaded"
    said = computed(model, place, strategy)
    if said != "equal":
        return said
    loaded = ckpttool.load(place, KINDS[kind](with_angles()), strategy=strategy, strict=False)
    if loaded.uninitialised != ["angles"]:
        return str(loaded.uninitialised)
    del state["norm.weight"]
    if dist.get_rank() == 0:
        torch.save(state, place)
    dist.barrier()
    loaded = ckpttool.load(
        place, KINDS[kind](training_scripts.bare(training_scripts.SMALL, "meta")), strategy=strategy, strict=False
    )
    return "equal" if loaded.uninitialised == ["norm.weight"] else str(loaded.uninitialised)


def computed(model: Any, place: Path, strategy: str) -> str:
    """The same buffer by `init_buffers`, which leaves it out at first."""
    weights = {name: value for name, value in torch.load(place).items() if "norm" in name}
    asked: list[Any] = []

    def init_buffers(module: Any) -> None:
        asked.append(module)
        if len(asked) > 1:
            module.angles.copy_(torch.arange(3))
            module.norm.weight.data.fill_(7)  # which is then loaded

    try:
        ckpttool.load(place, model, strategy=strategy, init_buffers=init_buffers)
    except ckpttool.CkptError as error:
        if "uninitialised: `angles`" not in error.message:
            return error.message
    else:
        return "a buffer that was left out is taken"
    ckpttool.load(place, model, strategy=strategy, init_buffers=init_buffers)
    state = model.state_dict()
    same = all(torch.equal(state[name].full_tensor().cpu(), value) for name, value in weights.items())
    there = torch.equal(model.angles.cpu(), torch.arange(3.0)) and model.angles.device == state["norm.weight"].device
    return "equal" if same and there and asked == [model, model] else f"{same} {there} {asked}"


def with_angles() -> Any:
    """A model on the meta device with a buffer that is in no checkpoint."""
    model = training_scripts.bare(training_scripts.SMALL, "meta")
    model.register_buffer("angles", torch.empty(3, device="meta"), persistent=False)
    return model


def stages(kind: str, strategy: str) -> str:
    """Each rank has another part of the model, as in a pipeline: what is sent to all is not everybody's."""
    place = saved(practices.folder() / "full.pt")
    state = torch.load(place)["model"]
    mine = f"layers.0.{'up' if dist.get_rank() % 2 else 'down'}"
    part = torch.nn.ModuleDict({"layers": torch.nn.ModuleDict({"0": torch.nn.ModuleDict()})})
    wide, narrow = state["layers.0.up.weight"].shape
    sides = (narrow, wide) if mine.endswith("up") else (wide, narrow)
    part["layers"]["0"][mine[9:]] = torch.nn.Linear(*sides, bias=False)
    weight = part["layers"]["0"][mine[9:]].weight
    before = weight.detach().clone()
    try:
        ckpttool.load(place, part, strategy=strategy, strict=False)
    except ckpttool.CkptError as error:
        said = "rank 1 has different tensors from that of rank 0" in error.message and torch.equal(weight, before)
        return "equal" if said and strategy == "broadcast" else error.message
    same = torch.equal(weight, state[f"{mine}.weight"])
    return "equal" if same and strategy == "parallel" else f"it was loaded, {same}"


class Stubborn:
    """An object of the script's that fails on the last rank."""

    def __init__(self, when: str) -> None:
        self.when = when

    def _fail(self, when: str) -> None:
        if when == self.when and dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError("no luck")

    def state_dict(self) -> dict[str, Any]:
        """Perhaps."""
        self._fail("saving")
        return {"seen": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Perhaps."""
        self._fail("loading")


def one_object_fails(kind: str, when: str) -> str:
    """On one rank: the others do not wait for it, and say which it was."""
    run, place = practices.fresh(kind), practices.folder() / "saved"
    last = dist.get_world_size() - 1
    try:
        ckpttool.save(place, run.model, run.optimizer, meter=Stubborn(when))
        ckpttool.load_into(place, {"model": run.model, "optim": run.optimizer, "meter": Stubborn(when)})
    except ckpttool.CkptError as error:
        mine = error.message.endswith("ValueError: no luck") and f"rank {last}" in error.message
        # With the script's own traceback on the rank where it was.
        mine &= isinstance(error.__cause__, ValueError) == (dist.get_rank() == last)
    else:
        return "nothing was said"
    return "equal" if mine and place.exists() == (when == "loading") else "otherwise"


def elsewhere(kind: str, format: str) -> str:
    """Ranks in other directories save into that of rank 0; one that does not see it is an error."""
    run, place, there = practices.fresh(kind), practices.folder(), os.getcwd()
    own = place / f"of {dist.get_rank()}"
    own.mkdir()
    os.chdir(own)
    try:
        ckpttool.save("saved", run.model, run.optimizer, format=format)
        saved = place / "of 0" / "saved"
        with ckpttool.open(saved) as found:
            if [*own.iterdir()] != [saved] * (dist.get_rank() == 0) or len(found.catalogue.faults):
                return f"{[*own.iterdir()]} {found.catalogue.faults}"
        ckpttool.load(saved, run.model, run.optimizer)
        real = saving.collectives.from_first
        if dist.get_rank():
            saving.collectives.from_first = lambda told: str(own / Path(real(told)).name)
        try:
            ckpttool.save("again", run.model, run.optimizer, format=format)
        except ckpttool.CkptError as error:
            said = "rank 1 does not see" in error.message
        finally:
            saving.collectives.from_first = real
        return "equal" if said and [*own.iterdir()] == [saved] * (dist.get_rank() == 0) else "otherwise"
    finally:
        os.chdir(there)


WRONGS: dict[str, Callable[..., str]] = {
    f.__name__: f
    for f in (
        other_shapes,
        other_names,
        other_groups,
        without_moments,
        one_rank_blind,
        two_checkpoints,
        damaged,
        another_save,
        flipped,
        chance,
        stages,
        one_object_fails,
        elsewhere,
    )
}
