"""A run: a directory of checkpoints, which of them are complete, and which is the newest.

    checkpoint-100/ checkpoint-200/ tmp-checkpoint-300/     step-10/  step1000/  step1000-unsharded/  ep1-ba20/
    global_step_20/ latest_checkpointed_iteration.txt       epoch=0-step=100.ckpt   model_0009999.rank_3.pth

Only listings and small files are read, so that a run of hundreds of steps takes a moment.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain, islice
from operator import and_
from posixpath import basename

from ckpttool import formats
from ckpttool.catalogue import step_choice
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.parts import PER_RANK, kind_of_key
from ckpttool.catalogue.step_names import Place, pattern_of, places_of, step_in, time_in
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CkptError, ReadError, UsageError
from ckpttool.formats.deepspeed import members as deepspeed
from ckpttool.producers import recognise
from ckpttool.producers.components import DCP_FILE, Producer
from ckpttool.serialization.dcp import completeness
from ckpttool.serialization.directory import Directory
from ckpttool.storage.stores import Location, locate
from ckpttool.storage.unfinished import ended
from ckpttool.text import some

_MARK = r"(?i:[^.]*(?<![a-z])(?:done|success|completed?|finished|commit(?:ted)?|ready)(?![a-z]))"  # of a whole save
_DATA = re.compile(
    rf"{formats.DATA_FILE.pattern}|.*\.(pi?c?kle?|th|torch|tar|zip|nemo|np[yz]|model|state)|.*\.pth?\.\w+|(?!{_MARK})[^.]*"
)
# Data if its first bytes say so: `snapshot.ep.2` may be a log, and `ckpt_ready_100` a mark.
_MAY_BE_DATA = re.compile(rf".*\.[a-z]*[-_]?\d+|{_MARK}[^.]*")
_LARGEST_MARK = 1024  # bytes, in a store, where to look at each is a request
# What a checkpoint is called without its step.
COPY = re.compile(r"(?<![a-z])(best|last|latest|final)(?![a-z])", re.IGNORECASE)
LAST = re.compile(r"(?<![a-z])(last|latest|final)(?![a-z])", re.IGNORECASE)
_BEST = re.compile(r"(?<![a-z])best(?![a-z])", re.IGNORECASE)
_BESIDE = re.compile(r".*\.(json|ya?ml)")  # of a step whose other files hold its tensors
_POINTERS = re.compile(
    r"latest|latest_universal|latest\.txt|last_checkpoint|latest_checkpointed_iteration\.txt|latest_checkpoint.*|.*\.symlink"
    r"|last_checkpoint\.rank_0"
)
_BELOW = re.compile(r"checkpoints?|lightning_logs|version_\d+")
_MAX_DEPTH = 3
_MAX_PARTS = 16  # folders of one step
_MOST_READ = 1_000  # files of a folder beside the checkpoints whose first bytes are read
_MAX_FOLDERS = 100  # in which runs are looked for, to name them in an error
_INDEX_READ = 1 << 20  # largest `.metadata` whose names are checked, of every checkpoint of a run
_INDEX_MOST = 1 << 30  # and of the one to open

_NOT_ENDED = "its name says that the save did not end"


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """A checkpoint of a run: `RunCheckpoint("step-200", "/run/step-200", 200, 4096, "torchtitan", "dcp", None)`.

    `why_not` is why it is not complete, None if it is. `path` has a `*` for the ranks of files that are not in a
    directory of their own, `files` are those of one that is several files. `producer` is None for a layout that is
    recognised by its contents only. `order` are the numbers that place it among others, `pointed`: a file or link names
    it as the newest.
    """

    name: str
    path: Location
    step: int | None
    nbytes: int
    producer: str | None
    format: str | None
    why_not: str | None
    files: tuple[str, ...] = ()
    order: tuple[int, ...] = ()
    pointed: bool = False

    @property
    def complete(self) -> bool:
        return self.why_not is None

    @property
    def label(self) -> str:
        return self.name if self.step is None else str(self.step)

    def file_kinds(self, run: Directory) -> tuple[Counter[str], Counter[str]]:
        """Return the names of its files without numbers, and those of files that a save did not end, as they would be
        called; none for one file. `run` is the listing that it is in."""
        names = self.files or (run.folder(self.name).names if self.path.is_dir() else ())
        whole, begun = (name for name in names if not _ended(name)), (one for name in names for one in _ended(name))
        return Counter(map(masked, whole)), Counter(map(masked, begun))


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The checkpoints of a run, oldest first, and the one to open; None where the directory has a model of its own.
    `named` is the directory that was asked for, which the run may lie below."""

    directory: Directory
    checkpoints: list[RunCheckpoint]
    chosen: RunCheckpoint | None
    named: Directory | None = None

    @property
    def newer(self) -> list[RunCheckpoint]:
        """The checkpoints after the chosen one that are not complete."""
        first = len(self.checkpoints) if self.chosen is None else self.checkpoints.index(self.chosen)
        return [checkpoint for checkpoint in self.checkpoints[first:] if not checkpoint.complete]

    @property
    def of_same_step(self) -> list[RunCheckpoint]:
        """The other checkpoints of the step of the chosen one: the average of its weights, or more of its state."""
        order = self.chosen.order if self.chosen is not None and self.chosen.step is not None else None
        return [one for one in self.checkpoints if one.order == order and one != self.chosen]

    @property
    def called_otherwise(self) -> list[RunCheckpoint]:
        """The others whose names differ from that of the chosen one in more than numbers: `final`, `0` beside
        `checkpoint-10`."""
        name = masked(self.chosen.name) if self.chosen is not None else ""
        return [one for one in self.checkpoints if masked(one.name) != name]

    def is_copy(self, name: str) -> bool:
        """Return whether a file is called as one of the chosen checkpoint, with a word in place of its step:
        `latest_net_G.pth` beside `10_net_G.pth`."""
        files = (self.chosen.files or (self.chosen.name,)) if self.chosen is not None else ()
        return COPY.sub("#", name) in map(masked, files)

    def continues(self, location: Location) -> bool:
        """Return whether a file or a folder may be a later checkpoint of the run than the chosen one by its name: one
        that is listed, the last or the best, or `checkpoint.pth` beside `checkpoint0099.pth`; others are of another."""
        listed = {one for checkpoint in self.checkpoints for one in (checkpoint.name, *checkpoint.files)}
        name, bare = location.name, {re.sub(r"[-_.=]?#", "", masked(one)) for one in listed}
        is_called_so = name in listed or ((COPY.search(name) is not None or name in bare) and not ended(name))
        return is_called_so and location.is_below(self.directory.path)

    def with_later(self, later: Location) -> RunDirectory:
        """Return the run with what lies at a location as the one to open, behind the newest that names tell."""
        before = self.chosen
        assert before is not None
        known = next((one for one in self.checkpoints if self.locations(one) == [later]), None)
        name = later.relative_to(self.directory.path)
        nbytes = Directory(later).nbytes() if later.is_dir() else later.size()
        last = known or RunCheckpoint(name, later, None, nbytes, None, before.format, None, (), before.order, True)
        rest = [one for one in self.checkpoints if one != known]
        place = rest.index(before) + 1
        return replace(self, checkpoints=[*rest[:place], last, *rest[place:]], chosen=last)

    def locations(self, checkpoint: RunCheckpoint) -> list[Location]:
        """Return the files of a checkpoint, or its folder."""
        return [self.directory.at(name) for name in checkpoint.files] or [checkpoint.path]

    @property
    def beside(self) -> list[str]:
        """The files beside the checkpoints that are of no step: those with tensors, such as copies, the best or a final
        model, and those with counters."""
        of_steps = {name for checkpoint in self.checkpoints for name in (checkpoint.name, *checkpoint.files)}
        names = [name for name in self.directory.names if name not in of_steps and not _POINTERS.fullmatch(name)]
        counting = {n for n in names if n.endswith(".json") and "progress" in map(kind_of_key, self.directory.facts(n))}
        with_tensors = {n for n in names if formats.DATA_FILE.fullmatch(n) and not self.directory.at(n).is_link()}
        return [name for name in names if name in counting | with_tensors]

    @property
    def folders_beside(self) -> list[str]:
        """The folders beside the checkpoints that hold tensors, by the first bytes of the files in them: other
        checkpoints or runs. Links to the checkpoints are not among them; on the Hub, where each would be a request,
        none is looked into."""
        if not self.directory.path.store.is_local:
            return []
        of_steps = {name.partition("/")[0] for one in self.checkpoints for name in (one.name, *one.files)}
        others = [name for name in self.directory.folders if name not in of_steps][:_MAX_FOLDERS]
        return [f"{name}/" for name in others if not is_link_beside(self.directory, name) and _holds(self, name)]


