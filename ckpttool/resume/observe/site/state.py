"""Records what a process trains with when a step of an optimizer begins, by digests.

    state.<n>.<pid>.json    weights, buffers, optimizer state, hyperparameters, schedulers, scalers, RNG, batches

A digest depends on the place of each element, its dtype and its shape. Modules, optimizers, schedulers and scalers are
all that live in the process. Buffers and RNG states are recorded where the forward pass of that step begins, too: it
draws numbers, and writes to buffers. Of values, digests in smaller dtypes show what a save may have made of them.
"""

import array
import base64
import ctypes
import functools
import gc
import hashlib
import json
import os
import random
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple

DIGITS = 16  # of a digest: enough to tell batches apart, and a line that people can read
_MT19937, _SEED_AND_OFFSET = 5056, 16  # bytes of the state of torch's generator of the CPU, and of a device
CHUNK = 1 << 24  # bytes that are digested at once
SMALL = 1 << 16  # bytes of a tensor that is digested on the CPU, wherever it lies
FEW = 1 << 12  # elements, one of which is not zero in most tensors
_SHOWN = 16  # elements of a tensor that is spelt in full
ONES = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
PLAIN = (bool, int, float, str, type(None))
_TEXT = 200  # characters of a value that is kept as it is
_MODEL = "model"  # what the only module is called that optimizers train
_SMALLER = ("bfloat16", "float16")
_is_on_cpu = attrgetter("is_cpu")
_OF_CODES = ("int8", "uint8")  # of quantized moments, which torch loads as values of the dtype of their parameter


class _Living(NamedTuple):
    """What lives in a process, in the order in which it was made, as far as it can be told."""

    modules: list[Any]
    optimizers: list[Any]  # of those that wrap another one, one of the two
    schedulers: list[Any]
    scalers: list[Any]
    tensors: list[Any]


