"""Writes ZeRO 1, 2 and 3 as DeepSpeed saves them, for any number of ranks.

    ZeRO 1, 2   mp_rank_00_model_states.pt           the model whole, and what lies beside it
                zero_pp_rank_0_..._optim_states.pt   rank 0's elements of each group: weights, and each kind of state
    ZeRO 3      zero_pp_rank_0_..._model_states.pt   the model without parameters, rank 0's elements of frozen ones
                zero_pp_rank_0_..._optim_states.pt   rank 0's elements of each parameter

The elements of parameters lie in flat tensors, where `flat.zero_partitions` says; what is padding stays zero.
ZeRO 1 and 2 have the weights twice: as pieces, and in `module`, from which DeepSpeed takes those that it computes with.
The catalogue has the names that the reader gives, and parameter groups as lists of names.

Upstream: DeepSpeed 0.19 `runtime/engine.py` (`_common_checkpoint_state`, `_save_zero_checkpoint`),
`runtime/zero/stage_1_and_2.py` and `stage3.py` (`state_dict`, `_create_fp16_sub_groups`).
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ckpttool.catalogue import flatten, parts, rank_values
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.dtypes import Dtype
from ckpttool.catalogue.entries import Catalogue, Chunks, Entry, File, Path, Record, Tensor
from ckpttool.catalogue.protocols import Crcs, FormatLoss, Sink, SinkOptions
from ckpttool.catalogue.rank_values import OfRank
from ckpttool.catalogue.values import Stub, TorchSize, stub_type
from ckpttool.flat import zero_partitions as partitions
from ckpttool.flat.pieces import PieceColumns
from ckpttool.flat.zero_partitions import Lines, Partition
from ckpttool.flat.zero_states import as_dict
from ckpttool.serialization import torch_tree, torch_zip_writer
from ckpttool.storage import files
from ckpttool.storage.crc import combine, with_zeros
from ckpttool.storage.stores import Location

VERSION = "0.19.8"
"""The DeepSpeed whose files these are, and whose loader reads them."""
_SUB_GROUP = 1_000_000_000  # `sub_group_size` of a configuration that has none
_OF_OPTIMIZER = ("model", "optimizer", "zero", "loss_scaler")  # what has no place of its own beside the model
_CLIENT = (("model",), ("zero",), ("loss_scaler",))
_MODEL, _STATE = ("model",), ("optimizer", "state")


@dataclass(frozen=True)
class ZeroLayout:
    """What DeepSpeed writes, and for what configuration: `ZeroLayout(3, bf16=True, buffers={"rope.inv_freq"})`. Of the
    tensors of a model that are not trained, `buffers` are no parameters. With `latest`, that names the directory."""

    stage: int
    bf16: bool = False
    buffers: Collection[str] = ()
    latest: bool = False

    @property
    def partitioned(self) -> bool:
        """Whether the model has no parameters of its own."""
        return self.stage == 3

    def weights_file(self, rank: int) -> str:
        return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if self.partitioned else "mp_rank_00_model_states.pt"

    def optimizer_file(self, rank: int) -> str:
        return f"{'bf16_' * self.bf16}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def losses(catalogue: Catalogue, path: str, *, layout: ZeroLayout) -> list[FormatLoss]:
    """Return the values that cannot be pickled, and those of ranks that have no file."""
    of_ranks = _all_of_ranks(catalogue) if layout.partitioned else ()
    return [*torch_zip_writer.losses(catalogue.objects), *rank_values.without_file(of_ranks, catalogue.world_size)]


def create(location: Location, planned: Catalogue, options: SinkOptions, *, layout: ZeroLayout) -> Sink:
    """Create the files of all ranks at their full size, with holes where the elements go."""
    files.make_directory(location, exist_ok=True)
    if layout.latest:
        (location.parent / "latest").put(location.name.encode())
    return _Writing(location, planned, options.world, layout).run()


def _all_of_ranks(catalogue: Catalogue) -> list[OfRank]:
    """Return the values that ranks have of their own beside the model, such as `rng.rank3`."""
    every = filter(None, map(rank_values.of_rank, catalogue.entries.values()))
    return [one for one in every if len(one.root) == 1 and one.root[0] not in _OF_OPTIMIZER]


class _FlatTensor(NamedTuple):
    """A tensor that each rank has, of the elements of several parameters. `kinds` are those of the state, with the
    tensor that the first parameter has: state that is not of each element, the step, is the same for all."""

    group: int
    partition: Partition
    dtype: Dtype
    kinds: dict[str, Entry]
    size: int


class _Sink(torch_zip_writer.ArchiveSink):
    """A sink of archives in which some records, by file and offset, are the lines of ranks: filled by chunks, and zero
    between them."""

    def __init__(
        self,
        catalogue: Catalogue,
        layouts: list[torch_zip_writer.ArchiveLayout],
        lines: Mapping[tuple[int, int], tuple[Lines, int]],
    ) -> None:
        super().__init__(catalogue, layouts)
        self._lines = lines

    def crc_of(self, record: Record, crcs: Crcs) -> int:
        if (record.file, record.offset) not in self._lines:
            return super().crc_of(record, crcs)
        lines, rank = self._lines[record.file, record.offset]
        crc, at = 0, record.offset
        for offset, nbytes in lines.boxes(rank):
            crc = combine(with_zeros(crc, offset - at), crcs[record.file, offset], nbytes)
            at = offset + nbytes
        return with_zeros(crc, record.offset + record.nbytes - at)


class _Writing:
    """Creates the files one after the other, and notes where the elements of each tensor go."""

    def __init__(self, location: Location, planned: Catalogue, world: int, layout: ZeroLayout) -> None:
        self._location, self._planned, self._world, self._layout = location, planned, world, layout
        self._model = {
            str(path[1]): entry
            for path, entry in planned.entries.items()
            if path[:1] == _MODEL and len(path) == 2 and isinstance(entry, Tensor) and not entry.embedded
        }
        self._of_ranks = _all_of_ranks(planned) if layout.partitioned else []
        self._groups: list[dict[str, Any]] = self._tree(("optimizer", "param_groups")) or []
        self._trained = [name for group in self._groups for name in group["params"]]
        self._config = self._tree(("ds_config",)) or {}
        self._zero = as_dict(as_dict(self._config).get("zero_optimization"))
        self._owners = self._owners_of_ties()
        self._flats = list(self._flat_tensors())
        others = self._model.keys() - {*self._trained, *layout.buffers}
        self._frozen = {
            name: partitions.divided([{name: entry.shape}], range(world), world)[0]
            for name, entry in self._model.items()
            if name in others and self._owners[name] == name
        }
        self._parameters = {*self._trained, *self._frozen}
        self._lines_of: dict[Path, tuple[Lines, str]] = {}
        self._of_records: dict[tuple[int, int], tuple[Lines, int]] = {}
        self._copies = defaultdict[Path, list[Chunks]](list)  # of tensors that a file has whole
        self._firsts: dict[Path, Path] = {}  # of state that a group has once, where the others have theirs
        self._files: list[File] = []
        self._layouts: list[torch_zip_writer.ArchiveLayout] = []

    def run(self) -> Sink:
        ranks = range(self._world)
        for rank in ranks if self._layout.partitioned else range(1):
            self._write_weights(rank)
        for rank in ranks:
            self._write_optimizer(rank)
        return _Sink(self._created(), self._layouts, self._of_records)

    def _tree(self, root: Path) -> Any:
        """Return the value below a path, of values that are not tensors."""
        return flatten.subtree(self._planned, root)

    # What lies where --------------------------------------------------------------------------------------------------

    def _owners_of_ties(self) -> dict[str, str]:
        """Return the name under which each tensor of the model is stored: of tied ones, that which is trained."""
        first = {name: self._planned.first(entry).path for name, entry in self._model.items()}
        stored = {first[name]: name for name in reversed(self._trained)}
        own = {*self._trained}
        return {name: name if name in own else stored.setdefault(first[name], name) for name in self._model}

    def _flat_tensors(self) -> Iterator[_FlatTensor]:
        most = self._zero.get("sub_group_size")
        most = int(most) if isinstance(most, (int, float)) else _SUB_GROUP
        reordered = self._zero.get("round_robin_gradients") is True
        states = defaultdict[str, dict[str, Entry]](dict)
        for path, entry in self._planned.entries.items():
            if path[:2] == _STATE and len(path) == 4:
                states[str(path[2])][str(path[3])] = entry
        for number, group in enumerate(self._groups):
            names = group["params"]
            if reordered and not self._layout.partitioned:
                names = partitions.round_robin(names, self._world)
            shapes = {name: self._model[name].shape for name in names}
            if self._layout.partitioned:
                cut = partitions.sub_groups(shapes, self._world, most)
                every = [partitions.divided([part], range(self._world), self._world)[0] for part in cut]
            else:
                every = [partitions.flat(number, shapes, self._world)]
            for one in every:
                first = next(iter(one.shapes))
                size = one.paddings[0] + sum(piece.end - piece.start for piece in one.of_rank(0))
                yield _FlatTensor(number, one, self._model[first].dtype, states.get(first, {}), size)

    def _is_of_each(self, flat: _FlatTensor, kind: str) -> bool:
        """Return whether a kind of state has a value for each element of the parameters."""
        entry, first = flat.kinds[kind], next(iter(flat.partition.shapes.values()))
        return kind != "step" and isinstance(entry, Tensor) and entry.shape == first

    # The files --------------------------------------------------------------------------------------------------------

    def _write(self, name: str, rank: int, tree: Any) -> tuple[torch_tree.StorageKeys, dict[str, Record]]:
        """Create an archive, and return where each of its storages goes."""
        number, location = len(self._files), self._location / name
        keys = torch_tree.StorageKeys(self._planned)
        layout = torch_zip_writer.lay_out(tree, keys.new_tensor, file=number, root=name.removesuffix(".pt"))
        self._files.append(File(location, name, layout.size, rank))
        torch_zip_writer.write(layout, location)
        storages, layout.storages = layout.storages, {}
        self._layouts.append(layout)
        mentioned = [self._planned.tensor(path) for path in keys.tensors if path in self._planned.entries]
        own = {one.path: one for tensor in mentioned for one in (self._planned.first(tensor), tensor)}
        for path, tensor in own.items():
            extent = torch_zip_writer.extent_of(storages[str(keys.key(tensor))])
            self._copies[path].append(Chunks.single(tensor.shape, extent))
        return keys, storages

    def _write_weights(self, rank: int) -> None:
        fragments: OrderedDict[str, Tensor] = OrderedDict()
        for name in self._frozen:
            entry = self._model[name]
            leaf = _leaf(("fragment", name), entry.dtype, -(-entry.numel // self._world))
            fragments[name] = leaf if self._layout.partitioned else entry
        has_frozen = self._layout.stage > 1
        shared = {name: owner for name, owner in self._owners.items() if name != owner and owner in self._parameters}
        tree = {
            "module": self._module(rank),
            "buffer_names": [name for name in self._model if name in self._layout.buffers],
            "optimizer": None,
            "param_shapes": [_sizes(flat.partition.shapes) for flat in self._flats],
            "frozen_param_shapes": _sizes({n: self._model[n].shape for n in self._frozen}) if has_frozen else None,
            "shared_params": shared if rank == 0 else {},
            "frozen_param_fragments": fragments if has_frozen else None,
            **self._beside(rank),
        }
        keys, storages = self._write(self._layout.weights_file(rank), rank, tree)
        for name, leaf in fragments.items() if self._layout.partitioned else ():
            self._fill(rank, storages[str(keys.key(leaf))], self._frozen[name], {name: (*_MODEL, name)})

    def _module(self, rank: int) -> Any:
        """Return the model as a rank has it; of ZeRO 3, a parameter is an empty tensor."""

        def value_of(entry: Entry) -> Any:
            if not isinstance(entry, Tensor):
                return entry.value
            name = str(entry.path[1])
            is_own = len(entry.path) > 2 or self._owners[name] not in self._parameters
            return entry if is_own or not self._layout.partitioned else _leaf(("none", name), entry.dtype, 0)

        return flatten.subtree(self._planned, _MODEL, value_of)

    def _beside(self, rank: int) -> dict[str, Any]:
        """Return what a rank has beside the model: the counters, the schedule, what the script has given."""

        def within(path: Path) -> Path:
            if path[:1] == ("client_state",) and path[1:2] in _CLIENT:
                return path[1:]  # what the script calls as the reader calls another thing
            is_own = self._layout.partitioned and path[:1] not in _CLIENT and path[1:2] == (parts.rank_key(rank),)
            return (path[0], *path[2:]) if is_own else path

        own: dict[Path, Entry] = {}
        of_others = {one.entry.path for one in self._of_ranks if one.rank != rank}
        for path, entry in self._planned.entries.items():
            if path[0] not in _OF_OPTIMIZER and path not in of_others:
                own[within(path)] = entry
        containers = {within(path): container for path, container in self._planned.containers.items() if path}
        tree: dict[str, Any] = flatten.unflatten(Catalogue("", entries=own, containers=containers))
        return tree

    def _write_optimizer(self, rank: int) -> None:
        leaves: list[tuple[_FlatTensor, str, Tensor]] = []
        state: dict[int, dict[str, Any]] = {}
        masters: list[Tensor] = []
        for number, flat in enumerate(self._flats):
            padding = 0 if self._layout.partitioned else flat.partition.paddings[rank]
            masters.append(_leaf(("weights", number), flat.dtype, flat.size - padding))
            leaves.append((flat, "", masters[-1]))
            for kind, entry in flat.kinds.items():
                if not isinstance(entry, Tensor):
                    state.setdefault(number, {})[kind] = entry.value
                    continue
                is_of_each = self._is_of_each(flat, kind)
                leaf = _leaf((kind, number), entry.dtype, flat.size if is_of_each else None, entry.shape)
                state.setdefault(number, {})[kind] = leaf
                leaves.append((flat, kind, leaf))
        of_stage = self._partitioned_state if self._layout.partitioned else self._flat_state
        tree = {
            "optimizer_state_dict": of_stage(rank, state, masters),
            "ds_config": self._config,
            "ds_version": VERSION,
        }
        keys, storages = self._write(self._layout.optimizer_file(rank), rank, tree)
        for flat, kind, leaf in leaves:
            self._place(rank, flat, kind, storages[str(keys.key(leaf))])

    def _place(self, rank: int, flat: _FlatTensor, kind: str, record: Record) -> None:
        """Note where the elements of the parameters of a flat tensor lie in the file of a rank."""
        paths = {name: (*_STATE, name, kind) if kind else (*_MODEL, name) for name in flat.partition.shapes}
        if kind and not self._is_of_each(flat, kind):
            first, *others = paths.values()
            tensor = self._planned.tensor(first)
            self._copies[first].append(Chunks.single(tensor.shape, torch_zip_writer.extent_of(record)))
            self._firsts |= dict.fromkeys(others, first)
            return
        self._fill(rank, record, flat.partition, paths)

    def _fill(self, rank: int, record: Record, partition: Partition, paths: Mapping[str, Path]) -> None:
        """Note that a record is the line of a rank, in which the parameters that have these paths are."""
        first = next(iter(paths.values()))
        if first not in self._lines_of:
            lines = Lines(partition, self._planned.tensor(first).dtype.itemsize, {})
            self._lines_of.update((path, (lines, name)) for name, path in paths.items())
        lines, _ = self._lines_of[first]
        lines.records[rank] = record
        self._of_records[record.file, record.offset] = lines, rank

    def _param_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups as the optimizer has them: of the numbers of flat tensors."""
        numbers: list[list[int]] = [[] for _ in self._groups]
        for number, flat in enumerate(self._flats):
            numbers[flat.group].append(number)
        return [{**group, "params": own} for group, own in zip(self._groups, numbers, strict=True)]

    def _beside_state(self) -> dict[str, Any]:
        """Return what ZeRO keeps beside the state of the optimizer."""
        fields = dict(self._tree(("loss_scaler",)) or {})
        module, _, name = str(fields.pop("class", "")).rpartition(".")
        scaler = {"loss_scaler": _object(module, name, fields)} if name else {}
        return scaler | (self._tree(("zero",)) or {})

    def _flat_state(self, rank: int, state: dict[int, dict[str, Any]], masters: list[Tensor]) -> dict[str, Any]:
        mappings = []
        for flat in self._flats:
            addresses: OrderedDict[str, Stub] = OrderedDict()
            for start, end, name, _ in flat.partition.of_rank(rank):
                fields = {"numel": end - start, "start": start}
                addresses[name] = _object("deepspeed.utils.tensor_fragment", "fragment_address", fields)
            mappings.append(addresses)
        aligned = self._zero.get("parameter_alignment")
        # DeepSpeed puts padding between the parameters itself, if nothing says that there is none.
        between = {} if aligned else {"param_alignment_paddings": [[0] * len(f.partition.shapes) for f in self._flats]}
        return {
            **self._beside_state(),
            "base_optimizer_state": {"state": state, "param_groups": self._param_groups()},
            "single_partition_of_fp32_groups": masters,
            "zero_stage": _stage(self._layout.stage),
            "group_paddings": [flat.partition.paddings[rank] for flat in self._flats],
            **between,
            "partition_count": [self._world] * len(self._flats),
            "ds_version": VERSION,
            "param_slice_mappings": mappings,
        }

    def _partitioned_state(self, rank: int, state: dict[int, dict[str, Any]], masters: list[Tensor]) -> dict[str, Any]:
        # These it does not do without; those of a run that scales nothing.
        static = _object("deepspeed.runtime.fp16.loss_scaler", "LossScaler", {"cur_scale": 1.0, "dynamic": False})
        return {
            "zero_stage": _stage(self._layout.stage),
            "loss_scaler": static,
            "dynamic_loss_scale": False,
            "overflow": False,
            **self._beside_state(),
            "partition_count": self._world,
            "optimizer_state_dict": {"state": state, "param_groups": self._param_groups()},
            "fp32_flat_groups": masters,
        }

    # The catalogue ----------------------------------------------------------------------------------------------------

    def _created(self) -> Catalogue:
        created = Catalogue("deepspeed", self._files, facts={"layout": f"ZeRO-{self._layout.stage}"})
        created.containers = dict(self._planned.containers)
        created.warnings += rank_values.left_without(self._of_ranks, self._world)
        filled: dict[Path, Path] = {}
        columns = PieceColumns()
        for path, entry in self._planned.entries.items():
            if not isinstance(entry, Tensor):
                created.add(entry)
                continue
            stored = self._firsts.get(path, path)
            if path[:1] == _MODEL and str(path[1]) in self._owners:
                stored = (*_MODEL, self._owners[str(path[1])])
            alias = entry.alias
            if stored in self._lines_of or path[:2] == _STATE:
                first = filled.setdefault(stored, path)
                alias = None if first == path else first
            copies = self._copies.get(stored, [])
            if stored in self._lines_of:
                lines, name = self._lines_of[stored]
                copies = [lines.chunks(name, columns, entry.dtype), *copies]
            created.add(replace(entry, chunks=copies[0] if copies else Chunks(), alias=alias))
            created.replicas += [replace(entry, chunks=one, alias=None) for one in copies[1:] if alias is None]
        return created


def _leaf(path: Path, dtype: Dtype, numel: int | None, shape: Ints = ()) -> Tensor:
    """Return a tensor that only the files have: `numel` elements of a flat one."""
    return Tensor(("", *path), dtype, shape if numel is None else (numel,), Chunks())


def _sizes(shapes: Mapping[str, Ints]) -> OrderedDict[str, TorchSize]:
    return OrderedDict((name, TorchSize(shape)) for name, shape in shapes.items())


def _object(module: str, name: str, fields: dict[str, Any]) -> Stub:
    """Return an object of DeepSpeed with these attributes."""
    kind = stub_type(module, name)
    value = kind.__new__(kind)
    value.state = [fields]
    return value


def _stage(number: int) -> Stub:
    stage: Stub = stub_type("deepspeed.runtime.zero.config", "ZeroStageEnum")(number)
    return stage