def _holds(run: RunDirectory, name: str) -> bool:
    """Return whether a folder has a file or a folder of a format; also if it has too many to look at, or is locked."""
    try:
        data = _data_below(run.directory.folder(name))
        for kind, location in islice(data, _MOST_READ):
            if kind == "dcp" or any(row.recognise(location) for row in formats.FORMATS):
                return True
        return next(data, None) is not None
    except CkptError:
        return True


def checkpoints(path: str) -> list[RunCheckpoint]:
    """Return the checkpoints of a run, oldest first; none when it is not a run. Raises ReadError."""
    location = locate(path)
    return search(Directory(location))[1] if location.is_dir() else []


def chosen_steps(location: Location, steps: step_choice.StepWords) -> list[RunCheckpoint]:
    """Return the complete checkpoints of a run, oldest first: `all`, or those of some steps, `500,1000` or `500..900`.
    Raises UsageError if there is no run, or none of a step."""
    complete, words = [one for one in checkpoints(location) if one.complete], step_choice.words_of(steps)
    if not complete:
        text = f"`{location}` is not a run with complete checkpoints from which to take steps: {', '.join(words)}"
        raise UsageError(text, hint="name the directory that has the checkpoints of several steps")
    known = [one.label for one in complete]
    step_choice.check(known, words, f"`{location}` has no complete checkpoint of step", "the complete ones are")
    return step_choice.chosen(known, complete, words)


