"""Opens a DeepSpeed directory: the ranks' partitions as whole parameters, and all that lies beside them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from operator import mul
from typing import Any

from ckpttool.catalogue import identity, parts
from ckpttool.catalogue.boxes import Ints, row_major
from ckpttool.catalogue.entries import Catalogue, Chunks, Container, Extent, File, Path, Tensor, dotted
from ckpttool.catalogue.flatten import flatten, replaced
from ckpttool.catalogue.protocols import NO_HINTS, OpenOptions, PlacedSource, Source
from ckpttool.catalogue.shown import shown, spelt
from ckpttool.catalogue.values import Stub, TorchSize, stub_name
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CorruptError, ReadError
from ckpttool.flat import zero_partitions as partitions
from ckpttool.flat.pieces import FlatPiece, Parameter, PieceColumns, Rebuilt, is_line, lined_up, rebuild
from ckpttool.flat.zero_partitions import Line, Partition
from ckpttool.formats.deepspeed import members
from ckpttool.formats.deepspeed.members import StateFile
from ckpttool.serialization import torch_file, unpickler
from ckpttool.serialization.torch_pickle import StorageRef, TensorRef
from ckpttool.storage import files
from ckpttool.storage.crc import crc32
from ckpttool.storage.stores import Location
from ckpttool.text import plural, rank_ranges, size, some

MODEL, OPTIMIZER = "model", "optimizer"
_ONE_SAVE = "take all files from one save"
# What the layout is made of, and what becomes the model and the optimizer.
LAYOUT = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments",
}  # fmt: skip
_OF_OPTIMIZER = {
    "zero_stage", "partition_count", "group_paddings", "param_alignment_paddings", "param_slice_mappings",
    "base_optimizer_state", "base_optimizer_state_step", "single_partition_of_fp32_groups", "fp32_flat_groups",
    "optimizer_state_dict", "loss_scaler", "ds_version", "universal_checkpoint_info", "param_groups", "step",
}  # fmt: skip
_AFFINE_VERSION = 1
UNIVERSAL_VERSION = 0.4


def open(location: Location, options: OpenOptions = NO_HINTS) -> Source:
    """Return the catalogue of a directory. Raises ReadError for what is not read, CorruptError for a file that is not
    whole."""
    catalogue, pool = Catalogue("deepspeed"), files.Pool()
    try:
        with unpickler.no_garbage_collection():
            _ZeroOpening(catalogue, pool, location).run()
    except BaseException:
        pool.close()
        raise
    return PlacedSource(catalogue, pool.close)


class _ZeroOpening:
    """Reads the files of a directory one after the other. `_weights` and `_states` are those of the ranks."""

    def __init__(self, catalogue: Catalogue, pool: files.Pool, location: Location) -> None:
        self._catalogue, self._pool, self._location = catalogue, pool, location
        self._torch: dict[str, None] = {}
        self._members = members.listed(location)
        (_, name), *others = sorted(self._members.weights.items())
        self._weights = [self._load(0, name)]
        world = self._weights[0].tree.get("dp_world_size")
        most = 1 + max((rank for _, rank in (*self._members.optimizer, *self._members.weights)), default=0)
        self._world = world if type(world) is int and 0 < world < members.MAX_RANKS else most
        for (stage, rank), name in others:
            self._weights.append(self._load(stage * self._world + rank, name))
            if not stage:
                self._slim(self._weights[-1])
        self._columns = PieceColumns()
        self._copies: list[str] = []
        self._unread = _MOST_COMPARED
        self._files_of_steps: dict[tuple[str, str], StateFile] = {}  # of a universal checkpoint
        self._states: dict[int, StateFile] = {}
        for (stage, rank), name in sorted(self._members.optimizer.items()):
            number = stage * self._world + rank
            self._states[number] = self._load(number, name)

    def _load(self, rank: int, name: str, *, plain: bool = False) -> StateFile:
        """Open a file, which is a dict unless it may be any `plain` value."""
        location = self._location / name
        loaded = torch_file.load(self._pool, location, len(self._catalogue.files))
        self._catalogue.files.append(File(location, name, loaded.size, rank=rank))
        self._torch[loaded.torch] = None
        if not plain and not isinstance(loaded.tree, dict):
            raise CorruptError(f"`{location}`: no dict of DeepSpeed, but a {type(loaded.tree).__name__}", file=location)
        return StateFile(rank, name, loaded, _dict(loaded.tree))

    def _slim(self, file: StateFile) -> None:
        """Compare the parameters of another rank with those of the first, and forget them: of many ranks they take
        memory for nothing."""
        same = (_shapes(file), file.tree.pop("frozen_param_shapes", None))
        if same != (_shapes(self._weights[0]), self._weights[0].tree.get("frozen_param_shapes")):
            text = f"`{file.name}` is of other parameters than `{self._weights[0].name}`"
            self._catalogue.faults.append(CorruptError(text, hint=_ONE_SAVE, ranks=[self._weights[0].rank, file.rank]))
        del file.tree["param_shapes"]
        module = _dict(file.tree.get("module"))
        file.tree["module"] = {k: v for k, v in module.items() if not _is_placeholder(v, k, file)}

    def run(self) -> None:
        """Fill the catalogue."""
        catalogue, first, world = self._catalogue, self._weights[0].tree, self._world
        catalogue.faults += self._members.faults
        stages = self._stages(first)
        _check_versions(first.get("universal_checkpoint_info"), self._weights[0].name)
        if self._members.universal:
            stage = 3 if self._members.partitioned else 2
            catalogue.faults += self._members.check_world(world, stages)
            self._read_universal(world)
        elif self._states or self._members.partitioned:
            catalogue.faults += self._members.check_world(world, stages)
            self._read_zero(world, whole=not catalogue.faults)
            stage = self._stage
        else:
            stage = 0
            catalogue.faults += self._members.check_world(world, stages)
            self._read_plain()
        self._add_rest()
        name = f"ZeRO-{stage}" if stage else "without ZeRO"
        name = "universal" if self._members.universal else name
        version = first.get("ds_version")
        kind = "pipeline stage" if self._members.layers else "model-parallel rank"
        catalogue.facts |= {
            "layout": f"{name}, {plural(world, 'data-parallel rank')}{' before' * self._members.universal}"
            + f" x {plural(stages, kind)}" * (stages > 1),
            "writer": f"DeepSpeed {version}" if isinstance(version, str) else "DeepSpeed",
            "torch": ", ".join(self._torch),
        }
        if isinstance(names := first.get("buffer_names"), list) and not self._members.universal:
            catalogue.facts["buffers"] = names

    def _stages(self, first: Mapping[str, Any]) -> int:
        """Return the number of stages, of a universal checkpoint that of all model-parallel ranks. Raises ReadError for
        tensor parallelism, of which a file of before 2026 says nothing; but then its layers have other names, and
        `mp_world_size` is that of stages alone; and for experts that are slices of one tensor (AutoEP)."""
        degrees = _dict(first.get("checkpoint_parallel_dimensions"))
        tensor, stages = degrees.get("tp_degree", 1), degrees.get("pp_degree", first.get("mp_world_size"))
        if self._members.universal:
            stages = stages * tensor if type(stages) is type(tensor) is int else 1
        elif tensor != 1 or first.get("ds_autoep_layers") or first.get("autoep_layers"):
            what = "experts of AutoEP" if tensor == 1 else f"tensor parallelism of {shown(tensor)}"
            raise ReadError(f"`{self._location}`: {what}, not read", hint=members.CONVERT, file=self._location)
        has_stages = self._members.layers or self._members.universal
        return stages if has_stages and type(stages) is int and 0 < stages < members.MAX_RANKS else 1

    @property
    def _stage(self) -> int:
        """The stage that the first rank says; BF16_Optimizer says none, and is one of stage 1."""
        if self._members.partitioned:
            return 3
        state = self._optimizer_of(next(iter(self._states.values())))
        stage = _plain(state.get("zero_stage"))
        return stage if stage in (1, 2) else 1

    @property
    def _reordered(self) -> bool:
        """Whether ZeRO 1 and 2 have the parameters of a group in another order than the optimizer."""
        return _at(self._weights[0].tree, "ds_config", "zero_optimization", "round_robin_gradients") is True

    def _optimizer_of(self, file: StateFile) -> dict[str, Any]:
        state = file.tree.get("optimizer_state_dict")
        if not isinstance(state, dict):
            raise CorruptError(f"`{file.name}` has no `optimizer_state_dict`", file=file.name)
        return state

    # ZeRO -----------------------------------------------------------------------------------------------------------

    def _read_zero(self, world: int, *, whole: bool) -> None:
        states = {rank: self._optimizer_of(file) for rank, file in self._states.items()}
        shapes = _shapes(self._weights[0])
        for rank, state in states.items():
            self._check_state(rank, state, world)
        by_name: dict[str, Rebuilt] = {}
        moments: dict[str, dict[str, Any]] = {}
        if states:
            divided = self._members.partitioned
            groups = self._divided(shapes, states, world) if divided else []
            for file in () if divided else self._weights:  # one of each stage
                own = {rank: state for rank, state in states.items() if rank // world == file.rank // world}
                groups += self._flat(_shapes(file), own, world) if own else []
            shapes = shapes if divided else _merged([(one.number, one.shapes) for one, *_ in groups])
            moments = {name: {} for group in shapes for name in group}
            for partition, masters, kinds in groups:
                used = partition.used()
                for what, lines in ((f"the weights of group {partition.number}", masters), *kinds.items()):
                    partitions.check_lines(partition, used, lines, what)
                    for name, rebuilt in partition.parameters(lines, self._place, what, self._columns, whole=whole):
                        known = (by_name, name) if lines is masters else (moments[name], what)
                        if known[0].setdefault(known[1], rebuilt) is not rebuilt:
                            self._compare_stages(name, what, known[0][known[1]], rebuilt)
            self._note_padding(groups)
        self._add_model(by_name, world)
        if states:
            if self._reordered and not self._members.partitioned:
                shapes = [partitions.in_order(group, world) for group in shapes]
            self._add_optimizer(states, shapes, moments)

    def _compare_stages(self, name: str, what: str, one: Rebuilt, other: Rebuilt) -> None:
        """Add a fault unless two stages of a pipeline have the same of a parameter that is tied."""
        nbytes = prod(one.shape) * one.dtype.itemsize
        if nbytes > self._unread:
            text = f"{what} of `{name}` in two stages of the pipeline are not compared: {size(nbytes)}"
            self._catalogue.warnings.append(Warning("not-compared", text))
            return
        self._unread -= nbytes
        if (one.dtype, one.shape, self._crc(one)) != (other.dtype, other.shape, self._crc(other)):
            names = some([self._catalogue.files[each.chunks.file[0]].name for each in (one, other)])
            text = f"{what} of `{name}`, which is tied, are not the same in two stages of the pipeline: {names}"
            fault = CorruptError(text, hint=_ONE_SAVE, tensor=name, concerns=[f"{MODEL}.{name}"])
            self._catalogue.faults.append(fault)

    def _crc(self, rebuilt: Rebuilt) -> int:
        crc = 0
        for _, _, extent in rebuilt.chunks:
            for at in range(0, extent.nbytes, _BLOCK):
                block = extent._replace(offset=extent.offset + at)
                crc = crc32(self._read(block, min(_BLOCK, extent.nbytes - at)), crc)
        return crc

    def _place(self, rank: int, ref: TensorRef) -> Extent:
        return self._states[rank].place(ref)

    def _check_state(self, rank: int, state: Mapping[str, Any], world: int) -> None:
        """Raise ReadError for what the optimizer of a rank has that this reader does not know."""
        name = self._states[rank].name
        _check_versions(state.get("universal_checkpoint_info"), name)
        count = state.get("partition_count")
        most = max((n for n in count if type(n) is int), default=world) if isinstance(count, list) else count
        if type(most) is int and most != world:
            text = f"`{name}`: partitions of {most} ranks, but {world} data-parallel ranks have saved"
            hint = "shards within groups of ranks (MiCS) are not read, and files of two saves are none"
            raise ReadError(text, hint=f"{hint}: {_ONE_SAVE}", file=name, found=most, expected=world)
        if isinstance(count, list) and any(type(n) is not int or n < 1 or world % n for n in count):
            raise CorruptError(f"`{name}`: partitions of {shown(count)} ranks, of {world}", hint=_ONE_SAVE, file=name)
        for key, value in state.items():
            if key not in _OF_OPTIMIZER and _holds_tensor(value):
                text = f"`{name}`: `{spelt(key)}`, optimizer state in a form that is not read"
                raise ReadError(text, hint=_NOT_READ, file=name, found=spelt(key))

    def _flat(
        self, shapes: list[dict[str, Ints]], states: Mapping[int, dict[str, Any]], world: int
    ) -> list[tuple[Partition, dict[int, Line], dict[str, dict[int, Line]]]]:
        """Return the groups of ZeRO 1 and 2, with the lines of the weights and of each kind of state."""
        masters = {rank: self._lines(rank, state, "single_partition_of_fp32_groups") for rank, state in states.items()}
        for rank, lines in masters.items():
            if len(lines) != len(shapes):
                text = f"rank {rank} has {plural(len(lines), 'group')} of weights, but `param_shapes` {len(shapes)}"
                raise CorruptError(text, hint=_ONE_SAVE, rank=rank, found=len(lines), expected=len(shapes))
        lean = any("zero_stage" in state for state in states.values())  # the masters of BF16_Optimizer are padded
        sizes = [max(self._size(masters[r][g], states[r], g, lean=lean) for r in states) for g in range(len(shapes))]
        groups = partitions.flat_groups(shapes, states, sizes, world, reordered=self._reordered)
        return [
            (
                one,
                {rank: [masters[rank][one.number]] for rank in one.paddings},
                self._kinds({rank: states[rank] for rank in one.paddings}, one, [one.number]),
            )
            for one in groups
        ]

    def _size(self, line: TensorRef, state: Mapping[str, Any], group: int, *, lean: bool) -> int:
        paddings = state.get("group_paddings")
        padding = paddings[group] if lean and isinstance(paddings, list) and group < len(paddings) else 0
        return prod(line.shape) + (padding if type(padding) is int else 0)

    def _lines(self, rank: int, state: Mapping[str, Any], key: str) -> list[TensorRef]:
        lines = state.get(key)
        if not isinstance(lines, list) or not all(map(is_line, lines)):
            name = self._states[rank].name
            raise CorruptError(f"`{name}`: `{key}` is no list of tensors of one dimension", file=name, rank=rank)
        return lines

    def _divided(
        self, shapes: list[dict[str, Ints]], states: Mapping[int, dict[str, Any]], world: int
    ) -> list[tuple[Partition, dict[int, Line], dict[str, dict[int, Line]]]]:
        """Return the parameters of ZeRO 3 as one group."""
        masters = {rank: self._lines(rank, state, "fp32_flat_groups") for rank, state in states.items()}
        for rank, lines in masters.items():
            if any(not line.shape[0] for line in lines) and any(shapes):
                text = f"`{self._states[rank].name}`: weights without elements: they were offloaded to NVMe"
                raise ReadError(text, hint=_OFFLOADED, rank=rank)
        (whole,) = partitions.divided(shapes, [*states], world)
        return [(whole, dict(masters.items()), self._kinds(states, whole, [*range(len(shapes))]))]

    def _kinds(
        self, states: Mapping[int, dict[str, Any]], partition: Partition, keys: list[int]
    ) -> dict[str, dict[int, Line]]:
        """Return the lines of each kind of state that has a value for each element: `exp_avg`."""
        kinds: dict[str, dict[int, Line]] = {}
        used = partition.used()
        for rank, state in states.items():
            of_groups = [_state_of(state, key) for key in keys]
            names = {name for one in of_groups for name, value in one.items() if _is_piece(value)}
            for name in sorted(names):
                line = [one[name] for one in of_groups if _is_piece(one.get(name))]
                if len(line) != len(of_groups):
                    text = f"`{self._states[rank].name}`: `{name}` is there for {len(line)} of {len(of_groups)} groups"
                    raise ReadError(f"{text}, which is not read", hint=_NOT_READ, rank=rank)
                held, file = sum(prod(ref.shape) for ref in line), self._states[rank].name
                if not held and used.get(rank):
                    text = f"`{file}`: `{name}` without elements: it was offloaded to NVMe"
                    raise ReadError(text, hint=_OFFLOADED, file=file, rank=rank)
                if held < used.get(rank, 0):
                    text = (
                        f"`{file}`: `{name}` has {plural(held, 'element')}, but rank {rank} has {used[rank]} of weights"
                    )
                    hint = "state that is not of each element (1-bit optimizers) is not read; of another, take one save"
                    raise CorruptError(text, hint=hint, file=file, rank=rank, found=held, expected=used[rank])
                kinds.setdefault(name, {})[rank] = line
        return kinds

    def _note_padding(self, groups: list[tuple[Partition, dict[int, Line], dict[str, dict[int, Line]]]]) -> None:
        """Say which elements each rank has: `group 1: 8 elements on ranks 0-1, 7 and 1 of padding on rank 2`."""
        texts = []
        for one, _, _ in groups:
            alike: dict[str, list[int]] = {}
            used = one.used()
            for rank, padding in one.paddings.items():
                what = f"{plural(used.get(rank, 0), 'element')}{f' and {padding:,} of padding' if padding else ''}"
                alike.setdefault(what, []).append(rank)
            where = [f"{what} on {rank_ranges(ranks)}" for what, ranks in alike.items()]
            texts.append(f"group {one.number}: {', '.join(where)}")
        self._catalogue.facts["partitions"] = "; ".join(texts)

    # Model ----------------------------------------------------------------------------------------------------------

    def _add_model(self, by_name: Mapping[str, Rebuilt], world: int) -> None:
        """Add the model in its own order: float32 weights, then what the files have whole, and frozen parameters."""
        file = self._weights[0]
        module = self._layers(by_name) if self._members.layers else file.tree.get("module")
        if module is None and self._members.universal:
            module = {}
            names = [name for one in self._weights for name in one.tree.get("buffer_names") or ()]
            text = f"the files of a pipeline's layers are not beside it, nor what was not trained: {some(names)}"
            self._catalogue.warnings.append(Warning("missing-part", text))
        if not isinstance(module, dict):
            text = f"`{file.name}` has no `module`"
            raise ReadError(text, hint=_NOT_READ, file=file.name)
        shared = {k: v for one in self._weights for k, v in _dict(one.tree.get("shared_params")).items()}
        frozen = dict(self._frozen(world))
        # By the place in the file: tied parameters, in files of ZeRO 3 that do not name them, and others.
        first: dict[Hashable, str] = {}
        places = [_place(module[name], name) for name in by_name if name in module]
        named = any("shared_params" in one.tree for one in self._weights) or len({*places}) < len(places)
        experts = self._experts(by_name)
        self._compare_steps(module, by_name)
        for name, value in [*module.items(), *((n, None) for n in by_name if n not in module), *experts.items()]:
            path = (MODEL, name)
            place = name if named and self._members.partitioned else _place(value, name)
            owner = shared.get(name, first.setdefault(place, name))
            rebuilt = next((found[n] for n in (name, owner) for found in (by_name, frozen) if n in found), None)
            if rebuilt is not None:
                self._catalogue.add(Tensor(path, rebuilt.dtype, rebuilt.shape, rebuilt.chunks))
            elif self._members.partitioned and _is_placeholder(value, name, file):
                text = f"no file has the elements of `{name}`: `param_shapes` and `frozen_param_shapes` do not name it"
                hint = (
                    "it was saved without frozen parameters, or by an older DeepSpeed: convert with `zero_to_fp32.py`"
                )
                self._catalogue.add(Tensor(path, value.dtype, value.shape, Chunks()))
                self._catalogue.faults.append(CorruptError(text, hint=hint, tensor=name, concerns=[dotted(path)]))
            elif isinstance(value, tuple):
                self._flatten(value[0], path, value[1])
            else:
                self._flatten(value, path, file)
                self._compare_buffer(name, value)
        self._catalogue.containers[MODEL,] = Container("OrderedDict")

    def _layers(self, by_name: Mapping[str, Rebuilt]) -> dict[str, tuple[Any, StateFile]]:
        """Return what the files of a pipeline's layers have, with the file, under the names that the model has there:
        `3.weight`, or `tied_modules.embed.weight` of a layer that is there several times."""
        found: dict[str, tuple[Any, StateFile]] = {}
        tied: dict[str, set[str]] = {}
        for name in by_name:
            kind, _, rest = name.partition(".")
            layer, _, parameter = rest.partition(".")
            if kind == "tied_modules":
                tied.setdefault(f"{kind}.{layer}.", set()).add(parameter)
            elif kind.isdecimal() and int(kind) not in self._members.layers:
                text = f"the file of layer {int(kind)} is missing, of which the optimizer has `{name}`"
                hint = "copy it from where the checkpoint was saved"
                self._catalogue.faults.append(CorruptError(text, hint=hint, tensor=name))
        for number, file_name in sorted(self._members.layers.items()):
            file, root = self._load(0, file_name), f"{number}."
            if not any(f"{root}{key}" in by_name for key in file.tree):
                alike = [one for one, names in tied.items() if names and names <= file.tree.keys()]
                if len(alike) > 1 and any(f"{one}{key}" not in by_name for key in file.tree for one in alike):
                    text = f"`{file_name}` is of one of {some(alike)}, and nothing says of which"
                    raise ReadError(text, hint=members.CONVERT, file=file_name, found=alike)
                root = alike[0] if alike else root
            own = {f"{root}{key}": (value, file) for key, value in file.tree.items()}
            self._compare_rounded(file_name, own, by_name)
            found |= {key: value for key, value in own.items() if key not in found}
        named = [name for one in self._weights for name in one.tree.get("buffer_names") or () if name[:1].isdecimal()]
        if absent := [name for name in named if name not in found]:
            text = f"no file of a layer has the buffer {some(absent)}, which `{self._weights[0].name}` and others name"
            hint = "copy the file of its layer from where the checkpoint was saved"
            self._catalogue.faults.append(CorruptError(text, hint=hint))
        if gaps := [f"layer {n}" for n in range(max(self._members.layers)) if n not in self._members.layers]:
            text = f"no file of {some(gaps)}: that is so of a function; of a module, the file would be missing"
            self._catalogue.warnings.append(Warning("missing-part", text))
        return found

    def _experts(self, by_name: Mapping[str, Rebuilt]) -> dict[str, tuple[Any, StateFile]]:
        """Return what the files of experts have beside the weights that the optimizer has, with the file."""
        found: dict[str, tuple[Any, StateFile]] = {}
        names: set[Any] = set()
        for name in self._members.experts:
            file = self._load(0, name)
            names |= file.tree.keys()
            own = {key: (value, file) for key, value in file.tree.items()}
            self._compare_rounded(name, own, by_name)
            found |= {key: value for key, value in own.items() if key not in by_name}
        if absent := [name for name in by_name if ".deepspeed_experts." in name and name not in names]:
            text = f"no file of an expert has {some(absent)}"
            hint = "copy what is missing from where the checkpoint was saved"
            self._catalogue.faults.append(CorruptError(text, hint=hint, concerns=[f"{MODEL}.{n}" for n in absent]))
        return found

    def _frozen(self, world: int) -> Iterator[tuple[str, Rebuilt]]:
        """Yield the frozen parameters that have fragments: whole ones of ZeRO 2, a piece of each rank of ZeRO 3."""
        shapes = {k: tuple(v) for k, v in _dict(self._weights[0].tree.get("frozen_param_shapes")).items()}
        if not self._members.partitioned:
            shapes = {}  # they are whole in `module`, too
        by_rank = {file.rank: file for file in self._weights}
        for name, shape in shapes.items():
            part, refs = -(-prod(shape) // world), []
            for file in self._weights:
                ref = _dict(file.tree.get("frozen_param_fragments")).get(name)
                if not isinstance(ref, TensorRef) or not is_line(ref):
                    raise CorruptError(f"`{file.name}` has no fragment of the frozen `{name}`", file=file.name)
                own = max(0, min(part, prod(shape) - file.rank * part))
                refs.append((file.rank, _beginning(ref, own)))
            pieces: tuple[FlatPiece, ...] = lined_up(refs)
            place: Callable[[int, TensorRef], Extent] = lambda rank, ref: by_rank[rank].place(ref)  # noqa: E731
            yield from rebuild(refs[0][1].dtype, [Parameter(name, shape)], pieces, place, self._columns)

    def _compare_steps(self, module: Mapping[str, Any], by_name: Mapping[str, Rebuilt]) -> None:
        """Add a fault if the model states are of another step than the optimizer. One that a run did not load has taken
        other steps, too; but then the weights in 16 bits are those of the optimizer, rounded."""
        file, own = self._weights[0], next(iter(self._states.values()), None)
        counted, skipped = file.tree.get("global_steps"), file.tree.get("skipped_steps")
        if own is None or self._members.universal or type(counted) is not int or type(skipped) is not int:
            return
        state = own.tree["optimizer_state_dict"]
        taken = _state_of(state, 0).get("step", state.get("base_optimizer_state_step"))
        if isinstance(taken, TensorRef) and (taken.dtype.name, taken.shape) == ("float32", ()):
            (taken,) = struct.unpack("<f", self._read(own.place(taken), 4))
        if type(taken) not in (int, float) or taken == counted - skipped or not self._differs(module, by_name):
            return
        text = f"`{file.name}` is of step {counted - skipped}, and the optimizer in `{own.name}` of step {taken:.0f}"
        hint = "files of two saves are mixed, and the weights of both differ: take all from one"
        self._catalogue.faults.append(CorruptError(text, hint=hint, files=[file.name, own.name]))

    def _compare_rounded(self, name: str, own: Mapping[str, Any], by_name: Mapping[str, Rebuilt]) -> None:
        """Add a fault if a file of a layer, or of an expert, has other weights than the optimizer."""
        if self._differs(own, by_name):
            text = f"`{name}` has other weights than the optimizer's, rounded"
            self._catalogue.faults.append(CorruptError(text, hint=f"files of two saves are mixed: {_ONE_SAVE}"))

    def _differs(self, module: Mapping[str, Any], by_name: Mapping[str, Rebuilt]) -> bool:
        """Return whether the first weights of the model states are not those of the optimizer, rounded."""
        left = _COMPARED
        for name, rebuilt in by_name.items():
            value = module.get(name)
            ref, file = value if isinstance(value, tuple) else (value, self._weights[0])
            if not isinstance(ref, TensorRef) or ref.shape != rebuilt.shape or rebuilt.dtype.name != "float32":
                continue
            there, strides = file.place(ref), row_major(ref.shape)
            for offsets, _, here in rebuilt.chunks if there.plain else ():
                n = min(here.nbytes // 4, left)
                begin, size = sum(map(mul, offsets, strides)) * ref.dtype.itemsize, n * ref.dtype.itemsize
                masters = _rounded(self._read(here, 4 * n), ref.dtype.name)
                if masters is not None and masters != self._read(there._replace(offset=there.offset + begin), size):
                    return True
                left -= n
            if not left:
                break
        return False

    def _read(self, extent: Extent, nbytes: int) -> bytes:
        return self._pool.read(self._catalogue.files[extent.file].location, extent.offset, nbytes)

    def _compare_buffer(self, name: str, value: Any) -> None:
        """Add a fault for a buffer of which the ranks of ZeRO 3 have different elements."""
        if len(self._weights) < 2 or not isinstance(value, TensorRef):
            return
        contents = {file.rank: self._content(_dict(file.tree.get("module")).get(name), file) for file in self._weights}
        if other := [rank for rank, content in contents.items() if content != contents[self._weights[0].rank]]:
            ranks = some([f"rank {rank}" for rank in other])
            message = f"tensor `{MODEL}.{name}` differs between ranks that should have the same: {ranks} from rank 0"
            hint = f"if it is a buffer that the ranks do not synchronise, leave it out: `--exclude '{MODEL}.{name}'`"
            facts = {"ranks": [0, *other], "concerns": [f"{MODEL}.{name}"]}
            self._catalogue.faults.append(CorruptError(message, hint=hint, **facts))

    # Optimizer ------------------------------------------------------------------------------------------------------

    def _add_optimizer(
        self, states: Mapping[int, dict[str, Any]], shapes: list[dict[str, Ints]], moments: dict[str, dict[str, Any]]
    ) -> None:
        """Add the optimizer's state under the names of parameters; what a group has once, such as the step, to each."""
        catalogue, rank = self._catalogue, next(iter(states))
        root: Path = (OPTIMIZER, "state")
        for number, group in enumerate(shapes):
            for name in group:
                shared = {k: v for k, v in _state_of(states[rank], number).items() if not _is_piece(v)}
                if "step" not in shared and "base_optimizer_state_step" in states[rank]:
                    shared["step"] = states[rank]["base_optimizer_state_step"]
                for key, value in {**shared, **moments[name]}.items():
                    path = (*root, name, key)
                    if isinstance(value, Rebuilt):
                        catalogue.add(Tensor(path, value.dtype, value.shape, value.chunks))
                    else:
                        self._flatten(value, path, self._files_of_steps.get((name, key), self._states[rank]))
            self._compare_shared(states, number)
        groups = states[rank].get("param_groups", _base(states[rank]).get("param_groups"))
        if not isinstance(groups, list):
            groups = [{"params": [number]} for number in range(len(shapes))]
            text = "an elastic checkpoint has no `param_groups`: learning rates and the like are those of the script"
            catalogue.warnings.append(Warning("missing-part", text))
        named = [{**_dict(group), "params": _names(_dict(group), shapes, self._states[rank])} for group in groups]
        self._flatten(named, (OPTIMIZER, "param_groups"), self._states[rank])
        self._same({r: _base(state).get("param_groups") for r, state in states.items()}, "param_groups")
        self._add_scaler(states)

    def _compare_shared(self, states: Mapping[int, dict[str, Any]], number: int) -> None:
        values = {r: {k: v for k, v in _state_of(s, number).items() if not _is_piece(v)} for r, s in states.items()}
        self._same(values, f"state of group {number}")

    def _same(self, by_rank: Mapping[int, Any], what: str) -> None:
        """Add a fault unless the optimizers of all ranks have the same there."""
        contents = {rank: self._content(value, self._states[rank]) for rank, value in by_rank.items()}
        first = next(iter(contents))
        if other := [rank for rank, content in contents.items() if content != contents[first]]:
            names = some([self._states[rank].name for rank in (first, *other)])
            message = f"the optimizer's {what} is not the same on all ranks: {names}"
            self._catalogue.faults.append(CorruptError(message, hint=_ONE_SAVE, ranks=[first, *other]))

    def _add_scaler(self, states: Mapping[int, dict[str, Any]]) -> None:
        rank, state = next(iter(states.items()))
        for key, value in state.items():
            if key == "loss_scaler" and isinstance(value, Stub):
                fields = _dict(value.state[0]) if value.state else {}
                self._flatten({"class": stub_name(value), **fields}, ("loss_scaler",), self._states[rank])
                self._same({r: s.get(key) for r, s in states.items()}, "loss scaler")
            elif key not in _OF_OPTIMIZER:
                self._flatten(_plain(value), ("zero", key), self._states[rank])
                self._same({r: s.get(key) for r, s in states.items()}, f"`{spelt(key)}`")

    # Universal ------------------------------------------------------------------------------------------------------

    def _read_universal(self, world: int) -> None:
        """Add each parameter, and its state, from the folder that is called like it."""
        if self._members.copy:
            copy, first = self._load(0, self._members.copy), self._weights[0]
            if self._content(copy.tree, copy) != self._content(first.tree, first):
                text = f"`{copy.name}` is not the same as `{first.name}`"
                self._catalogue.faults.append(CorruptError(text, hint=_ONE_SAVE, file=copy.name))
        of_ranks = [_shapes(file) for file in self._weights if "param_shapes" in file.tree]
        shapes, folder = (
            _merged(item for one in of_ranks for item in enumerate(one)),
            self._location / members.UNIVERSAL,
        )
        shape_of: dict[str, list[Ints]] = {}  # of each model-parallel rank that has some of it
        for name, shape in (item for one in of_ranks for group in one for item in group.items()):
            shape_of.setdefault(name, []).append(shape)
        by_name: dict[str, Rebuilt] = {}
        moments: dict[str, dict[str, Any]] = {name: {} for name in shape_of}
        module = _dict(self._weights[0].tree.get("module"))
        for entry in folder.entries():
            name = entry.name
            if not entry.is_dir:
                if name != _COMMON:
                    self._catalogue.faults.append(ReadError(f"`{folder / name}` is of no parameter", hint=_NOT_READ))
            elif name not in shape_of and isinstance(module.get(name), TensorRef):
                self._copies.append(name)
            else:
                state, of_file = self._universal_files(folder / name, shape_of.get(name, []))
                if "fp32" in state:
                    by_name[name] = state.pop("fp32")
                moments.setdefault(name, {}).update(state)
                for key, file in of_file.items():
                    self._files_of_steps[name, key] = file
        self._check_universal(by_name, moments)
        self._add_model(by_name, world)
        is_there = _COMMON in folder.names()
        if not is_there and any(moments.values()):
            text = f"`{folder / _COMMON}` is missing, of which the learning rates and the like are"
            raise CorruptError(text, hint="copy it from where the checkpoint was converted", file=folder / _COMMON)
        if is_there:
            common = self._load(0, f"{members.UNIVERSAL}/{_COMMON}")
            self._states = {0: common}
            self._add_optimizer({0: common.tree}, shapes, moments)
        if self._copies:
            text = f"copies in float32 of buffers, frozen and tied parameters are not read: {some(self._copies)}"
            self._catalogue.warnings.append(Warning("superseded-file", text))

    def _universal_files(self, folder: Location, shapes: list[Ints]) -> tuple[dict[str, Any], dict[str, StateFile]]:
        """Return what is in the files of one parameter by their stems, and the files of what is no tensor. The files
        have it whole; `shapes` are those that it has on model-parallel ranks."""
        found: dict[str, Any] = {}
        others: dict[str, StateFile] = {}
        for name in folder.names():
            stem, dot, suffix = name.rpartition(".")
            if (dot, suffix) != (".", "pt"):
                raise ReadError(f"`{folder / name}` is no file of a universal checkpoint", hint=_NOT_READ)
            file = self._load(0, f"{members.UNIVERSAL}/{folder.name}/{name}", plain=True)
            value = file.loaded.tree
            experts = value.get("ep_num_experts") if isinstance(value, dict) else None  # a rank has fewer
            value = value.get("param") if isinstance(value, dict) else value
            if not _is_piece(value) and stem not in ("fp32",):
                found[stem], others[stem] = value, file
                continue
            if not isinstance(value, TensorRef):
                raise CorruptError(f"`{folder / name}` has no tensor", hint=_NOT_READ)
            own = [shape if experts is None else (experts, *shape[1:]) for shape in shapes]
            if not _is_cut(value.shape, own):
                if not is_line(value) or prod(value.shape) != prod(own[0]):
                    text = f"`{folder / name}` has {list(value.shape)}, but `param_shapes` {list(own[0])}"
                    raise CorruptError(text, hint=_ONE_SAVE, found=list(value.shape), expected=list(own[0]))
                value = replace(value, shape=own[0], strides=row_major(own[0]))
            found[stem] = Rebuilt(value.dtype, value.shape, Chunks.single(value.shape, file.place(value)))
        return found, others

    def _check_universal(self, by_name: Mapping[str, Rebuilt], moments: Mapping[str, Mapping[str, Any]]) -> None:
        """Add a fault for each parameter without weights, or with a part of the state that others have."""
        kinds = {frozenset(state) - {"step"} for state in moments.values()}
        for name, state in moments.items():
            own = frozenset(state) - {"step"}
            lacking = {kind for others in kinds if own and own < others for kind in others - own}
            if name not in by_name:
                lacking.add("fp32")
            if lacking:
                text = f"`zero/{name}` has no {some(sorted(f'{kind}.pt' for kind in lacking))}"
                of = f"{MODEL}.{name}" if "fp32" in lacking else f"{OPTIMIZER}.state.{name}"
                hint = "copy it from where the checkpoint was converted"
                self._catalogue.faults.append(CorruptError(text, hint=hint, tensor=name, concerns=[of]))

    # Without ZeRO ---------------------------------------------------------------------------------------------------

    def _read_plain(self) -> None:
        """Add the model as it was in training, and the optimizer under its own ids."""
        file = self._weights[0]
        self._add_model({}, 1)
        state = file.tree.get("optimizer")
        if self._members.layers:
            text = "in a pipeline without ZeRO each stage counts its own parameters, and no file says which they are"
            fault = CorruptError(text, hint="leave it out: `--drop optimizer`", concerns=[OPTIMIZER])
            self._catalogue.faults.append(fault)
            for file in self._weights:
                self._flatten(file.tree.get("optimizer"), (OPTIMIZER, f"stage{file.rank // self._world}"), file)
            return
        if state is None:
            text = "no optimizer state: DeepSpeed before 0.18.5 saves none of bfloat16 without ZeRO"
            if stage := _at(file.tree, "ds_config", "zero_optimization", "stage"):
                text = (
                    f"no `*_optim_states.pt` of ZeRO-{shown(stage)}: the weights are those in 16 bits, and no optimizer"
                )
            self._catalogue.warnings.append(Warning("missing-part", text))
            return
        inner = _dict(state).get("optimizer_state_dict")
        if any("worker_error" in _dict(own) for own in _dict(_dict(inner or state).get("state")).values()):
            text = (
                f"`{file.name}`: `worker_error` of a 1-bit optimizer, of which each rank has its own, and one is there"
            )
            fault = CorruptError(text, hint="leave the optimizer out: `--drop optimizer`", concerns=[OPTIMIZER])
            self._catalogue.faults.append(fault)
        if not isinstance(inner, dict):
            self._flatten(state, (OPTIMIZER,), file)
            return
        masters = _dict(state).get("fp32_groups")
        if not isinstance(masters, list):
            text = "the optimizer of fp16 without ZeRO has flat groups, and no names of what is in them"
            hint = "leave it out: `--drop optimizer`"
            self._catalogue.faults.append(CorruptError(text, hint=hint, concerns=[OPTIMIZER]))
        else:
            # The float32 weights are state of each parameter like any other.
            ids = [key for group in inner.get("param_groups", ()) for key in _dict(group).get("params", ())]
            lines = [ref for group in masters if isinstance(group, list) for ref in group]
            of_ids = {key: {"fp32": ref} for key, ref in zip(ids, lines, strict=False)}
            if len(ids) != len(lines):
                raise CorruptError(
                    f"`{file.name}`: {len(lines)} float32 weights of {len(ids)} parameters", file=file.name
                )
            inner = {
                **inner,
                "state": {k: {**_dict(v), **of_ids.get(k, {})} for k, v in _dict(inner.get("state")).items()},
            }
        self._flatten(inner, (OPTIMIZER,), file)
        rest = {k: v for k, v in _dict(state).items() if k not in ("optimizer_state_dict", "fp32_groups")}
        self._flatten(rest, ("loss_scaler",), file)

    # All else -------------------------------------------------------------------------------------------------------

    def _add_rest(self) -> None:
        """Add what lies beside the model: once if all ranks have the same, else that of each under its own key."""
        first = self._weights[0]
        for key in dict.fromkeys(key for file in self._weights for key in file.tree if key not in LAYOUT):
            contents = [self._content(file.tree.get(key), file) for file in self._weights]
            if all(content == contents[0] for content in contents):
                if not (key == "autoep_layers" or (first.tree[key] is None and key in _EMPTY)):
                    self._flatten(first.tree[key], (*_CLIENT, key) if key in _ROOTS else (key,), first)
            elif key in _COUNTERS:
                message = f"`{spelt(key)}` is not the same on all ranks"
                self._catalogue.faults.append(CorruptError(message, hint=f"files of two saves are mixed: {_ONE_SAVE}"))
            else:
                for file in self._weights:
                    if key in file.tree:
                        own = (*_CLIENT, key) if key in _ROOTS else (key,)
                        self._flatten(file.tree[key], parts.with_rank(own, file.rank), file)

    def _content(self, value: Any, file: StateFile) -> str:
        """Return a digest of a value, tensors by their checksums, without which one is only the same as itself."""

        def described(ref: Any, path: Path) -> Any:
            ref = ref.whole() if isinstance(ref, StorageRef) else ref
            extent = file.place(ref)
            record = extent.record
            place = (extent.file, extent.offset) if record is None else (record.crc, extent.offset - record.offset)
            known = place if extent.nbytes else ()
            return ("tensor", ref.dtype.name, ref.shape, ref.strides, known)

        return identity.key(replaced(value, (TensorRef, StorageRef), described))

    def _flatten(self, value: Any, root: Path, file: StateFile) -> None:
        """Add a tree at a path of the catalogue."""

        def make(ref: Any, path: Path, embedded: bool) -> Tensor:
            ref = ref.whole() if isinstance(ref, StorageRef) else ref
            return Tensor(path, ref.dtype, ref.shape, Chunks.single(ref.shape, file.place(ref)), embedded=embedded)

        flatten(value, self._catalogue, TensorRef, make, root, bare=StorageRef)