class Recorder:
    """Records the state where steps of these numbers begin; `variables` finds what the script keeps. With `is_rounded`,
    values are digested in smaller dtypes, too."""

    def __init__(
        self, folder: str, torch: Any, steps: Iterable[int], variables: Callable[..., Any], *, is_rounded: bool = False
    ) -> None:
        self._variables = variables
        self._folder, self._torch, self._left, self._is_rounded = folder, torch, {*steps}, is_rounded
        self.counts: dict[int, int] = {}  # steps that have begun, by the id of the optimizer
        # By the same, the first and the last of its steps among those of all.
        self._ends: dict[int, tuple[int, int]] = {}
        self._forward: dict[str, Any] | None = None
        self._there: _Living | None = None  # before the forward pass, but for tensors, which are not held
        self._batches: list[Any] = []
        self._called: list[Any] = []
        self.loaded: set[int] = set()  # the ids of what was read: a variable that has it does not make use of it
        self._digest: Callable[[Any], dict[str, Any]] = functools.partial(digest, torch)

    @property
    def is_done(self) -> bool:
        """Whether all steps are recorded."""
        return not self._left

    @property
    def count(self) -> int:
        """How many steps have begun."""
        return max(self.counts.values(), default=0)

    @property
    def is_forward_seen(self) -> bool:
        """Whether a forward pass was recorded since the last step."""
        return self._forward is not None

    def begin_forward(self, module: Any, *, is_saved: bool = False, is_anew: bool = False) -> None:
        """Record what the forward pass of a step changes, before the first one since the last step (with `is_anew`
        before this one), if the step is one of those asked for, or something was saved before."""
        if is_anew:
            self._forward = None
        if self._forward is None and (is_saved or self.count + 1 in self._left):
            self._called = [module]
            there = self._look()
            self._there = there._replace(tensors=[])
            modules, _ = self._named_modules(there)
            buffers = {name: digest(self._torch, tensor) for name, tensor, kind in modules if kind == "buffer"}
            generators = {"rng": rng(self._torch), "words": words(self._torch)}
            self._forward = {"buffers": buffers, **generators, **self._of_the_script(there, modules)}

    def count_step(self, optimizer: Any) -> int:
        """Count a step that begins, and return which it is of the steps of all optimizers."""
        self.counts[id(optimizer)] = self.counts.get(id(optimizer), 0) + 1
        number = sum(self.counts.values())
        self._ends[id(optimizer)] = self._ends.get(id(optimizer), (number, number))[0], number
        return number

    def begin_step(self, optimizer: Any, batch: Any, taken: dict[str, int], *, is_saved: bool = False) -> None:
        """Record the state if the step that was counted is one of those asked for, or something was saved before.
        `taken` are the steps that have begun, by the names of optimizers."""
        step, number = self.counts[id(optimizer)], sum(self.counts.values())
        if step > len(self._batches):
            self._batches.append(batch)
        if is_saved or step in self._left:
            self._left.discard(step)
            with self._torch.no_grad():
                rounded = (self._is_rounded or None) if step > 1 else False
                self._digest = functools.partial(digest, self._torch, rounded=rounded)
                batches = [*self._batches[: step - 1], batch]  # of an optimizer that steps in turns with another
                record = {"rank": rank(self._torch), "number": number, "step": step, "batches": batches, "taken": taken}
                record |= self._state(optimizer)
            path = os.path.join(self._folder, f"state.{number}.{os.getpid()}.json")
            with open(f"{path}.tmp", "w", encoding="utf-8") as stream:
                json.dump(record, stream)
            os.replace(f"{path}.tmp", path)
            self._called = []
        self._forward = self._there = None

    # what lives in the process ----------------------------------------------------------------------------------------

    def _state(self, optimizer: Any) -> dict[str, Any]:
        # Once a step, but for the first one, before which a script may still build what it trains.
        there = self._look() if self._there is None or self.count == 1 else self._there
        optimizers = [*{id(one): one for one in (*there.optimizers, optimizer)}.values()]
        stepped = {id(one.param_groups) for one in optimizers if id(one) in self.counts}
        gone = {id(one) for one in optimizers if self._is_replaced(one, optimizers)}
        optimizers = [*{id(one.param_groups): one for one in optimizers if id(one) not in gone}.values()]
        schedulers = [one for one in there.schedulers if id(getattr(one, "optimizer", None)) not in gone]
        there = there._replace(optimizers=optimizers, schedulers=schedulers)
        modules, names = self._named_modules(there)
        values: dict[str, Any] = {}
        for one in self._called:
            modes = {name: each.training for name, each in walk(one)}
            own = [name for name, mode in modes.items() if mode != modes[name.rpartition(".")[0]]]
            values |= {f"{_MODEL}.training_mode": one.training, f"{_MODEL}.in_the_other_mode": plain(own)}
        values[f"{_MODEL}.frozen"] = plain(
            [n for n, one, kind in modules if kind == "weight" and not one.requires_grad]
        )
        state = {
            "tensors": {name: self._digest(tensor) for name, tensor, _ in modules},
            "kinds": {name: kind for name, _, kind in modules},
            "values": values,
            "ties": tied((name, tensor) for name, tensor, kind in modules if kind != "buffer"),
        }
        there.optimizers.sort(
            key=lambda one: [names.get(id(each), "~") for g in one.param_groups for each in g["params"]][:1]
        )
        for number, each in enumerate(there.optimizers):
            # One that never steps, as of a schedule that is only asked for its value, trains nothing.
            if self.count == 1 or id(each.param_groups) in stepped:
                self._add_optimizer(f"optimizer_{number}" if number else "optimizer", each, names, state)
        places = {id(one): at for at, one in enumerate(there.optimizers)}
        for kind, objects in (("scheduler", there.schedulers), ("scaler", there.scalers)):
            # One that a script makes anew when it resumes is the last of all, and of its class it may be the only one,
            # or of its optimizer.
            place = {id(one): places.get(id(getattr(one, "optimizer", None)), 0) for one in objects}
            for number, one in enumerate(sorted(objects, key=lambda each: (type(each).__name__, place[id(each)]))):
                root = f"{kind}_{number}" if number else kind
                values |= {f"{root}.{key}": plain(value) for key, value in one.state_dict().items()}
        return {**state, "rng": rng(self._torch), "forward": self._forward}

    def _is_replaced(self, optimizer: Any, others: Sequence[Any]) -> bool:
        """Return whether another optimizer goes on with parameters of one, as in the next phase of a training."""
        own = {id(one) for group in optimizer.param_groups for one in group["params"]}
        last = self._ends.get(id(optimizer), (0, 0))[1]
        # Of one that has not stepped since the resume, the next one was made later.
        since = next(at for at, one in enumerate(others) if one is optimizer) if not last else 0
        later = [one for one in others[since:] if id(one) in self._ends and self._ends[id(one)][0] > last]
        return any(id(one) in own for each in later for group in each.param_groups for one in group["params"])

    def _of_the_script(self, there: _Living, modules: Sequence[tuple[str, Any, str]]) -> dict[str, Any]:
        """Return what a script keeps beside modules and optimizers, before its forward pass."""
        known = {id(tensor) for _, tensor, _ in modules}
        known |= {id(one) for each in there.optimizers for state in each.state.values() for one in state.values()}
        gradients = {f"{name}.grad": tensor.grad for name, tensor, kind in modules if kind == "weight"}
        is_lazy = self._torch.nn.parameter.is_lazy
        tensors = [one for one in (*there.tensors, *gradients.values()) if one is not None and not is_lazy(one)]
        tensors = [one for one in tensors if id(one) not in known and one.grad_fn is None]
        variables = self._variables(self._torch, self.loaded)
        found: dict[str, Any] = variables.find(tensors, gradients, [*there.modules, *there.optimizers])
        return found

    def _look(self) -> _Living:
        """Look for all that lives in the process."""
        if self._forward is None:  # else it has been collected since the last step
            gc.collect()
        optim, scaler = self._torch.optim, getattr(self._torch.amp, "GradScaler", ())
        kinds = self._torch.nn.Module, optim.Optimizer, optim.lr_scheduler.LRScheduler, scaler, self._torch.Tensor
        modules, *others = living(*kinds)
        return _Living([*{id(one): one for one in (*self._called, *modules)}.values()], *others)

    def _named_modules(self, there: _Living) -> tuple[list[tuple[str, Any, str]], dict[int, str]]:
        """Return the tensors of all modules with their names and kinds, and the names of parameters by their ids."""
        inner = {id(child) for one in there.modules for child in one._modules.values()}
        own = {id(one) for each in there.optimizers for group in each.param_groups for one in group["params"]}
        roots: list[tuple[bool, str, Any]] = []
        for one in there.modules:
            parameters = [*_held(one, "_parameters")] if id(one) not in inner else []
            if parameters or (id(one) not in inner and any(True for _ in _held(one, "_buffers"))):
                is_trained = any(id(each) in own for _, each in parameters)
                roots.append((not is_trained, type(one).__name__, one))
        roots.sort(key=lambda row: row[:2])
        is_one = sum(not row[0] for row in roots) == 1
        tensors: list[tuple[str, Any, str]] = []
        names: dict[int, str] = {}
        seen: dict[str, int] = {}
        for is_apart, kind, module in roots:
            number = seen[kind] = seen.get(kind, -1) + 1
            root = _MODEL if is_one and not is_apart else f"{kind}_{number}" if number else kind
            for name, tensor in _held(module, "_parameters"):
                tensors.append((f"{root}.{name}", tensor, "apart" if is_apart else "weight"))
                names.setdefault(id(tensor), name if is_one and not is_apart else f"{root}.{name}")
            for name, tensor in _held(module, "_buffers"):
                tensors.append((f"{root}.{name}", tensor, "apart" if is_apart else "buffer"))
        return tensors, names

    def _add_optimizer(self, root: str, optimizer: Any, names: dict[int, str], state: dict[str, Any]) -> None:
        tensors, kinds, values = state["tensors"], state["kinds"], state["values"]
        for number, group in enumerate(optimizer.param_groups):
            prefix = f"{root}.param_groups.{number}"
            values |= {f"{prefix}.{key}": plain(value) for key, value in group.items() if key != "params"}
            for at, parameter in enumerate(group["params"]):
                own = names.get(id(parameter))
                if own is None:  # a flat copy that is in no module
                    own = f"{number}.{at}"
                    tensors[f"{root}.params.{own}"], kinds[f"{root}.params.{own}"] = self._digest(parameter), "weight"
                for key, value in optimizer.state.get(parameter, {}).items():
                    if not isinstance(value, self._torch.Tensor):
                        values[f"{root}.state.{own}.{key}"] = plain(value)
                    else:
                        name = f"{root}.state.{own}.{key}"
                        tensors[name], kinds[name] = self._digest(value), f"group {number}"