def find(directory: Directory) -> RunDirectory | None:
    """Return the run in a directory, with its newest complete checkpoint chosen; None when there is none. Raises
    ReadError when no checkpoint is complete, or nothing says which is the newest."""
    inner, checkpoints = search(directory)
    return with_newest(inner, checkpoints, directory) if checkpoints else None


def with_newest(directory: Directory, checkpoints: list[RunCheckpoint], named: Directory | None = None) -> RunDirectory:
    """Return the run with its newest complete checkpoint chosen; `named` is what errors call it. Raises ReadError."""
    ordered, path = sorted(checkpoints, key=_order), (named or directory).path
    return RunDirectory(directory, ordered, _newest(path, ordered, directory), named or directory)


def inside(directory: Directory) -> list[RunCheckpoint]:
    """Return the checkpoints of the runs one level below a directory, the newest complete one first."""
    found: list[RunCheckpoint] = []
    for name in directory.folders[:_MAX_FOLDERS]:
        if kind_of_key(name) in PER_RANK:
            continue  # `rng/0.pt rng/1.pt` are of ranks
        with suppress(CkptError):
            found += search(directory.folder(name))[1]
    return sorted(found, key=lambda checkpoint: (checkpoint.complete, checkpoint.step or 0), reverse=True)


def search(directory: Directory) -> tuple[Directory, list[RunCheckpoint]]:
    """Return the first of `every`; of no run, the directory itself and no checkpoints."""
    return next(every(directory), (directory, []))


def every(directory: Directory) -> Iterator[tuple[Directory, list[RunCheckpoint]]]:
    """Yield all directories with checkpoints in or below another, and these, oldest first: a run may have several
    versions. One that has checkpoints itself is the only one."""
    above: list[Directory] = []
    for inner in chain((directory,), _below(directory)):
        if not any(inner.path.is_below(one.path) for one in above) and (checkpoints := in_directory(inner)):
            above.append(inner)
            yield inner, checkpoints