_BLOCK, _MOST_COMPARED = 1 << 20, 1 << 30  # bytes of tied parameters: opening a checkpoint is not reading it
_COMPARED = 1 << 14  # elements: of those in bfloat16, a step of a low learning rate changes one in twenty
_COMMON = "optimizer_state.pt"
_ROOTS, _CLIENT = (MODEL, OPTIMIZER, "zero", "loss_scaler"), ("client_state",)  # what a script calls its own so
_NOT_READ = "convert it with DeepSpeed's own `zero_to_fp32.py` or `ds_to_universal.py`, and name what they write"
_OFFLOADED = "save with `offload_optimizer` on the CPU, or off"
_EMPTY = ("lr_scheduler", "data_sampler", "random_ltd")
_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "dp_world_size", "mp_world_size", "ds_version")


def _rounded(data: bytes, dtype: str) -> bytes | None:
    """Return float32 elements as DeepSpeed rounds them to a dtype; None for one that it does not train in."""
    count = len(data) // 4
    if dtype == "bfloat16":
        words = struct.unpack(f"<{count}I", data)
        return struct.pack(f"<{count}H", *(word + 0x7FFF + (word >> 16 & 1) >> 16 & 0xFFFF for word in words))
    if dtype == "float16":
        try:
            return struct.pack(f"<{count}e", *struct.unpack(f"<{count}f", data))
        except OverflowError:
            return None
    return data if dtype == "float32" else None


