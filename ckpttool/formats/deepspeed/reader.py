"""Opens a DeepSpeed directory: the ranks' partitions as whole parameters, and all that lies beside them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

from ckpttool.catalogue import parts
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue, Chunks, Container, Extent, Path, Tensor, dotted
from ckpttool.catalogue.protocols import NO_HINTS, OpenOptions, PlacedSource, Source
from ckpttool.catalogue.shown import shown, spelt
from ckpttool.catalogue.values import Stub, stub_name
from ckpttool.errors import CorruptError, ReadError
from ckpttool.flat import zero_partitions as partitions
from ckpttool.flat import zero_states
from ckpttool.flat.pieces import PieceColumns, Rebuilt, is_line, is_of_elements
from ckpttool.flat.zero_states import (
    NOT_READ,
    OF_OPTIMIZER,
    ONE_SAVE,
    ZeroState,
    as_dict,
    check_state,
    check_versions,
    of_group,
    shapes_of,
)
from ckpttool.formats.deepspeed import layers, members, universal
from ckpttool.formats.deepspeed.members import StateFile
from ckpttool.formats.deepspeed.open_directory import MIXED, OpenDirectory
from ckpttool.serialization import unpickler
from ckpttool.serialization.torch_pickle import TensorRef
from ckpttool.storage import files
from ckpttool.storage.stores import Location
from ckpttool.text import plural, some

MODEL, OPTIMIZER = "model", "optimizer"
# What the layout is made of, and what becomes the model and the optimizer.
LAYOUT = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments",
}  # fmt: skip


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


class _ZeroOpening(OpenDirectory):
    """Reads the files of a directory one after the other."""

    def __init__(self, catalogue: Catalogue, pool: files.Pool, location: Location) -> None:
        super().__init__(catalogue, pool, location)
        (_, name), *others = sorted(self.members.weights.items())
        self.weights.append(self.load(0, name))
        world = self.first.tree.get("dp_world_size")
        most = 1 + max((rank for _, rank in (*self.members.optimizer, *self.members.weights)), default=0)
        self._world = world if type(world) is int and 0 < world < members.MAX_RANKS else most
        for (stage, rank), name in others:
            self.weights.append(self.load(stage * self._world + rank, name))
            if not stage:
                self._slim(self.weights[-1])
        self._columns = PieceColumns()
        self._files_of_steps: dict[tuple[str, str], StateFile] = {}  # of a universal checkpoint
        for (stage, rank), name in sorted(self.members.optimizer.items()):
            number = stage * self._world + rank
            self.states[number] = self.load(number, name)

    def _slim(self, file: StateFile) -> None:
        """Compare the parameters of another rank with those of the first, and forget them: of many ranks they take
        memory for nothing."""
        same = (shapes_of(file.tree, file.name), file.tree.pop("frozen_param_shapes", None))
        if same != (shapes_of(self.first.tree, self.first.name), self.first.tree.get("frozen_param_shapes")):
            text = f"`{file.name}` is of other parameters than `{self.first.name}`"
            self.fault(text, ONE_SAVE, ranks=[self.first.rank, file.rank])
        del file.tree["param_shapes"]
        module = as_dict(file.tree.get("module"))
        file.tree["module"] = {k: v for k, v in module.items() if not _is_placeholder(v, k, file)}

    def run(self) -> None:
        """Fill the catalogue."""
        catalogue, first, world = self.catalogue, self.first.tree, self._world
        catalogue.faults += self.members.faults
        stages = self._stages(first)
        check_versions(first.get("universal_checkpoint_info"), self.first.name)
        if self.members.universal:
            stage = 3 if self.members.partitioned else 2
            catalogue.faults += self.members.check_world(world, stages)
            self._read_universal(world)
        elif self.states or self.members.partitioned:
            catalogue.faults += self.members.check_world(world, stages)
            try:
                self._read_zero(world, whole=not catalogue.faults)
            except CorruptError as error:
                raise next(iter(self.renamed), error) from None
            stage = self._stage
        else:
            stage = 0
            catalogue.faults += self.members.check_world(world, stages)
            self._read_plain()
        catalogue.faults += self.renamed
        self._add_rest()
        name = f"ZeRO-{stage}" if stage else "without ZeRO"
        name = "universal" if self.members.universal else name
        version = first.get("ds_version")
        kind = "pipeline stage" if self.members.layers else "model-parallel rank"
        catalogue.facts |= {
            "layout": f"{name}, {plural(world, 'data-parallel rank')}{' before' * self.members.universal}"
            + f" x {plural(stages, kind)}" * (stages > 1),
            "writer": f"DeepSpeed {version}" if isinstance(version, str) else "DeepSpeed",
            "torch": ", ".join(self.torch),
        }
        if isinstance(names := first.get("buffer_names"), list) and not self.members.universal:
            catalogue.facts["buffers"] = names

    def _stages(self, first: Mapping[str, Any]) -> int:
        """Return the number of stages, of a universal checkpoint that of all model-parallel ranks. Raises ReadError for
        tensor parallelism, of which a file of before 2026 says nothing; but then its layers have other names, and
        `mp_world_size` is that of stages alone; and for experts that are slices of one tensor (AutoEP)."""
        degrees = as_dict(first.get("checkpoint_parallel_dimensions"))
        tensor, stages = degrees.get("tp_degree", 1), degrees.get("pp_degree", first.get("mp_world_size"))
        if self.members.universal:
            stages = stages * tensor if type(stages) is type(tensor) is int else 1
        elif tensor != 1 or first.get("ds_autoep_layers") or first.get("autoep_layers"):
            what = "experts of AutoEP" if tensor == 1 else f"tensor parallelism of {shown(tensor)}"
            raise ReadError(f"`{self.location}`: {what}, not read", hint=members.CONVERT, file=self.location)
        has_stages = self.members.layers or self.members.universal
        return stages if has_stages and type(stages) is int and 0 < stages < members.MAX_RANKS else 1

    @property
    def _stage(self) -> int:
        """The stage that the first rank says; BF16_Optimizer says none, and is one of stage 1."""
        if self.members.partitioned:
            return 3
        state = self._optimizer_of(next(iter(self.states.values())))
        stage = _plain(state.get("zero_stage"))
        return stage if stage in (1, 2) else 1

    @property
    def _reordered(self) -> bool:
        """Whether ZeRO 1 and 2 have the parameters of a group in another order than the optimizer."""
        return _zero_config(self.first).get("round_robin_gradients") is True

    def _optimizer_of(self, file: StateFile) -> dict[str, Any]:
        state = file.tree.get("optimizer_state_dict")
        if not isinstance(state, dict):
            raise CorruptError(f"`{file.name}` has no `optimizer_state_dict`", file=file.name)
        return state

    # ZeRO -----------------------------------------------------------------------------------------------------------

    def _read_zero(self, world: int, *, whole: bool) -> None:
        states = {rank: ZeroState(file.name, self._optimizer_of(file)) for rank, file in self.states.items()}
        shapes = shapes_of(self.first.tree, self.first.name)
        for state in states.values():
            check_state(state, world)
        by_name: dict[str, Rebuilt] = {}
        moments: dict[str, dict[str, Any]] = {}
        if states:
            divided = self.members.partitioned
            groups = zero_states.divided(shapes, states, world) if divided else []
            for file in () if divided else self.weights:  # one of each stage
                own = {rank: state for rank, state in states.items() if rank // world == file.rank // world}
                of_stage = shapes_of(file.tree, file.name)
                groups += zero_states.flat(of_stage, own, world, reordered=self._reordered) if own else []
            if not divided:
                shapes = zero_states.merged((one.partition.number, one.partition.shapes) for one in groups)
            moments = {name: {} for group in shapes for name in group}
            for group in groups:
                for kind, name, rebuilt in group.parameters(self._place, self._columns, whole=whole):
                    known = moments[name].setdefault(kind, rebuilt) if kind else by_name.setdefault(name, rebuilt)
                    if known is not rebuilt:
                        what = kind or f"the weights of group {group.partition.number}"
                        self.compare_stages(name, what, known, rebuilt)
            pieces = {r: [ref for g in groups for ref in g.weights.get(r, ())] for r in states}
            self.check_distinct(((self.states[rank], refs) for rank, refs in pieces.items()), "weights", world)
            self.catalogue.facts["partitions"] = zero_states.described(groups)
        self._add_model(by_name, world)
        if states:
            if self._reordered and not self.members.partitioned:
                shapes = [partitions.in_order(group, world) for group in shapes]
            self._add_optimizer({rank: state.tree for rank, state in states.items()}, shapes, moments)

    def _place(self, rank: int, ref: TensorRef) -> Extent:
        return self.states[rank].place(ref)

    def _read_universal(self, world: int) -> None:
        folders = universal.read(self)
        self._files_of_steps = folders.files
        if folders.common is not None:
            self.states = {0: folders.common}
        self._add_model(folders.weights, world)
        if folders.common is not None:
            self._add_optimizer({0: folders.common.tree}, folders.shapes, folders.states)

    # Model ----------------------------------------------------------------------------------------------------------

    def _add_model(self, by_name: Mapping[str, Rebuilt], world: int) -> None:
        """Add the model in its own order: float32 weights, then what the files have whole, and frozen parameters."""
        file = self.first
        module = layers.of_pipeline(self, by_name) if self.members.layers else file.tree.get("module")
        if module is None and self.members.universal:
            module = {}
            names = [name for one in self.weights for name in one.tree.get("buffer_names") or ()]
            text = f"the files of a pipeline's layers are not beside it, nor what was not trained: {some(names)}"
            self.warn("missing-part", text)
        if not isinstance(module, dict):
            text = f"`{file.name}` has no `module`"
            raise ReadError(text, hint=NOT_READ, file=file.name)
        shared = {k: v for one in self.weights for k, v in as_dict(one.tree.get("shared_params")).items()}
        frozen = dict(self._frozen(world))
        # By the place in the file: tied parameters, in files of ZeRO 3 that do not name them, and others.
        first: dict[Hashable, str] = {}
        places = [_place(module[name], name) for name in by_name if name in module]
        named = any("shared_params" in one.tree for one in self.weights) or len({*places}) < len(places)
        experts = layers.of_experts(self, by_name)
        self._compare_saves(module, by_name)
        for name, value in [*module.items(), *((n, None) for n in by_name if n not in module), *experts.items()]:
            path = (MODEL, name)
            place = name if named and self.members.partitioned else _place(value, name)
            owner = shared.get(name, first.setdefault(place, name))
            rebuilt = next((found[n] for n in (name, owner) for found in (by_name, frozen) if n in found), None)
            if rebuilt is not None:
                self.catalogue.add(Tensor(path, rebuilt.dtype, rebuilt.shape, rebuilt.chunks))
            elif self.members.partitioned and _is_placeholder(value, name, file):
                text = f"no file has the elements of `{name}`: `param_shapes` and `frozen_param_shapes` do not name it"
                hint = "it was saved without what is frozen, or by an older DeepSpeed: convert with `zero_to_fp32.py`"
                self.catalogue.add(Tensor(path, value.dtype, value.shape, Chunks()))
                self.fault(text, hint, tensor=name, concerns=[dotted(path)])
            elif isinstance(value, tuple):
                self.add_tree(value[0], path, value[1])
            else:
                self.add_tree(value, path, file)
                self._compare_buffer(name, value)
        self.catalogue.containers[MODEL,] = Container("OrderedDict")

    def _frozen(self, world: int) -> Iterator[tuple[str, Rebuilt]]:
        """Yield the frozen parameters that have fragments: whole ones of ZeRO 2, a piece of each rank of ZeRO 3."""
        shapes = as_dict(self.first.tree.get("frozen_param_shapes")) if self.members.partitioned else {}  # or whole
        by_rank = {file.rank: file for file in self.weights}
        place: Callable[[int, TensorRef], Extent] = lambda rank, ref: by_rank[rank].place(ref)  # noqa: E731
        pieces: dict[int, list[TensorRef]] = {}
        for name, shape in shapes.items():
            (one,) = partitions.divided([{name: tuple(shape)}], [*by_rank], world)
            own: dict[int, Any] = {
                rank: as_dict(f.tree.get("frozen_param_fragments")).get(name) for rank, f in by_rank.items()
            }
            if absent := [by_rank[rank].name for rank, ref in own.items() if not is_line(ref)]:
                raise CorruptError(f"`{absent[0]}` has no fragment of the frozen `{name}`", file=absent[0])
            for rank, *_ in one.slices[name]:
                pieces.setdefault(rank, []).append(own[rank])
            lines = {rank: [ref] for rank, ref in own.items()}
            yield from one.parameters(lines, place, "the frozen weights", self._columns, whole=False)
        self.check_distinct(((by_rank[rank], refs) for rank, refs in pieces.items()), "frozen parameters", world)

    def _compare_saves(self, module: Mapping[str, Any], by_name: Mapping[str, Rebuilt]) -> None:
        """Add a fault if the model states are from another save than the optimizer. One that a run did not load counts
        other steps, too; but then the weights in 16 bits, which ZeRO 3 does not have, are those of the optimizer."""
        file, own = self.first, next(iter(self.states.values()), None)
        counted, skipped = file.tree.get("global_steps"), file.tree.get("skipped_steps")
        why, taken, name = "", None, ""
        if own is not None and own.rank == file.rank:
            for key in () if self.members.universal else ("ds_config", "ds_version"):
                both = [one.tree[key] for one in (file, own) if one.tree.get(key)]
                if len(both) == 2 and self.content(both[0], file) != self.content(both[1], own):
                    self.fault(f"`{file.name}` and `{own.name}` have another `{key}`", f"{MIXED}: {ONE_SAVE}")
            state, name = own.tree if self.members.universal else self._optimizer_of(own), own.name
            taken = of_group(state, 0).get("step", state.get("base_optimizer_state_step"))
            if isinstance(taken, TensorRef) and (taken.dtype.name, taken.shape) == ("float32", ()):
                (taken,) = struct.unpack("<f", self.read(own.place(taken), 4))
        if type(counted) is type(skipped) is int and type(taken) in (int, float) and taken != counted - skipped:
            why = f": one is of step {counted - skipped}, the other of step {taken:.0f}"
            if self.members.partitioned:
                text = f"`{file.name}` is of step {counted - skipped}, and the optimizer in `{name}` of step"
                text = f"{text} {taken:.0f}: either the run has not loaded its optimizer, or two saves are mixed"
                self.warn("not-compared", text)
        if not self.members.layers:  # whose files are compared one by one
            self.compare_rounded(module, by_name, why)
            absent = [name for name in by_name if name not in module and ".deepspeed_experts." not in name]
            if absent and not self.members.universal:
                self.warn("not-compared", f"`{file.name}` has no {some(absent)}, which the optimizer trains")

    def _compare_buffer(self, name: str, value: Any) -> None:
        """Add a fault for a buffer of which the ranks of ZeRO 3 have different elements."""
        if len(self.weights) < 2 or not isinstance(value, TensorRef):
            return
        contents = {file.rank: self.content(as_dict(file.tree.get("module")).get(name), file) for file in self.weights}
        if other := [rank for rank, content in contents.items() if content != contents[self.first.rank]]:
            ranks = some([f"rank {rank}" for rank in other])
            message = f"tensor `{MODEL}.{name}` differs between ranks that should have the same: {ranks} from rank 0"
            hint = f"if it is a buffer that the ranks do not synchronise, leave it out: `--exclude '{MODEL}.{name}'`"
            facts = {"ranks": [0, *other], "concerns": [f"{MODEL}.{name}"]}
            self.fault(message, hint, **facts)

    # Optimizer ------------------------------------------------------------------------------------------------------

    def _add_optimizer(
        self, states: Mapping[int, dict[str, Any]], shapes: list[dict[str, Ints]], moments: dict[str, dict[str, Any]]
    ) -> None:
        """Add the optimizer's state under the names of parameters; what a group has once, such as the step, to each."""
        catalogue, rank = self.catalogue, next(iter(states))
        root: Path = (OPTIMIZER, "state")
        for number, group in enumerate(shapes):
            for name in group:
                shared = {k: v for k, v in of_group(states[rank], number).items() if not is_of_elements(v)}
                if self.members.universal and not moments[name]:
                    shared.clear()  # what the others of the group have is not its own
                elif "step" not in shared and "base_optimizer_state_step" in states[rank]:
                    shared["step"] = states[rank]["base_optimizer_state_step"]
                for key, value in {**shared, **moments[name]}.items():
                    path = (*root, name, key)
                    if isinstance(value, Rebuilt):
                        catalogue.add(Tensor(path, value.dtype, value.shape, value.chunks))
                    else:
                        self.add_tree(value, path, self._files_of_steps.get((name, key), self.states[rank]))
            self._compare_shared(states, number)
        groups = states[rank].get("param_groups", zero_states.base(states[rank]).get("param_groups"))
        if not isinstance(groups, list) and self.members.universal:
            raise CorruptError(f"`{self.states[rank].name}` has no `param_groups`", hint=ONE_SAVE)
        if not isinstance(groups, list):
            groups = [{"params": [number]} for number in range(len(shapes))]
            text = (
                "an elastic checkpoint has no `param_groups`: the script has to set learning rates and similar options"
            )
            self.warn("missing-part", text)
        zero_states.check_groups(groups, shapes, self.states[rank].name)
        named = [
            {**as_dict(group), "params": zero_states.names_of(as_dict(group), shapes, self.states[rank].name)}
            for group in groups
        ]
        self.add_tree(named, (OPTIMIZER, "param_groups"), self.states[rank])
        self._same({r: zero_states.base(state).get("param_groups") for r, state in states.items()}, "param_groups")
        self._add_scaler(states)

    def _compare_shared(self, states: Mapping[int, dict[str, Any]], number: int) -> None:
        values = {r: {k: v for k, v in of_group(s, number).items() if not is_of_elements(v)} for r, s in states.items()}
        self._same(values, f"state of group {number}")

    def _same(self, by_rank: Mapping[int, Any], what: str) -> None:
        """Add a fault unless the optimizers of all ranks have the same there."""
        contents = {rank: self.content(value, self.states[rank]) for rank, value in by_rank.items()}
        first = next(iter(contents))
        if other := [rank for rank, content in contents.items() if content != contents[first]]:
            names = some([self.states[rank].name for rank in (first, *other)])
            message = f"the optimizer's {what} is not the same on all ranks: {names}"
            self.fault(message, ONE_SAVE, ranks=[first, *other])

    def _add_scaler(self, states: Mapping[int, dict[str, Any]]) -> None:
        rank, state = next(iter(states.items()))
        for key, value in state.items():
            if key == "loss_scaler" and isinstance(value, Stub):
                fields = as_dict(value.state[0]) if value.state else {}
                self.add_tree({"class": stub_name(value), **fields}, ("loss_scaler",), self.states[rank])
                self._same({r: s.get(key) for r, s in states.items()}, "loss scaler")
            elif key not in OF_OPTIMIZER:
                self.add_tree(_plain(value), ("zero", key), self.states[rank])
                self._same({r: s.get(key) for r, s in states.items()}, f"`{spelt(key)}`")

    # Without ZeRO ---------------------------------------------------------------------------------------------------

    def _read_plain(self) -> None:
        """Add the model, and the optimizer under its own ids; of fp16 with float32 weights that are those of the model,
        these as the model, and the names of its parameters."""
        file = self.first
        state = file.tree.get("optimizer")
        if self.members.layers:
            self._add_model({}, 1)
            keys = [f"stage{file.rank // self._world}" for file in self.weights]
            for key, file in zip(keys, self.weights, strict=True):
                self.add_tree(file.tree.get("optimizer"), (OPTIMIZER, key), file)
            text = "in a pipeline without ZeRO the optimizer of each stage has numbers for names"
            self.warn("optimizer-keys", f"{text}: {some([dotted((OPTIMIZER, key)) for key in keys])}")
            return
        inner = as_dict(state).get("optimizer_state_dict")
        masters = zero_states.masters_of(as_dict(state), file.name)
        named = self._by_parameter(as_dict(inner), masters) if masters else None
        weights = {} if named is None else {name: self._whole(ref) for name, ref in named[0].items()}
        self._add_model(weights, 1)
        if state is None:
            text = "no optimizer state: DeepSpeed before 0.18.5 saves none of bfloat16 without ZeRO"
            if stage := _zero_config(file).get("stage"):
                text = f"no `*_optim_states.pt` of ZeRO-{shown(stage)}: the weights are those in 16 bits, no optimizer"
            self.warn("missing-part", text)
            return
        if any("worker_error" in as_dict(own) for own in as_dict(as_dict(inner or state).get("state")).values()):
            text = f"`{file.name}`: `worker_error` of a 1-bit optimizer: each rank has its own, and one is there"
            self.fault(text, "leave the optimizer out: `--drop optimizer`", concerns=[OPTIMIZER])
        if not isinstance(inner, dict):
            self.add_tree(state, (OPTIMIZER,), file)
            return
        if masters and named is None:
            text = "the float32 weights of the optimizer are, rounded, not those of the model, or of more than one"
            self.warn("optimizer-keys", f"{text}: they are `fp32` in its state, which has numbers for names")
        self.add_tree(zero_states.with_masters(inner, masters) if named is None else named[1], (OPTIMIZER,), file)
        rest = {k: v for k, v in state.items() if k not in ("optimizer_state_dict", "fp32_groups", "fp32_groups_flat")}
        self.add_tree(rest, ("loss_scaler",), file)

    def _by_parameter(
        self, inner: dict[str, Any], masters: zero_states.Masters
    ) -> tuple[dict[str, TensorRef], dict[str, Any]] | None:
        """Return the float32 weights and the optimizer's state by the names of the parameters that have the same
        weights, rounded; None if they are not those of the model, or not of these parameters alone."""
        module, buffers = as_dict(self.first.tree.get("module")), self.first.tree.get("buffer_names") or ()
        first: dict[Hashable, str] = {}
        parameters = {
            name: ref.shape
            for name, ref in module.items()
            if isinstance(ref, TensorRef) and name not in buffers and first.setdefault(_place(ref, name), name) == name
        }
        groups = zero_states.in_groups(
            parameters,
            masters,
            lambda line, start, name: self.is_rounded(line.ref, start, module[name]),
            lambda name: self.read(self.first.place(module[name]), module[name].dtype.itemsize),
        )
        return None if groups is None else zero_states.by_parameter(inner, masters, groups)

    def _whole(self, ref: TensorRef) -> Rebuilt:
        return Rebuilt(ref.dtype, ref.shape, Chunks.single(ref.shape, self.first.place(ref)))

    # All else -------------------------------------------------------------------------------------------------------

    def _add_rest(self) -> None:
        """Add what lies beside the model: once if all ranks have the same, else that of each under its own key."""
        first = self.first
        for key in dict.fromkeys(key for file in self.weights for key in file.tree if key not in LAYOUT):
            contents = [self.content(file.tree.get(key), file) for file in self.weights]
            if all(content == contents[0] for content in contents):
                if not (key == "autoep_layers" or (first.tree[key] is None and key in _EMPTY)):
                    self.add_tree(first.tree[key], (*_CLIENT, key) if key in _ROOTS else (key,), first)
            elif key in _COUNTERS:
                message = f"`{spelt(key)}` is not the same on all ranks"
                self.fault(message, f"{MIXED}: {ONE_SAVE}")
            else:
                for file in self.weights:
                    if key in file.tree:
                        own = (*_CLIENT, key) if key in _ROOTS else (key,)
                        self.add_tree(file.tree[key], parts.with_rank(own, file.rank), file)


_ROOTS, _CLIENT = (MODEL, OPTIMIZER, "zero", "loss_scaler"), ("client_state",)  # what a script calls its own so
_EMPTY = ("lr_scheduler", "data_sampler", "random_ltd")
_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "dp_world_size", "mp_world_size", "ds_version")


def _plain(value: Any) -> Any:
    """Return the number of an enumeration of DeepSpeed; any other value as it is."""
    if isinstance(value, Stub) and (stub_name(value) or "").endswith("ZeroStageEnum"):
        return value.args[0] if value.args else None
    return value


def _place(value: Any, name: str) -> Hashable:
    """Return what is the same for tensors that are one; of another value, its name."""
    return (value.storage.key, value.offset, value.shape, value.strides) if isinstance(value, TensorRef) else name


def _is_placeholder(value: Any, name: str, file: StateFile) -> bool:
    """Return whether a tensor of `module` stands for a partitioned parameter; an empty buffer is itself."""
    return isinstance(value, TensorRef) and value.shape == (0,) and name not in (file.tree.get("buffer_names") or ())


def _zero_config(file: StateFile) -> dict[str, Any]:
    return as_dict(as_dict(file.tree.get("ds_config")).get("zero_optimization"))