def in_directory(directory: Directory) -> list[RunCheckpoint]:
    """Return the checkpoints in a directory itself, by step; none when it is not a run."""
    if directory.has(DCP_FILE):
        return []
    checkpoints = [*_compared(directory, [*_folders(directory)]), *_files(directory)]
    is_run = any(f.producer or f.format for f in checkpoints)
    most = {one.step: one.nbytes for one in sorted(checkpoints, key=lambda one: one.nbytes)}
    # Of what lies there for a step, all of its state is more than the average of the weights alone.
    places = {one: (_order(one), 2 * one.nbytes > most[one.step], one.name) for one in checkpoints}
    return sorted(checkpoints, key=lambda one: places[one]) if is_run else []


def _order(checkpoint: RunCheckpoint) -> tuple[tuple[int, ...], int, bool]:
    time = time_in(checkpoint.name)
    return checkpoint.order, -1 if time is None else time, checkpoint.pointed


def _below(directory: Directory, depth: int = 1) -> Iterator[Directory]:
    """Yield the folders in which frameworks put the checkpoints of a run; the last version first."""
    names = [name for name in directory.folders if _BELOW.fullmatch(name)]
    if len(directory.folders) == 1 and not any(map(formats.DATA_FILE.fullmatch, directory.names)):
        names = directory.folders
    for name in sorted(names, key=lambda n: (len(n), n), reverse=True):
        inner = directory.folder(name)
        yield inner
        if depth < _MAX_DEPTH:
            yield from _below(inner, depth + 1)


def _newest(path: str, checkpoints: list[RunCheckpoint], directory: Directory) -> RunCheckpoint:
    """Return the complete checkpoint of the highest step, or without steps the one that is pointed to. Newer ones whose
    indexes show that they are not complete are marked in `checkpoints`."""
    for i, checkpoint in reversed([*enumerate(checkpoints)]):
        checkpoint = checkpoints[i] = judged(checkpoint, directory)
        complete = [c.name for c in checkpoints if c.complete]
        if checkpoint.complete and _order(checkpoint) == ((), -1, False) and len(complete) > 1:
            raise ReadError(
                f"`{path}` has {len(complete)} checkpoints, {some(complete)}, and nothing says which is the newest",
                hint=f"name one: `{checkpoint.path}`{_all_as_one(path, checkpoints)}",
                file=path,
                found=complete,
            )
        if checkpoint.complete:
            return checkpoint
    n = len(checkpoints)
    reasons = "; ".join(f"`{f.name}`: {f.why_not}" for f in checkpoints[-5:])
    reasons += f"; and {n - 5} before them" if n > 5 else ""
    count = "the one checkpoint in it is not" if n == 1 else f"none of its {n} checkpoints is"
    raise ReadError(
        f"`{path}`: {count} complete: {reasons}",
        hint=f"name one to open it all the same: `{checkpoints[-1].path}`",
        file=path,
        found=[f.name for f in checkpoints],
    )


def judged(checkpoint: RunCheckpoint, run: Directory | None = None) -> RunCheckpoint:
    """Return a checkpoint that is complete by all that its indexes name, or with why it is not; `run` is the listing
    that it is in."""
    if not (checkpoint.complete and checkpoint.path.is_dir()):
        return checkpoint
    inner = Directory(checkpoint.path) if run is None else run.folder(checkpoint.name)
    why_not = _why_not(inner, checkpoint.name, recognise(inner), checkpoint.format, _INDEX_MOST)
    return replace(checkpoint, why_not=why_not)


def _all_as_one(path: str, checkpoints: Sequence[RunCheckpoint]) -> str:
    """Return the end of a hint: the pattern that opens all of them as one checkpoint, if they are files."""
    names = [name for checkpoint in checkpoints for name in checkpoint.files]
    pattern = pattern_of(names, ()) if names else None
    return "" if pattern is None else f"; `'{path.rstrip('/')}/{pattern}'`, in quotes, is all of them as one"