def _dict(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _at(tree: Any, *keys: str) -> Any:
    for key in keys:
        tree = _dict(tree).get(key)
    return tree


def _plain(value: Any) -> Any:
    """Return the number of an enumeration of DeepSpeed; any other value as it is."""
    if isinstance(value, Stub) and (stub_name(value) or "").endswith("ZeroStageEnum"):
        return value.args[0] if value.args else None
    return value


def _place(value: Any, name: str) -> Hashable:
    """Return what is the same for tensors that are one; of another value, its name."""
    return (value.storage.key, value.offset, value.shape, value.strides) if isinstance(value, TensorRef) else name


def _is_piece(value: Any) -> bool:
    """Return whether a value of the state is of the elements of a group."""
    return isinstance(value, TensorRef) and len(value.shape) > 0


def _holds_tensor(value: Any) -> bool:
    found: list[bool] = []
    replaced(value, (TensorRef, StorageRef), lambda ref, _: found.append(True))
    return bool(found)


def _is_placeholder(value: Any, name: str, file: StateFile) -> bool:
    """Return whether a tensor of `module` stands for a partitioned parameter; an empty buffer is itself."""
    return isinstance(value, TensorRef) and value.shape == (0,) and name not in (file.tree.get("buffer_names") or ())


def _beginning(ref: TensorRef, numel: int) -> TensorRef:
    return replace(ref, shape=(min(numel, ref.shape[0]),))


def _base(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict of the optimizer inside; of an elastic checkpoint, without `param_groups`."""
    base = state.get("optimizer_state_dict", state.get("base_optimizer_state"))
    return {"state": dict(enumerate(base))} if isinstance(base, list) else _dict(base)


def _state_of(state: Mapping[str, Any], number: int) -> dict[str, Any]:
    return _dict(_dict(_base(state).get("state")).get(number))


def _names(group: Mapping[str, Any], shapes: list[dict[str, Ints]], file: StateFile) -> list[str]:
    """Return the names of the parameters that a group of the optimizer inside has, by the numbers of flat groups."""
    numbers = group.get("params")
    if not isinstance(numbers, list) or any(type(n) is not int or not 0 <= n < len(shapes) for n in numbers):
        text = f"`{file.name}`: `param_groups` of other groups than the {len(shapes)} of `param_shapes`"
        raise CorruptError(text, hint=_ONE_SAVE, file=file.name)
    return [name for number in numbers for name in shapes[number]]


def _shapes(file: StateFile) -> list[dict[str, Ints]]:
    """Return the names and shapes of each group, in the order of the flat group. Before 2021-10 it was one dict."""
    value = file.tree.get("param_shapes")
    groups = [value] if isinstance(value, dict) else value
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise CorruptError(f"`{file.name}` has no `param_shapes`", hint=_NOT_READ, file=file.name)
    for group in groups:
        for name, shape in group.items():
            if not isinstance(name, str) or not isinstance(shape, (TorchSize, tuple, list)):
                raise CorruptError(f"`{file.name}`: `param_shapes` has a shape that is none", file=file.name)
    names = [name for group in groups for name in group]
    if len(names) != len({*names}):
        raise CorruptError(f"`{file.name}`: `param_shapes` has a parameter in two groups", file=file.name)
    return [{name: tuple(shape) for name, shape in group.items()} for group in groups]


def _merged(groups: Iterable[tuple[int, dict[str, Ints]]]) -> list[dict[str, Ints]]:
    """Return the shapes of each group with the experts of all ranks, and the layers of all stages."""
    merged: list[dict[str, Ints]] = []
    for number, shapes in groups:
        merged += [{} for _ in range(len(merged), number + 1)]
        merged[number] |= shapes
    return merged


def _is_cut(shape: Ints, parts: Collection[Ints]) -> bool:
    """Return whether tensors of these shapes may be what tensor parallelism has cut one of `shape` into; a vocabulary
    may have had padding."""
    if any(len(part) != len(shape) for part in parts):
        return False
    dims = [d for d in range(len(shape)) if any(part[d] != shape[d] for part in parts)]
    return not dims or (len(dims) == 1 and shape[dims[0]] <= sum(part[dims[0]] for part in parts))


def _check_versions(info: Any, name: str) -> None:
    """Raise ReadError for a description of the layout that is newer than what is known."""
    affine, universal = _at(info, "affine_map", "version"), _at(info, "universal_checkpoint_version")
    for what, version, known in (
        ("affine_map", affine, _AFFINE_VERSION), ("universal_checkpoint_info", universal, UNIVERSAL_VERSION)
    ):  # fmt: skip
        if isinstance(version, (int, float)) and version > known:
            text = f"`{name}`: `{what}` of version {version}, newer than {known}, which is read"
            raise ReadError(text, hint=_NOT_READ, file=name, found=version, expected=known)
