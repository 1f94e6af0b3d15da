"""The one entry of the read side: what lies at a path is recognised and opened (`open_source`).

Nothing in a checkpoint is executed. Names in its pickles that would run code elsewhere are reported.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial

from ckpttool import formats, producers
from ckpttool.catalogue import parts
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue, Tensor, dotted
from ckpttool.catalogue.protocols import NO_HINTS, Format, OpenOptions, Source
from ckpttool.catalogue.step_names import facts_of, places_of, step_in, step_said
from ckpttool.catalogue.warning import Warning
from ckpttool.catalogue.work_limit import working
from ckpttool.errors import CkptError, CorruptError, ReadError, UsageError
from ckpttool.flat import local_state
from ckpttool.formats import archives, rankfiles, safetensors, torchsave
from ckpttool.formats.detect import detect, found_inside
from ckpttool.layout.optimizer.names_of_ids import is_model_order
from ckpttool.producers import alternatives, beside, contents, foreign, read_only, reader, runs, transformers
from ckpttool.producers.combined import CombinedSource
from ckpttool.producers.components import WHOLE, Layout, Producer
from ckpttool.serialization import shapes_json, unsafe_globals
from ckpttool.serialization.directory import Directory
from ckpttool.serialization.unpickler import no_garbage_collection
from ckpttool.storage import files, versions
from ckpttool.storage.stores import Location, local_path, locate
from ckpttool.storage.unfinished import ended
from ckpttool.text import none_or, some
from ckpttool.transfer import moments, origins, twins
from ckpttool.transfer.numbers import Array, numbers
from ckpttool.transfer.read import read_box

_OF_MODELS = (None, transformers.PRETRAINED.name, read_only.TORCHTUNE.name)  # producers of models alone
_DOCUMENT = re.compile(r".*\.(json|ya?ml|txt)")
_ONE_OF_SEVERAL = re.compile(r".+-\d{5}-of-(\d{5})\.(?:safetensors|bin|pt|pth)")
_MANY = 1_000  # files of a folder beside the checkpoints of a run that are opened to see whose they are


def open_at(
    location: Location,
    options: OpenOptions = NO_HINTS,
    run: runs.RunDirectory | None = None,
    directory: Directory | None = None,
) -> Source:
    """Recognise what lies at a location, and open it; of a run, its newest complete checkpoint. `run` is the run that
    the location was chosen from, `directory` the listing if it is a directory that was listed. Raises ReadError or
    CorruptError."""
    if directory is None and location.is_dir():
        directory = Directory(location)
    location = directory.path if directory is not None else location
    if directory is None:
        source = _open_files(location, options)
    else:
        producer = producers.recognise(directory)
        if producer is None and (found := foreign.recognise(location, directory)) is not None:
            raise found.refusal(location)
        if producer is not None:
            opened = _open_directory if producer.is_model else reader.open_directory
            source = opened(directory, options, producer)
            run = run or _beside(directory, producer)
        else:
            inner = None if directory.has(WHOLE) else runs.find(directory)
            if inner is not None and (newest := _open_newest(inner, options, run or inner)) is not None:
                return newest
            source = _open_directory(directory, options)
            if run is None and (run := alternatives.run_in(directory, source.catalogue)) is not None:
                source.close()
                others = {name for one in run.checkpoints if one != run.chosen for name in one.files}
                source = reader.open_layout(contents.layout(directory, without=others), directory, options)
        source.catalogue.warnings += _unread(directory, source.catalogue)
    source.catalogue.facts |= beside.facts(location, directory, source.catalogue)
    source.catalogue.facts |= facts_of([location.name], [file.name for file in source.catalogue.own_files])
    if run is not None:
        describe_run(source.catalogue, run)
    return source


def _open_files(location: Location, options: OpenOptions) -> Source:
    """Open a file, or the files that a pattern matches: those of ranks, or of one step beside those of others."""
    matches = location.matches() if location.is_pattern() else []
    are_steps = len({step_said(path) for path in matches} - {None}) > 1  # and no ranks, from 0 or not
    if not matches or (not are_steps and any(row.recognise(location) for row in formats.FORMATS)):
        source = _detect(location, None).open(location, options)
        is_set = source.catalogue.format == rankfiles.FORMAT.name and location.is_file()
        if not (is_set and reader.is_of_each_rank(source.catalogue)):
            return source
        source.close()
        return torchsave.FORMAT.open(location, options)  # what one rank has of its own, by itself
    folder = matches[0].parent
    while folder and not all(path.is_below(folder) for path in matches):
        folder = folder.parent
    directory = Directory(folder or local_path("."))
    names = [_below(folder, path) for path in matches]
    source = _open_step(directory, names, options, None)
    try:
        alternatives.check_one_step(location, folder, names, source.catalogue)
    except BaseException:
        source.close()
        raise
    return source


def open_archive(
    location: Location, options: OpenOptions = NO_HINTS, open_inside: Callable[..., Source] | None = None
) -> Source:
    """Open what lies in an archive, as if it lay in a directory, or as `open_inside` opens it. Raises ReadError or
    CorruptError."""
    root = archives.inside(location)
    try:
        source = (open_inside or open_at)(root, options)
        beside.annotate_members(root, source.catalogue)
    except BaseException:
        root.store.close()
        raise
    catalogue = source.catalogue
    catalogue.facts["layout"], catalogue.format, catalogue.location = catalogue.format, archives.FORMAT.name, root
    return CombinedSource.over(source, root.store.close)


def _open_newest(inner: runs.RunDirectory, options: OpenOptions, run: runs.RunDirectory) -> Source | None:
    """Open the newest complete checkpoint of a run, with the state that is written again at each step beside it: the
    optimizer beside the weights of each epoch. Other state that belongs to no step is a fault. Return None if what was
    taken for a run is not one: a folder of no framework, whose number is no step, or files of ranks."""
    while True:
        chosen, directory = inner.chosen, inner.directory
        assert chosen is not None
        is_folder = chosen.path.is_dir()
        files_of_step = list(chosen.files)
        if files_of_step:
            source = _open_step(directory, files_of_step, options, run)
        else:
            source = open_at(chosen.path, options, run, directory.folder(chosen.name) if is_folder else None)
        if not is_folder and _are_parts(inner, source):
            source.close()
            return None
        of_no_step = [*_of_no_step(inner)]
        others, later = _others(inner, of_no_step, source)
        if later is None:
            break
        source.close()
        inner, run = (following := inner.with_later(later)), following if run == inner else run
    is_only = len(inner.checkpoints) == 1 and is_folder
    if others and is_only and producers.recognise(directory.folder(chosen.name)) is None:
        source.close()
        return None
    is_open = chosen.producer in _OF_MODELS and not (inner.newer and is_folder)
    read = [one for one, error in others.items() if is_open and error is None and one.is_below(directory.path)]
    if read:
        source.close()
        names = files_of_step or [_below(directory.path, chosen.path)]
        source = _open_step(directory, [*names, *(_below(directory.path, one) for one in read)], options, run)
    listed = {name for one in inner.checkpoints for name in (one.name, f"{one.name}/", *one.files)}
    source.catalogue.warnings += contents.remains(directory, (one for one in directory.names if one not in listed))
    named = inner.named.path if inner.named is not None else directory.path
    known = {place for one in others for place in (one, one.parent)}
    if copies := [_below(named, one) for one in of_no_step if one not in known]:
        text = f"not opened, as they are of no step: {some(copies)}"
        source.catalogue.warnings.append(Warning("chosen", text))
    for one, error in others.items():
        if one not in read:
            name = _below(named, one)
            text = f"`{name}` may hold training state, but belongs to no step of the run"
            hint = f"name the checkpoint to leave it out: `{chosen.path}`"
            text += f": {error.message}" if error is not None else ""
            source.catalogue.faults.append(ReadError(text, hint=hint, file=one, absent=name))
    return source


def _are_parts(run: runs.RunDirectory, newest: Source) -> bool:
    """Return whether files that are numbered are of no steps: from 0, and the last one lacks tensors that the first
    has; or no word says what is counted, and they are of one tensor each, of other shapes, or the weights of the last
    two have nothing in common. The last step of a run may be without its optimizer, or of a network that has grown."""
    orders = [one.order for one in run.checkpoints]
    is_said = any(step_said(name) is not None for one in run.checkpoints for name in (one.name, *one.files))
    is_range = orders == [(n,) for n in range(len(orders))]
    with suppress(CkptError):
        if len(orders) > 1 and (is_range or not is_said):
            with closing(_open_first_file(run, run.checkpoints[0])) as source:
                first, is_bare = _tensors_in(source.catalogue), () in source.catalogue.entries
            lacking = first - _tensors_in(newest.catalogue)
            if lacking and run.chosen is not None:  # what a step of several files has twice is there once
                with closing(_open_first_file(run, run.chosen)) as source:
                    lacking = first - (_tensors_in(source.catalogue) | _tensors_in(newest.catalogue))
            if lacking and (is_range or is_bare):
                return not _are_of_epochs(run)
        is_counted = len(orders) > 1 and max(orders) <= (2 * len(orders),)
        if is_counted and all(step_in(one.name) is None for one in run.checkpoints):
            with closing(_open_first_file(run, run.checkpoints[-2])) as source:
                return twins.are_unrelated(source, newest)
    return False


def _are_of_epochs(run: runs.RunDirectory) -> bool:
    """Return whether the first two files have the same tensors, an optimizer among them, the second is later, and its
    weights follow from those of the first: several agents have epochs, too."""
    if len(run.checkpoints) < 3:
        return False
    with (
        closing(_open_first_file(run, run.checkpoints[0])) as one,
        closing(_open_first_file(run, run.checkpoints[1])) as two,
    ):
        for catalogue in (old := one.catalogue, new := two.catalogue):
            parts.assign(catalogue)
        has_optimizer = all(any(e.part.kind == "optimizer" for e in of.tensors) for of in (old, new))
        is_same = has_optimizer and _tensors_in(old) == _tensors_in(new)
        is_later = alternatives.is_later(*(alternatives.counted(of.entries.values()) for of in (new, old)))
        return is_same and is_later and not twins.are_unrelated(one, two)


def _open_first_file(run: runs.RunDirectory, checkpoint: runs.RunCheckpoint) -> Source:
    location = run.locations(checkpoint)[0]
    return detect(location).open(location, NO_HINTS)


def _others(
    run: runs.RunDirectory, of_no_step: Iterable[Location], opened: Source
) -> tuple[dict[Location, CkptError | None], Location | None]:
    """Return what holds other state than a checkpoint of a run, of what lies beside the newest and of its other
    checkpoints that are called otherwise, with the error if it cannot be opened, and the one that is newer by its
    counters. The best or a final model has the same tensors, or most of them; the best may be of another run."""
    complete = (one for one in dict.fromkeys((*run.of_same_step, *run.called_otherwise)) if one.complete)
    locations = [*of_no_step, *(location for one in complete for location in run.locations(one))]
    locations.sort(key=lambda location: runs.LAST.search(location.name) is None)  # of two that are alike the first
    found, later = dict[Location, CkptError | None](), None
    if not locations:
        return found, later
    newest = opened.catalogue
    own, counts = _tensors_in(newest), alternatives.counted(newest.entries.values())
    parts.assign(newest)
    elements = sum(tensor.numel for tensor in newest.tensors if tensor.part.kind == "model")
    for location in locations:
        if location.is_dir() and len(location.names()) > _MANY:
            found[location] = ReadError(f"it has more than {_MANY:,} files", file=location)
            continue
        try:
            with closing(open_at(location)) as source:
                parts.assign(source.catalogue)
                kinds = {entry.part.kind for entry in source.catalogue.entries.values()}
                tensors, new = _tensors_in(source.catalogue), alternatives.counted(source.catalogue.entries.values())
                is_most = 2 * sum(tensor.numel for tensor in source.catalogue.tensors) >= elements
                is_later = tensors == own and run.continues(location) and alternatives.is_later(new, counts)
                if is_later and runs.LAST.search(location.name) is None:
                    is_later = not twins.are_unrelated(source, opened)
        except CkptError as error:
            if not ended(location.name):  # what a save left that did not end, or has not yet
                found[location] = error
        else:
            is_checkpoint = (
                tensors <= own
                and (is_most or run.is_copy(location.name))
                and not kinds.isdisjoint(("model", "optimizer"))
            )
            if not is_checkpoint if tensors else kinds - {"progress", "other"}:
                found |= _of_same_step(run, location, source.catalogue)
            elif is_later:
                later, counts = location, new
    return found, later


def _of_same_step(
    run: runs.RunDirectory, location: Location, catalogue: Catalogue
) -> Iterator[tuple[Location, CkptError | None]]:
    """Yield what lies beside a run; of a folder with several steps the files of the one that is chosen, else an error:
    `diffusion/model_1000.pt` beside `G_1000.pth`."""
    steps, step = catalogue.facts.get("run", ()), run.chosen.step if run.chosen is not None else None
    same = next((one["path"] for one in steps if one["step"] == step and len(steps) > 1), location)
    if len(steps) > 1 and same == location:
        yield location, ReadError(f"it has {len(steps)} checkpoints, none of step {step}", file=location)
    else:
        yield from ((one, None) for one in (same.matches() if same.is_pattern() else [same]))


def _tensors_in(catalogue: Catalogue) -> Counter[tuple[str, Ints]]:
    """Return how many tensors have the same last word in their names, and the same shape."""
    return Counter((tensor.name.rpartition(".")[2], tensor.shape) for tensor in catalogue.tensors)


def _below(folder: Location, location: Location) -> str:
    """Return the name of a file or, with a slash, a folder below another."""
    return location.relative_to(folder) + ("/" if location.is_dir() else "")


def _open_step(
    directory: Directory, names: Collection[str], options: OpenOptions, run: runs.RunDirectory | None
) -> Source:
    """Open the files of one step, which lie beside those of others."""
    places = {place for name, place in places_of({*directory.names, *names}).items() if name in names}
    step = run.chosen.order[-1:] if run is not None and run.chosen is not None else ()
    if not step and len(places) == 1:
        step = places.pop().order[-1:]
    source = reader.open_layout(contents.layout(directory, names, *step), directory, options)
    source.catalogue.facts |= facts_of(places_of(names))
    if run is not None:
        describe_run(source.catalogue, run)
    return source


def _open_directory(directory: Directory, options: OpenOptions, producer: Producer | None = None) -> Source:
    """Open a directory of no framework, or of a model with what a producer has beside it: by the format that all of it
    is of, else each of its files as a component."""
    location = directory.path
    layout = Layout(unknown=directory.names) if producer is None else producer.layout(directory)
    row = next((row for row in formats.FORMATS if row.recognise(location)), None)
    if row is not None and contents.is_of_safetensors(directory, layout):
        # Nothing else is looked at, which on the Hub would be a request each.
        model = row.open(location, options)
        if "unused" not in model.catalogue.facts:
            # What else torch wrote here is an asset of the layout, as `training_args.bin`.
            model.catalogue.warnings[:] = [w for w in model.catalogue.warnings if w.kind != "unlisted-file"]
            reader.annotate(model.catalogue, layout, directory)
            return reader.said_by(producer, model)
        model.close()
    layout = contents.layout(directory, named=None if producer is None else producer.layout(directory))
    is_alone = all(component.spare or not component.root for component in layout.components)
    if producer is not None and not is_alone:
        layout = _beside_state(directory, producer, layout.missing)
    if row is not None and (source := _opened_whole(row, directory, layout, options)):
        return reader.said_by(producer, source)
    checkpoints = runs.inside(directory) if layout.components else []
    # In what is called a step itself, folders from 0 are layers, or without a step: `100/model/decoder/0/ final_norm/`.
    are_layers = step_in(directory.name) is not None and all(step_said(one.name) is None for one in checkpoints)
    numbers = {one.step for one in checkpoints if one.step is not None}
    if checkpoints and not (are_layers and numbers == {*range(len(numbers))}):
        raise _inside(location, directory, checkpoints, filter(formats.DATA_FILE.fullmatch, directory.names))
    if not layout.components and layout.missing:
        raise reader.incomplete(layout.missing[0], directory)
    if not layout.components:
        # Its error says what is there.
        return _detect(location, directory).open(location, options)
    source = reader.open_layout(layout, directory, options)
    if producer is not None and is_alone and any(one.root for one in source.catalogue.facts.get("components", ())):
        # A second file of the model has turned out to be another one.
        source.close()
        source = reader.open_layout(_beside_state(directory, producer, layout.missing), directory, options)
    return reader.said_by(producer, source)


def _beside_state(directory: Directory, producer: Producer, missing: list[str]) -> Layout:
    """Return the layout of a model beside other state, of which it is a part like any other, as are documents."""
    names = [name for name in directory.names if not re.fullmatch(producer.checkpoint_folders, name)]
    return contents.layout(directory, named=Layout(unknown=names, missing=missing), apart=True)


def _opened_whole(row: Format, directory: Directory, layout: Layout, options: OpenOptions) -> Source | None:
    """Open a directory by the format that recognises it; return None if that leaves one of its files unread, or takes
    what each rank has of its own for copies."""
    if any(component.name for component in layout.components) and any(not c.name for c in layout.components):
        return None
    location, stems = directory.path, {component.root for component in layout.components}
    is_indexed = (location / "model.safetensors.index.json").exists()
    if row is safetensors.FORMAT and len(stems) > 1 and not is_indexed:
        return None  # each of its files is a part, whose name is that of the file
    try:
        source = row.open(location, options)
    except CorruptError:
        if is_indexed or (len(stems) < 2 and row is not rankfiles.FORMAT):
            raise
        return None
    names = {file.name for file in source.catalogue.files}
    unread = {name for c in layout.components for name in c.files if name not in names and not origins.is_index(name)}
    if (
        layout.unreadable
        or (unread and (row is rankfiles.FORMAT or not source.catalogue.faults))
        or (reader.is_of_each_rank(source.catalogue) and _is_own(source.catalogue))
        or "unused" in source.catalogue.facts
    ):
        source.close()
        return None
    reader.annotate(source.catalogue, layout, directory)
    return source


def _is_own(catalogue: Catalogue) -> bool:
    """Return whether what contradicts itself in files of ranks is what each has of its own."""
    # Tensors of one name and other shapes are not copies of one: an optimizer has those of its rank, experts differ.
    if any({"ranks", "expected"} <= fault.facts.keys() for fault in catalogue.faults):
        return True
    parts.assign(catalogue)
    return all(entry.part.kind in parts.PER_RANK for entry in catalogue.entries.values())


def _detect(location: Location, directory: Directory | None) -> Format:
    """Return the format. The error for a file of another tool says what it is, that for a directory without a format
    names the checkpoints of the runs inside it."""
    try:
        return detect(location)
    except ReadError as error:
        if directory is None and (found := foreign.recognise(location, None)) is not None:
            raise found.refusal(location) from None
        if directory is not None and directory.unseen:
            # It may well be what could not be looked for.
            raise next(iter(directory.unseen.values())) from None
        if directory is None or not (checkpoints := runs.inside(directory)):
            raise
        raise _inside(location, directory, checkpoints, error.facts.get("found", ())) from None


def _inside(
    location: Location, directory: Directory, checkpoints: list[runs.RunCheckpoint], others: Iterable[str]
) -> ReadError:
    """Return the error for a directory with the checkpoints of runs one level below, and with other checkpoints."""
    below = [checkpoint.path.removeprefix(f"{directory.path}/") for checkpoint in checkpoints]
    return found_inside(location, [*below, *others])


def _unread(directory: Directory, catalogue: Catalogue) -> Iterator[Warning]:
    """Yield warnings of the tools that could not be looked for in a directory, and of the files beside the state that
    are links out of it: they are not read."""
    for tool, error in directory.unseen.items():
        yield Warning("not-looked", f"{tool}: could not look ({error.message})", file=error.facts.get("file"))
    yield from runs.gone(directory)
    names = (*catalogue.facts.get("assets", ()), *filter(directory.__contains__, (beside.CONFIG,)))
    for name in filter(directory.leads_out, dict.fromkeys(names)):
        yield Warning("left-out", f"`{name}`: a link that leaves the checkpoint, which is not read", file=name)


def _beside(directory: Directory, producer: Producer) -> runs.RunDirectory | None:
    """Return the run around a final model that lies beside the checkpoints."""
    folders = producer.checkpoint_folders
    if folders and directory.has(folders):
        with suppress(CkptError):
            checkpoints = [c for c in runs.in_directory(directory) if re.fullmatch(folders, f"{c.name}/")]
            return runs.RunDirectory(directory, checkpoints, None) if checkpoints else None
    return None


def describe_run(catalogue: Catalogue, run: runs.RunDirectory) -> None:
    """Add the checkpoints of a run to the facts, and to the warnings why another may have been meant."""
    chosen = run.chosen
    if chosen is not None and chosen.producer is not None:
        # Of some layouts only the contents tell who wrote them.
        catalogue.facts.setdefault("producer", chosen.producer)
    catalogue.facts["run"] = [
        {
            "name": c.name,
            "path": c.path,
            "step": c.step,
            "file_bytes": c.nbytes,
            "producer": catalogue.facts.get("producer") if c == chosen else c.producer,
            "format": c.format,
            "complete": c.complete,
            "why_not": c.why_not,
            "taken": c == chosen,
        }
        for c in run.checkpoints
    ]
    if chosen is None:
        text = f"the final model is opened; the directory also has {some([c.name for c in reversed(run.checkpoints)])}"
        catalogue.warnings.insert(0, Warning("chosen", text))
        return
    if run.newer:
        reasons = "; ".join(f"`{c.name}`: {c.why_not}" for c in run.newer[-3:])
        text = f"`{chosen.name}` is opened; newer checkpoints are incomplete: {reasons}"
        catalogue.warnings.insert(0, Warning("chosen", text))
    catalogue.warnings += runs.gone(run.directory)
    own = {file.location for file in catalogue.own_files}
    same = ((one.name, at) for one in run.of_same_step for at in run.locations(one))
    read = {name for name, at in same if any(file == at or file.is_below(at) for file in own)}
    if of_step := [one.name for one in run.of_same_step if one.name not in read]:
        text = f"`{chosen.name}` is opened; of the same step there are also {some(of_step)}"
        catalogue.warnings.append(Warning("chosen", text))
    name, step = runs.pointer(run.directory) or ("", chosen.step)
    if step != chosen.step:
        catalogue.warnings.append(Warning("chosen", f"`{name}` names step {step}, but step {chosen.step} is opened"))


def _of_no_step(run: runs.RunDirectory) -> Iterator[Location]:
    """Yield the files and folders in the directory that was named that may hold state of no step, in any format; on the
    Hub, where each would be a request, those beside the checkpoints by their names."""
    of_steps = {name for one in run.checkpoints for name in (one.name, *one.files)}
    place, named = run.directory.path, run.named
    names = _may_hold_state(run.directory, of_steps) if place.store.is_local else run.beside
    yield from (place / name.rstrip("/") for name in (*names, *run.folders_beside))
    while named is not None and place.store.is_local and place != named.path and place.is_below(named.path):
        below, place = place, place.parent
        above = runs.RunDirectory(named if place == named.path else Directory(place), [], None)
        names = [*_may_hold_state(above.directory, ()), *above.folders_beside]
        yield from (one for one in (place / name.rstrip("/") for name in names) if one != below)


def _may_hold_state(directory: Directory, of_steps: Collection[str]) -> list[str]:
    files_beside = [name for name in directory.names if not (name.endswith("/") or name in of_steps)]
    names = [name for name in files_beside if not (_DOCUMENT.fullmatch(name) or runs.points(directory, name))]
    layout = contents.layout(directory, names, named=Layout())
    counting = runs.RunDirectory(directory, [], None).beside
    known = {*layout.unreadable, *(name for one in layout.components for name in one.files)}
    return [name for name in files_beside if name in known or (_DOCUMENT.fullmatch(name) and name in counting)]


def open_source(path: str, shapes: str | None = None, only: Collection[str] | None = None) -> Source:
    """Open the checkpoint at `path`, or what a framework left in a directory; of a run, the newest complete one.

    Args: `shapes` is a checkpoint or a "json" file that has the shapes of the parameters; `only` are the names of the
    tensors that are needed, see `OpenOptions`.
    Raises ReadError or CorruptError.
    """
    options = replace(NO_HINTS if shapes is None else shapes_from(shapes), only=only)
    location = locate(path)
    with ExitStack() as on_error, no_garbage_collection():
        if location is not path:
            on_error.callback(location.store.close)
        with working(), naming(location), unsafe_globals.noting_harm() as named, versions.noting() as seen:
            source = open_at(location, options)
            # What scales and adapters are of is told by all names together.
            if foreign.has_mark(source.catalogue.facts.get("partial", ())):
                source = open_at(location, replace(options, only=None))
        on_error.callback(source.close)
        catalogue = source.catalogue
        if options.shapes and options.ordered:
            catalogue.facts["parameter order"] = tuple(options.shapes)
        elif options.shapes:
            catalogue.facts["shapes without order"] = shapes
        parts.assign(catalogue)
        if kinds := moments.find(source):
            catalogue.facts[parts.READ] = kinds
            parts.assign(catalogue)
        with closing(files.Pool()) as pool:
            local_state.restore(source, options, partial(_numbers, source, pool))
        chosen = next((c["path"] for c in catalogue.facts.get("run", ()) if c["taken"]), catalogue.location or location)
        catalogue.location = chosen
        if (found := foreign.describe(catalogue, chosen)) is not None:
            found.annotate(catalogue)
        catalogue.warnings += unsafe_globals.warnings(catalogue, named)
        if (part := _ONE_OF_SEVERAL.fullmatch(location.name)) and int(part[1]) > 1 and not location.is_dir():
            text = f"`{location.name}` is one of {int(part[1])} files: name the directory, `{location.parent or '.'}`"
            catalogue.warnings.append(Warning("left-out", f"{text}, for the whole model"))
        origins.keep_versions(catalogue, seen)
        origins.check_links(chosen, catalogue)
        beside.annotate(chosen, catalogue)
        on_error.pop_all()
    is_remote = location is not path and not location.store.is_local
    return CombinedSource.over(source, location.store.close) if is_remote else source


def _numbers(source: Source, pool: files.Pool, tensor: Tensor, start: int, count: int) -> Array:
    return numbers(read_box(((start,), (count,)), tensor, source, pool), tensor.dtype)


@contextmanager
def naming(path: str | None) -> Iterator[None]:
    """Context manager that puts `path` before the message of an error that names only a file in it."""
    try:
        yield
    except CkptError as error:
        is_of_files = isinstance(error, CorruptError | ReadError) or "needs" in error.facts
        if path is None or error.names(path.rstrip("/")) or not is_of_files:
            raise
        raise error.prefixed(f"`{path}`", file=path) from None


def shapes_from(path: str) -> OpenOptions:
    """Return the shapes of a model's parameters, from a checkpoint of the model or from JSON: `[["embed.weight", [29,
    7]], ...]` or `{"embed.weight": [29, 7], ...}` in the order of the model.

    Raises ReadError, CorruptError or UsageError.
    """
    if path.endswith(".json") and not path.endswith(".index.json"):
        return OpenOptions(shapes_json.read(path))
    with opened(path) as source:
        models = [p for p in parts.parts(source.catalogue) if p.kind == "model"]
        if len(models) != 1:
            raise UsageError(f"`--shapes {path}` has {none_or(len(models), 'model')}, and one is needed")
        depth = len(models[0].root)
        shapes = {dotted(t.path[depth:]): t.shape for t in source.catalogue.tensors if t.part == models[0]}
        is_sorted = any(row.sorts_names and row.name == source.catalogue.format for row in formats.FORMATS)
        return OpenOptions(shapes, ordered=not is_sorted and is_model_order(list(shapes)))


def opened(path: str, shapes: str | None = None) -> closing[Source]:
    """Context manager of an open source. Raises ReadError or CorruptError."""
    return closing(open_source(path, shapes))