def pointer(directory: Directory) -> tuple[str, int] | None:
    """Return the file or link that names the newest checkpoint, and the step in it; None when there is none."""
    steps = ((name, step_in(target)) for name, target in pointers(directory))
    return next(((name, step) for name, step in steps if step is not None), None)


def gone(directory: Directory) -> Iterator[Warning]:
    """Yield a warning for each file or link that names a newest checkpoint beside it which is not there."""
    for name, target in pointers(directory):
        # Other links are read as what they name. A number is a step, and `release` a model of Megatron.
        is_name = (
            (_POINTERS.fullmatch(name) or COPY.search(name))
            and re.fullmatch(r"[\w.=+-]*[a-zA-Z][\w.=+-]*", target) is not None
            and target != "release"
        )
        if is_name and target not in directory and f"{target}/" not in directory:
            yield Warning("missing-file", f"`{name}` names `{target}`, which is not there", file=name)


def pointers(directory: Directory) -> Iterator[tuple[str, str]]:
    """Yield the files and links that name the newest checkpoint, and what they name."""
    for name in (one.rstrip("/") for one in directory.names):
        if is_link_beside(directory, name):
            if not _BEST.search(name):
                yield name, directory.at(name).real().name
        elif _POINTERS.fullmatch(name):
            yield name, _target(directory, name)


def _target(directory: Directory, name: str) -> str:
    """Return the name at the end of the path that a text is."""
    return directory.text(name).rstrip("/").rpartition("/")[2]


def points(directory: Directory, name: str) -> bool:
    """Return whether a file is a link, or a text of the name of what lies beside it."""
    target = _target(directory, name)
    return directory.at(name).is_link() or (bool(target) and (target in directory or f"{target}/" in directory))


def is_link_beside(directory: Directory, name: str) -> bool:
    """Return whether a file or a folder is a link to one beside it: `latest` -> `step-20`."""
    path = directory.at(name)
    return path.is_link() and path.real().parent == directory.path.real()


# Checkpoints ----------------------------------------------------------------------------------------------------------


def _folders(directory: Directory) -> Iterator[RunCheckpoint]:
    """Yield the checkpoints that are a folder each: those with a step or a time in their names, and those that a
    framework left, and all where a file or link names one of them. Others may be the parts of one checkpoint."""
    pointed = {target for _, target in pointers(directory) if f"{target}/" in directory}
    places = places_of(name for name in directory.folders if step_in(name) is not None)
    for index in (directory.at(name) / ".metadata" for name in directory.folders if directory.path.is_remote):
        if index.is_file() and index.size() <= _INDEX_READ:
            # All of them are on their way at once.
            index.store.expect(index.key, [(0, index.size())])
    for name in directory.folders:
        if is_link_beside(directory, name):
            continue
        try:
            inner = directory.folder(name)
        except CkptError:
            continue
        row, (order, step) = recognise(inner), places.get(name, ((), None))
        is_named = bool(pointed or order) or time_in(name) is not None or COPY.match(name) is not None
        if not is_named and (row is None or row.is_model):
            continue
        kind = _format(inner, row)
        if not (row or kind or order or pointed) and inner.names and next(_data_below(inner), None) is None:
            continue  # what was logged, as mmengine does in a folder of its time
        saved = inner.facts("trainer_state.json").get("global_step") if not order else None
        order, step = ((saved,), saved) if isinstance(saved, int) else (order, step)
        why_not = _why_not(inner, name, row, kind, _INDEX_READ)
        producer = row.name if row is not None and row.confirm is None else None
        path, nbytes = directory.at(name), inner.nbytes()
        is_last = name in pointed or LAST.match(name) is not None
        yield RunCheckpoint(name, path, step, nbytes, producer, kind, why_not, (), order, is_last)