def walk(module: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a module and all in it with their names, whatever its class says that it has."""
    yield name, module
    for key, child in module._modules.items():
        if child is not None:
            yield from walk(child, f"{name}.{key}" if name else key)


def _held(module: Any, what: str) -> Iterator[tuple[str, Any]]:
    """Yield the `_parameters` or `_buffers` of a module and of all in it with their names."""
    for name, each in walk(module):
        for key, tensor in getattr(each, what).items():
            if tensor is not None:
                yield f"{name}.{key}" if name else key, tensor


def living(*kinds: Any) -> list[list[Any]]:
    """Return the objects of each class in the order in which they were made, as far as it can be told."""
    objects = gc.get_objects()
    # There are hundreds of thousands of them, and some thousand classes, which need not have a hash.
    ids = [*map(id, map(type, objects))]
    classes = {key: type(one) for key, one in zip(ids, objects, strict=True)}
    wanted = {key: [_is_below(cls, kind) for kind in kinds] for key, cls in classes.items()}
    wanted = {key: below for key, below in wanted.items() if any(below)}
    found: list[list[Any]] = [[] for _ in kinds]
    for one in compress(objects, map(wanted.__contains__, ids)):
        for own, is_below in zip(found, wanted[id(type(one))], strict=True):
            own += [one] if is_below else []
    return found


def _is_below(cls: type, kind: Any) -> bool:
    try:
        return issubclass(cls, kind)
    except Exception:  # a class of the script that does not like to be looked at
        return False


def write(folder: str, record: dict[str, Any]) -> None:
    """Add a line to what this process has recorded, at once: it is there when the process is killed."""
    with open(os.path.join(folder, f"hook.{os.getpid()}.jsonl"), "a", encoding="utf-8") as stream:
        stream.write(json.dumps(record) + "\n")


def rank(torch: Any) -> int:
    """Return the rank of this process."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return int(os.environ.get("RANK") or 0)


def tied(named: Iterable[tuple[str, Any]]) -> list[list[str]]:
    """Return the names that are one tensor: `[["model.embed.weight", "model.head.weight"]]`."""
    by_id: dict[int, list[str]] = {}
    for name, tensor in named:
        by_id.setdefault(id(tensor), []).append(name)
    return [sorted(names) for names in by_id.values() if len(names) > 1]


# generators -----------------------------------------------------------------------------------------------------------


def rng(torch: Any) -> dict[str, str]:
    """Return the digests of the states of all generators."""
    return {kind: sha(state) for kind, state, _ in _generators(torch)}


def words(torch: Any) -> dict[str, Any]:
    """Return the position and the words of each generator, which tell how far it is from another state."""
    return {kind: [one[0], base64.b64encode(one[1]).decode()] for kind, _, one in _generators(torch) if one is not None}


def _generators(torch: Any) -> Iterator[tuple[str, bytes, tuple[int, bytes] | None]]:
    """Yield the state of each generator, and its position and words where they are known."""
    state: Any = random.getstate()
    yield "python", repr(state).encode(), (state[1][-1], array.array("I", state[1][:-1]).tobytes())
    if (numpy := sys.modules.get("numpy")) is not None:
        _, keys, *rest = numpy.random.get_state(legacy=True)
        yield "numpy", keys.tobytes() + repr(rest).encode(), (int(rest[0]), keys.tobytes())
    state, known = torch.get_rng_state(), None
    if state.numel() == _MT19937:
        keys = state.view(torch.int64)[3:627].to(torch.int32)
        known = 625 - struct.unpack_from("<8xi", elements(state))[0], bytes(elements(keys))
    yield "torch", bytes(elements(state)), known
    if hasattr(torch, "accelerator"):
        device = torch.accelerator.current_accelerator()
        module, kind = (torch.get_device_module(device), device.type) if device is not None else (None, "")
    else:  # before torch 2.6, which a script may run with
        module, kind = torch.cuda, "cuda"
    if module is None or not getattr(module, "is_initialized", bool)():
        return
    # A process may draw on each device that it sees.
    states = module.get_rng_state_all() if hasattr(module, "get_rng_state_all") else [module.get_rng_state()]
    for number, state in enumerate(states):
        known = None
        if state.numel() == _SEED_AND_OFFSET:
            seed, offset = state.view(torch.int64).tolist()
            known = offset, repr(seed).encode()
        yield f"{kind}:{number}", bytes(elements(state)), known


# digests --------------------------------------------------------------------------------------------------------------


def sha(data: Any) -> str:
    """Return a digest."""
    return hashlib.sha256(data).hexdigest()[:DIGITS]


def local(tensor: Any) -> Any:
    """Return what this rank has of a tensor."""
    return tensor.to_local() if hasattr(type(tensor), "to_local") else tensor


def has_elements(tensor: Any) -> bool:
    """Return whether a tensor has its elements: FSDP frees them, and those of a compiler never had any."""
    return not hasattr(tensor, "fake_mode") and not (tensor.numel() and not tensor.untyped_storage().nbytes())


def flat_on_cpu(tensor: Any) -> Any:
    """Return what this rank has of a tensor, contiguous on the CPU."""
    return _there(tensor).detach().cpu().resolve_conj().reshape(-1).contiguous()


def elements(flat: Any) -> Any:
    """Return the elements of a contiguous tensor of the CPU, without numpy, which knows no bfloat16. Raises ValueError
    for one of a class that has them elsewhere."""
    size = flat.numel() * flat.element_size()
    if size and not flat.data_ptr():
        raise ValueError("a tensor without elements")
    return (ctypes.c_char * size).from_address(flat.data_ptr()) if size else b""


def spelt(torch: Any, tensor: Any) -> str:
    """Return a tensor as it is compared with one in a checkpoint: `float32[2] [0.5, 1.0]`, of a larger one with the
    digest of its elements."""
    dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
    flat = flat_on_cpu(tensor)
    if flat.numel() <= _SHOWN and dtype in ("float32", "float64", "int64", "int32"):
        return f"{dtype}{shape} {flat.tolist()}"
    return f"{dtype}{shape} {hashlib.sha256(elements(flat)).hexdigest()}"


def digest(torch: Any, tensor: Any, *, rounded: bool | None = None) -> dict[str, Any]:
    """Return the dtype, the shape and the digest of a tensor of this rank, and its number if it is one.

    With `rounded` also the digests of float32 values in smaller dtypes, rounded, and `exact`, the dtypes that have all
    of the values; if it is False, the digests in these alone."""
    record: dict[str, Any] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": []}
    with suppress(Exception):  # of a class of tensors that is in no mesh
        if hasattr(tensor, "placements"):
            record["box"] = box_of(tensor)
    try:
        record["shape"] = [*map(int, tensor.shape)]  # of a nested one, some have no size
        with torch.no_grad():
            record |= _elements(torch, tensor.detach())
            if rounded is not None and tensor.dtype == torch.float32 and not _parts(torch, local(tensor)):
                dtypes = {name: getattr(torch, name) for name in (*_SMALLER, *_OF_CODES)}
                record["exact"] = [name for name, dtype in dtypes.items() if _is_exact(torch, tensor.detach(), dtype)]
                smaller = {name: dtypes[name] for name in {*(_SMALLER if rounded else ()), *record["exact"]}}
                found = {name: _elements(torch, tensor.detach(), dtype) for name, dtype in smaller.items()}
                record["rounded"] = {name: one["sha256"] for name, one in found.items()}
    except Exception as error:  # a class of tensors that has no bytes of its own
        record["unseen"] = type(error).__name__
    return record


def joined(torch: Any, tensors: Iterable[Any]) -> Iterator[Any]:
    """Yield tensors, small ones of a dtype as one: of thousands, a call for each takes longer than all that it does."""
    few: dict[Any, list[Any]] = {}
    for one in tensors:
        if one.numel() > FEW or not _is_on_cpu(one):
            yield one
            continue
        few.setdefault(one.dtype, []).append(one)
        if len(few[one.dtype]) == FEW:
            yield torch._C._nn.flatten_dense_tensors(few.pop(one.dtype))
    yield from map(torch._C._nn.flatten_dense_tensors, few.values())


def box_of(tensor: Any) -> tuple[list[int], list[int]]:
    """Return the offsets and the sizes of what this rank has of a tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return [*offsets], [*sizes]


def _is_exact(torch: Any, tensor: Any, dtype: Any) -> bool:
    """Return whether a smaller dtype has all values of a tensor of this rank."""
    flat = _there(tensor).reshape(-1)
    # The first elements tell of almost every tensor that it is not.
    return all(
        torch.equal(chunk.view(torch.int32), chunk.to(dtype).to(chunk.dtype).view(torch.int32))
        for chunk in (flat[:FEW], flat)
    )


def _parts(torch: Any, tensor: Any) -> list[Any]:
    """Return the tensors that one is made of that is sparse, or of a class that has others inside."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    if tensor.layout == torch.strided:
        return []
    tensor = tensor.coalesce() if tensor.is_sparse else tensor
    leaves = torch.utils._pytree.tree_leaves(tensor._reduce_ex_internal(2))  # what a save has of it
    return [one for one in leaves if is_of(one, torch.Tensor)]


def _elements(torch: Any, tensor: Any, dtype: Any = None) -> dict[str, Any]:
    if parts := _parts(torch, local(tensor)):
        every = [_elements(torch, one) for one in parts]
        more: Any = getattr(local(tensor), "__tensor_flatten__", tuple)()[1:]  # plain values of a class, as a scale
        text = "".join([str(list(tensor.shape)), *(one["sha256"] for one in every), str(plain(more))])
        return {"sha256": sha(text.encode()), "zero": any(one["zero"] for one in every[-1:])}
    own = _there(tensor)
    own = torch.view_as_real(own.resolve_conj()) if own.is_complex() else own
    flat, size = own.contiguous().reshape(-1), torch._utils._element_size(dtype or own.dtype)
    count = CHUNK // size
    if flat.numel() * size <= SMALL:
        flat = flat.cpu()
    whole = hashlib.sha256(f"{dtype or tensor.dtype}{list(tensor.shape)}{list(own.shape)}".encode())
    is_zero = True
    for low in range(0, flat.numel(), count):
        chunk = flat[low : low + count]
        chunk = chunk if dtype is None else chunk.to(dtype)
        if _is_on_cpu(chunk):
            whole.update(elements(chunk))
            is_zero = is_zero and dtype is None and not (bool(chunk[:FEW].any()) or bool(chunk.any()))
        else:
            mixed, some = _mixed(torch, chunk.view(torch.uint8))
            whole.update(mixed.to_bytes(8, "little", signed=True))
            is_zero = is_zero and not some
    record: dict[str, Any] = {"sha256": whole.hexdigest()[:DIGITS], "zero": is_zero}
    if tensor.numel() == 1 and own.numel() == 1 and not tensor.is_complex():
        record["value"] = plain(own)
    return record


def _there(tensor: Any) -> Any:
    """Return what this rank has of a tensor. Raises ValueError for one whose elements are gone."""
    if not has_elements(own := local(tensor)):
        raise ValueError("a tensor without elements")
    return own


def _mixed(torch: Any, chunk: Any) -> tuple[int, bool]:
    """Return the sum of all words, each mixed with its place, and whether any is not zero: on a device, in integers,
    which come out the same in any order. There SHA-256 would take the tensor to the CPU."""
    if chunk.numel() % 8:
        chunk = torch.nn.functional.pad(chunk, (0, -chunk.numel() % 8))
    words = chunk.clone().view(torch.int64) if chunk.storage_offset() % 8 else chunk.view(torch.int64)
    mixed = words ^ torch.arange(1, words.numel() + 1, device=words.device, dtype=torch.int64).mul_(ONES[0])
    for factor in ONES[1:]:
        mixed = (mixed ^ (mixed >> 31)).mul_(factor)
    return int((mixed ^ (mixed >> 29)).sum()), bool(words.any())


def is_of(one: Any, *kinds: Any) -> bool:
    """Return whether something is of one of some classes, and not what it says: of a proxy that is a call, which may
    fail."""
    return issubclass(type(one), kinds)


def each_of(items: Any) -> Iterator[Any]:
    """Return an iterator as that of the base: where a class of a script is iterated over, it may draw a number."""
    return next(kind.__iter__(items) for kind in (list, tuple, deque) if issubclass(type(items), kind))


def plain(value: Any) -> Any:
    """Return a value that JSON and people can read; of a long one its digest."""
    value = local(value)  # a shard may have no element of a tensor that has one
    # Another class may change with a call of these.
    if type(value).__module__ == "numpy" and hasattr(type(value), "tolist"):
        value = value.item() if value.size == 1 else value.tolist()
    elif hasattr(type(value), "numel") and hasattr(type(value), "item") and value.numel() == 1:
        value = value.item()
    if is_of(value, list, tuple, deque):
        value = [plain(one) for one in each_of(value)]
    elif is_of(value, dict):
        value = {str(key): plain(one) for key, one in dict.items(value)}
    elif callable(value) or not is_of(value, *PLAIN):
        value = type(value).__name__
    elif type(value) not in PLAIN:  # a number or a text of a class that may refuse to be shown
        kind = next(kind for kind in (int, float, str) if is_of(value, kind))
        value = getattr(kind, f"__{kind.__name__}__")(value)
    return value if len(text := repr(value)) <= _TEXT else hashlib.sha256(text.encode()).hexdigest()[:DIGITS]