def _compared(directory: Directory, folders: Sequence[RunCheckpoint]) -> Iterator[RunCheckpoint]:
    """Yield folders, those of no framework as not complete that lack a file which all others have that are called
    alike."""
    own = [one for one in folders if one.producer is None and one.complete]
    kinds: dict[RunCheckpoint, Counter[str]] = {}
    for one in own:
        names = directory.folder(one.name).names
        held = {n for n in names if n.endswith("/") or (_DATA.fullmatch(n) and not re.fullmatch(DCP_FILE, n))}
        held = {n for n in held if not ended(n.rstrip("/"))}  # what a save has left is asked of no other
        kinds[one] = Counter({*map(masked, held)})
    for one in folders:
        alike = (other for other in own if (masked(other.name), other.format) == (masked(one.name), one.format))
        others = [kinds[other] for other in alike if other != one] if one in kinds else []
        yield replace(one, why_not=_lacking(kinds[one], others) or one.why_not if others else one.why_not)


def _lacking(own: Counter[str], others: Iterable[Counter[str]]) -> str | None:
    """Return which kind of file a checkpoint lacks that all others have that are like it; None without one."""
    alike = [other for other in others if other & own]
    absent = reduce(and_, alike) - own if alike else None
    return f"`{min(absent).replace('#', '*')}` is missing, which the others have" if absent else None


def masked(name: str) -> str:
    """Return a name with `#` in place of its numbers."""
    return re.sub(r"\d+", "#", name)


def _files(directory: Directory) -> Iterator[RunCheckpoint]:
    """Yield the checkpoints of one file each, `model_step_100.pt`, and those of several files with a step in their
    names: `G_100.pth D_100.pth`."""
    all_names = _below_parts(directory)
    files: dict[Place, list[str]] = {}
    data = [n for n in all_names if _BESIDE.fullmatch(n) or any(_is_data(directory, m) for m in (n, *_ended(n)))]
    # What an interrupted save left beside the file that it was of is none of the step's.
    names = {*data}
    left = {name: of for name in data if (of := _ended(name) & names)}
    data = [name for name in data if name not in left]
    places, every = places_of(n for n in data if not COPY.search(n)), places_of(data)
    # The best of several steps may be all that there is: `best_model_9_acc=0.77.pt best_model_12_acc=0.81.pt`.
    for name, place in (places or (every if every.keys() == {*data} else {})).items():
        files.setdefault(place, []).append(name)
    files = {place: of_step for place, of_step in files.items() if any(not _BESIDE.fullmatch(n) for n in of_step)}
    if all(_is_of_rank(name) for of_step in files.values() for name in of_step):
        return
    for (order, step), of_step in files.items():
        for name in (name for name, of in left.items() if not of.isdisjoint(of_step)):
            yield _of_file(directory, name, step, _NOT_ENDED, order)
    kinds = {place: Counter(masked(n) for n in of_step if not _ended(n)) for place, of_step in files.items()}
    for place, of_step in files.items():
        nbytes, (order, step) = sum(map(directory.size, of_step)), place
        others = [kinds[other] for other in files if other != place]
        why_not = _NOT_ENDED if any(map(_ended, of_step)) else None
        why_not = why_not or completeness.empty(directory, of_step) or _lacking(kinds[place], others)
        if len(of_step) == 1:
            yield _of_file(directory, of_step[0], step, why_not if nbytes else "an empty file", order)
            continue
        kind = "safetensors" if all(name.endswith(".safetensors") for name in of_step) else "torch"
        pattern = pattern_of(of_step, [name for name in all_names if name not in of_step]) or f"*{order[-1]}*"
        path = directory.path.escaped() / pattern
        yield RunCheckpoint(pattern, path, step, nbytes, None, kind, why_not, tuple(of_step), order)
    # What is pointed to was saved last: `model_final.pth` beside `model_0004999.pth`.
    without_step = {*data}.difference(*files.values()) if files else set()
    named = (target for _, target in pointers(directory)) if without_step else ()
    for name in dict.fromkeys(target for target in named if target in without_step):
        last = max(place.order for place in files)
        yield _of_file(directory, name, None, completeness.empty(directory, [name]), last, pointed=True)


def _of_file(
    directory: Directory, name: str, step: int | None, why_not: str | None, order: Ints, *, pointed: bool = False
) -> RunCheckpoint:
    path, kind = directory.at(name), "safetensors" if ".safetensors" in name else "torch"
    return RunCheckpoint(name, path, step, directory.size(name), None, kind, why_not, (), order, pointed)


def _is_data(directory: Directory, name: str) -> bool:
    last, at = basename(name), directory.at(name)
    if _DATA.fullmatch(last) is not None or _MAY_BE_DATA.fullmatch(last) is None:
        return _DATA.fullmatch(last) is not None
    if not at.store.is_local:
        return "." not in last and directory.size(name) > _LARGEST_MARK
    return at.is_file() and any(row.recognise(at) for row in formats.BINARY)


def _ended(name: str) -> set[str]:
    """Return what a file below a directory would be called if its save had ended."""
    folder, separator, last = name.rpartition("/")
    return {f"{folder}{separator}{one}" for one in ended(last)}


def _is_of_rank(name: str) -> bool:
    """Return whether a file is called as what each rank has of its own, which is no checkpoint: `rng_2.pth`."""
    return kind_of_key(re.split(r"[._-]*\d", name.rpartition("/")[2])[0]) in PER_RANK


def _below_parts(directory: Directory) -> list[str]:
    """Return the files of a directory; where none has a step, those of its folders too, which may be its parts:
    `models/net_g_100.pth training_states/100.state`."""
    names = [name for name in directory.names if not name.endswith("/")]
    if directory.has(rf"(?:{_DATA.pattern})(?<!/)") and any(_DATA.fullmatch(name) for name in names):
        return names
    below: list[str] = []
    for folder in directory.folders[:_MAX_PARTS]:
        with suppress(CkptError):
            inner = directory.folder(folder)
            if inner.folders or inner.has(DCP_FILE):
                return names
            below += [f"{folder}/{name}" for name in inner.names]
    folders_of: dict[Place, set[str]] = {}
    parts = (name for name in below if (folder := name.partition("/")[0]) and not (step_in(folder) or time_in(folder)))
    for name, place in places_of(parts).items():
        folders_of.setdefault(place, set()).add(name.partition("/")[0])
    return [*names, *below] if any(len(folders) > 1 for folders in folders_of.values()) else names


def _format(directory: Directory, row: Producer | None) -> str | None:
    """Return the format of the first component, by its name."""
    if directory.has(DCP_FILE):
        return "dcp"
    if directory.has(r".*\.safetensors(\.index\.json)?") or "sharded/" in directory:
        return "safetensors"
    if directory.has(deepspeed.FILES):
        return "deepspeed"
    if row is not None:
        names = "|".join(component.name for component in row.layout(directory).components) + "|"
        return "dcp" if "/|" in names else "rankfiles" if "*" in names else "torch"
    return next((kind for kind, _ in _data_below(directory)), None)


def _data_below(directory: Directory, depth: int = 0) -> Iterator[tuple[str, Location]]:
    """Yield the files in a directory and its folders that may hold tensors by their names, and the folders of DCP, with
    the format of each."""
    for name in directory.names:
        if not name.endswith("/") and _is_data(directory, name):
            yield "safetensors" if name.endswith(".safetensors") else "torch", directory.at(name)
    for name in directory.folders if depth < _MAX_DEPTH else ():
        with suppress(CkptError):
            inner = directory.folder(name)
            yield from [("dcp", inner.path)] if inner.has(DCP_FILE) else _data_below(inner, depth + 1)


def _why_not(directory: Directory, name: str, row: Producer | None, kind: str | None, most: int) -> str | None:
    if ended(name):
        return _NOT_ENDED
    if not directory.names:
        return "an empty directory"
    if row is None and kind is None:
        return "no known format"
    if row is not None:
        layout = row.layout(directory)
        if layout.missing:
            return layout.missing[0]
        for folder in (c.name for c in layout.components if c.name.endswith("/")):
            inner = directory.folder(folder)
            if not inner.has(deepspeed.FILES) and (why_not := completeness.why_not(inner, most)):
                return f"`{folder}`: {why_not}"
        for component in layout.components:
            if why_not := completeness.empty(directory, component.files):
                return why_not
    if directory.has(DCP_FILE):
        return completeness.why_not(directory, most)
    return completeness.empty(directory, [n for n in directory.names if _DATA.fullmatch(n)])
