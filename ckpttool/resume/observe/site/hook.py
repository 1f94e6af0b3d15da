"""Sets deterministic switches of torch, and records the steps of optimizers, in the process of a script.

    hook.<pid>.jsonl      a line for each thing that was done, seen, changed by a control, or could not be done:
                          {"did": ["torch.manual_seed(1234)"], "program": "train.py"}, {"step": {...}},
                          {"event": "epoch", "at": 3}; at the end of a script that did not fail {"ended": true}
    count.<pid>           one byte for each step of an optimizer: a letter for each, `-` if it trains nothing
    state.<n>.<pid>.json  the state where the n-th step of all begins, if it is asked for

It runs in the environment of the script: nothing of ckpttool can be imported, and torch has only just been imported.
No collective is called and no random number is drawn, so that training takes the same course as without it.
"""

import array
import atexit
import dis
import functools
import gc
import hashlib
import math
import multiprocessing
import operator
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from .control import Perturbation
from .keep import Keeper
from .state import DIGITS, Recorder, digest, elements, flat_on_cpu, has_elements, joined, local, rank, rng, sha, write
from .variables import Variables

Note = Callable[[str, BaseException], None]
_SMALL = 8  # a save of fewer bytes, by this factor, than the largest is of no whole state
_INPUTS = 64  # inputs of modules in a step that are recorded
_PART = 1 << 16  # elements that are squared at once
_UNSAVED = 8  # times that nothing was saved between two steps, at which it is looked at what changed there


def install(settings: Mapping[str, Any], note: Note, keeper: Keeper | None = None) -> "Observer":
    """Do what the settings of `observe.environment` ask for, and write down what was done. `keeper` keeps what is
    saved."""
    import torch

    did: list[str] = []
    for what, switch in _switches(torch, settings["seed"]) if settings["seed"] is not None else ():
        try:
            switch()
            did.append(what)
        except Exception as error:
            note(what, error)
    # What imports have made is not searched for what lives in the process: no module and no tensor is there yet.
    gc.freeze()
    observer = Observer(settings, note, torch, keeper)
    observer.start()
    is_rank = "RANK" in os.environ and multiprocessing.parent_process() is None
    program = os.path.realpath(sys.argv[0]) if getattr(sys, "argv", None) else ""
    write(settings["folder"], {"did": did, "program": program, **({"rank": rank(torch)} if is_rank else {})})
    _watch_end(settings["folder"])
    return observer


def _watch_end(folder: str) -> None:
    """Write down that the script came to its end: what becomes of the process after that is not its doing."""
    exit_as_before, codes = sys.exit, list[Any]()
    frame: Any = sys._getframe()
    main = vars(sys.modules["__main__"])
    while frame is not None and not (frame.f_globals is main and frame.f_code.co_name == "<module>"):
        frame = frame.f_back

    def end() -> None:
        # What it did last: of a frame that an exception left, as SystemExit, that is no return.
        last = frame.f_code.co_code[frame.f_lasti] if frame is not None else 0
        is_at_its_end = bool(codes) or dis.opname[last].startswith("RETURN")
        if is_at_its_end and not any(codes) and not hasattr(sys, "last_value"):
            write(folder, {"ended": True})

    def leave(code: Any = None, /) -> NoReturn:
        codes.append(code)
        exit_as_before(code)

    sys.exit = leave
    atexit.register(end)


def _switches(torch: Any, seed: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield f"random.seed({seed} + rank)", lambda: None  # by sitecustomize, at the start
    if (numpy := sys.modules.get("numpy")) is not None:
        yield f"numpy.random.seed({seed} + rank)", lambda: numpy.random.seed(seed + rank(torch))
    yield f"torch.manual_seed({seed} + rank)", lambda: torch.manual_seed(seed + rank(torch))
    # As `use_deterministic_algorithms(True, warn_only=True)`, which imports the compiler for half a second: that has a
    # variable for it.
    yield "torch.set_deterministic_debug_mode('warn')", lambda: torch.set_deterministic_debug_mode("warn")
    # Not to fill memory: a script that reads what it never wrote would get NaN, and end otherwise than by itself.
    for path, name, value in (
        ("utils.deterministic", "fill_uninitialized_memory", False),
        ("backends.cudnn", "benchmark", False),
        ("backends.cudnn", "deterministic", True),
    ):
        yield f"torch.{path}.{name} = {value}", functools.partial(_set, torch, path, name, value)


def _set(torch: Any, path: str, name: str, value: bool) -> None:
    setattr(operator.attrgetter(path)(torch), name, value)


def _trains(optimizer: Any) -> bool:
    """Return whether a step trains: DCP takes one without a learning rate and a gradient to create optimizer state."""
    if any(float(group.get("lr", 1.0)) for group in optimizer.param_groups):
        return True
    gradients = (local(one.grad) for group in optimizer.param_groups for one in group["params"])
    return any(gradient is not None and bool(gradient.any()) for gradient in gradients)


class Observer:
    """Observes the steps of all optimizers of a process, and counts them.

    The loss is the root of a backward pass. The batch is what the outermost module was given, without what has a
    gradient of its own; what the data loaders gave since the step before is recorded beside it.
    """

    def __init__(self, settings: Mapping[str, Any], note: Note, torch: Any, keeper: Keeper | None = None) -> None:
        self._folder, self._note, self._torch, self._observe = settings["folder"], note, torch, settings["observe"]
        self._keeper, what, is_rounded = keeper, settings["control"], settings["is_rounded"]
        sees_saves = settings["keep"] and not settings["is_resumed"]
        self._saves = Keeper(settings["keep"][0], None) if sees_saves else None
        self._is_saved, self._is_loaded, self._largest = False, False, 1
        self._lr: dict[int, list[float]] = {}  # by the id of an optimizer, in its last step
        self._events: set[str] = set()  # since the last step
        self._has_loader, self._backward = False, 0  # backward passes since the last step
        self._after: tuple[Any, str, dict[str, str]] | None = None  # the last step: optimizer, weights, RNG
        self._between: dict[str, Any] | None = None  # what changed between the last step and the one that goes on
        self._unsaved = 0
        self._sees_changes = self._saves is not None and not is_rounded  # in run A, which alone is asked for them
        self._recorder = Recorder(self._folder, torch, settings["states"], Variables, is_rounded=is_rounded)
        self._control = Perturbation(what, self._folder, torch) if what else None
        self._letters: dict[int, bytes] = {}  # by the id of an optimizer
        self._steps: dict[int, int] = {}  # by the id of an optimizer
        self._names: dict[int, str] = {}  # by the id of an optimizer
        self._made: list[weakref.ref[Any]] = []  # all optimizers, in the order in which they were made
        self._losses: list[float] = []
        self._inputs: list[str] = []
        self._samples: list[str] = []
        self._is_by_sample = settings["is_by_sample"]
        self._fetched: list[str] = []
        self._norm: float | None = None
        self._in_module = self._in_backward = False
        self._stepping: list[list[Any]] = []  # optimizers that are stepping, and whether another steps in it
        self._called: set[int] = set()  # the ids of optimizers whose step begins where its closure was evaluated
        self._failed: set[str] = set()

    def start(self) -> None:
        """Hook into backward passes, modules, data loaders and optimizers."""
        for what in (self._watch_backward, self._watch_modules, self._watch_loaders, self._watch_optimizers):
            self._try(what)
        for path, name in (("", "load"), ("nn.Module", "load_state_dict")):
            self._try(self._watch_load, self._torch, name, path)

    @property
    def _is_over(self) -> bool:
        return not self._observe and self._saves is None and bool(self._recorder.is_done)

    def _try(self, what: Callable[..., Any], *arguments: Any) -> Any:
        """Call something; where it fails, note it once."""
        try:
            return what(*arguments)
        except Exception as error:
            if what.__name__ not in self._failed:
                self._failed.add(what.__name__)
                self._note(what.__name__.strip("_").replace("_", " "), error)

    # what is hooked ---------------------------------------------------------------------------------------------------

    def _watch_backward(self) -> None:
        backward = self._torch.autograd.backward

        @functools.wraps(backward)
        def observed(*args: Any, **kwargs: Any) -> Any:
            if not self._in_backward:
                self._backward += 1
                if self._observe:
                    self._try(self._see_loss, kwargs.get("tensors", args[0] if args else ()))
            outer, self._in_backward = self._in_backward, True
            try:
                return backward(*args, **kwargs)
            finally:
                self._in_backward = outer

        self._torch.autograd.backward = observed

    def _watch_modules(self) -> None:
        # Hooks of all modules are not given keyword arguments, which is how many models get their batch.
        call, compiling = self._torch.nn.Module.__call__, self._torch.compiler.is_compiling

        @functools.wraps(call)
        def observed(module: Any, *args: Any, **kwargs: Any) -> Any:
            if compiling() or self._in_module or self._in_backward or self._is_over:
                return call(module, *args, **kwargs)
            self._in_module = True
            try:
                if self._torch.is_grad_enabled():
                    self._try(self._begin_forward, module)
                    self._try(self._see_inputs, args, kwargs)
                    if self._control is not None:
                        self._try(self._control.control_forward)
                else:
                    self._try(self._see, "evaluation")
                return call(module, *args, **kwargs)
            finally:
                self._in_module = False

        self._torch.nn.Module.__call__ = observed

    def watch_dcp(self) -> None:
        """Watch what DCP loads into: a dict that a script made for it."""
        for name in ("torch.distributed.checkpoint.state_dict_loader", "torch.distributed.checkpoint"):
            if hasattr(sys.modules.get(name), "load"):
                self._try(self._watch_load, sys.modules[name], "load")

    def _watch_load(self, owner: Any, name: str, path: str = "") -> None:
        """Watch what restores a state: a forward pass before it, as one that creates lazy parameters, is of no step."""
        owner = operator.attrgetter(path)(owner) if path else owner
        load: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(load)
        def observed(*args: Any, **kwargs: Any) -> Any:
            result = load(*args, **kwargs)
            self._is_loaded = self._recorder.count == 0
            into = kwargs.get("state_dict", args[0] if args else None) if result is None else result
            read = into if isinstance(into, (list, tuple)) else [into]
            self._recorder.loaded |= {id(one) for one in read if isinstance(one, dict)}
            return result

        setattr(owner, name, observed)

    def _watch_loaders(self) -> None:
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        fetch = _BaseDataLoaderIter.__next__

        @functools.wraps(fetch)
        def observed(iterator: Any) -> Any:
            try:
                if self._control is not None and self._try(self._control.control_fetch):
                    fetch(iterator)
                batch = fetch(iterator)
            except StopIteration:
                if self._torch.is_grad_enabled():
                    self._try(self._see, "epoch")
                raise
            self._try(self._see_fetched, batch)
            return batch

        _BaseDataLoaderIter.__next__ = observed

    def _watch_optimizers(self) -> None:
        from torch.optim import optimizer as hooks

        init = hooks.Optimizer.__init__

        @functools.wraps(init)
        def observed(one: Any, *args: Any, **kwargs: Any) -> None:
            self._made.append(weakref.ref(one))
            init(one, *args, **kwargs)

        hooks.Optimizer.__init__ = observed
        hooks.register_optimizer_step_pre_hook(lambda one, args, kwargs: self._call_step(one, args, kwargs))
        hooks.register_optimizer_step_post_hook(lambda one, args, kwargs: self._end_step(one))

    def watch_compiler(self) -> None:
        """Keep the compiler out of what the hook does in a step that is compiled, which would not be as it is here."""
        for name in ("_try", "_call_step", "_end_step"):
            setattr(self, name, sys.modules["torch._dynamo"].disable(getattr(self, name)))

    # what is seen -----------------------------------------------------------------------------------------------------

    def _see_loss(self, roots: Any) -> None:
        for root in [roots] if isinstance(roots, self._torch.Tensor) else list(roots):
            if root.numel() == 1:
                self._losses.append(float(local(root.detach())))

    def _see_inputs(self, args: Any, kwargs: Any) -> None:
        if digest := self._digest((args, kwargs)):
            self._inputs.append(digest)
        if self._is_by_sample:
            self._samples += self._samples_of((args, kwargs))

    def _see_fetched(self, batch: Any) -> None:
        if not self._has_loader and self._torch.is_grad_enabled():
            self._has_loader = True
            self._see("loader")
        if not self._is_over and self._torch.is_grad_enabled() and (digest := self._digest(batch)):
            self._fetched.append(digest)

    def _see(self, event: str) -> None:
        """Write down that something happens, once a step."""
        if event not in self._events and self._saves is not None and rank(self._torch) == 0:
            self._events.add(event)
            write(self._folder, {"event": event, "at": self._recorder.count})

    def _look_for_saves(self) -> bool:
        """Return whether something of the size of a whole state was saved since it was looked at last."""
        nbytes = self._saves.keep() if self._saves is not None else 0
        self._largest = max(self._largest, nbytes)
        is_new = nbytes > 0 and nbytes * _SMALL >= self._largest
        self._is_saved = self._is_saved or is_new
        return is_new

    def _begin_forward(self, module: Any) -> None:
        if self._backward or self._is_loaded or not self._recorder.is_forward_seen:
            is_between = self._look_for_saves() and self._backward > 0
            if is_between:  # saved between the micro batches of a step: a run that resumes there has the rest of them
                self._inputs, self._samples, self._fetched = [], [], []
            is_anew, self._is_loaded = is_between or self._is_loaded, False
            self._recorder.begin_forward(module, is_saved=self._is_saved, is_anew=is_anew)
        if self._after is not None:
            self._between, self._after = self._changed_since(*self._after), None

    def _changed_since(self, optimizer: Any, weights: str, before: Mapping[str, str]) -> dict[str, Any] | None:
        """Return what has changed since the last step; None if nothing was saved, which was looked at often enough."""
        self._unsaved += not self._is_saved
        if not self._is_saved and self._unsaved > _UNSAVED:
            return None
        changed = [kind for kind, digest in rng(self._torch).items() if before.get(kind, digest) != digest]
        changed += ["weights"] if self._parameters(optimizer) != weights else []
        return {"saved": self._is_saved, "events": sorted(self._events), "changed": changed}

    def _call_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Begin a step where it is called, or where the closure that has its forward pass was evaluated: return its
        arguments then."""
        closure, is_keyword = kwargs.get("closure", args[1] if args[1:] else None), "closure" in kwargs
        if self._backward or not callable(closure):
            self._begin(optimizer)
            return None
        self._called.add(id(optimizer))

        @functools.wraps(closure)
        def evaluated(*values: Any, **more: Any) -> Any:
            result = closure(*values, **more)
            if id(optimizer) in self._called:
                self._begin(optimizer)
            return result

        return (args, {**kwargs, "closure": evaluated}) if is_keyword else ((args[0], evaluated, *args[2:]), kwargs)

    def _begin(self, optimizer: Any) -> None:
        self._called.discard(id(optimizer))
        self._try(self._begin_step, optimizer)
        if self._observe:
            self._try(self._before_step, optimizer)

    def _end_step(self, optimizer: Any) -> None:
        if id(optimizer) in self._called:  # of one that does not evaluate it
            self._begin(optimizer)
        self._try(self._count_step, optimizer)
        if self._observe:
            self._try(self._after_step, optimizer)
        self._backward = 0

    def _begin_step(self, optimizer: Any) -> None:
        if _trains(optimizer):
            self._name(optimizer)
            taken: dict[str, int] = {}  # of those that were made one after the other, and have one name, together
            for one, count in self._recorder.counts.items():
                taken[self._names[one]] = taken.get(self._names[one], 0) + count
            number = self._recorder.count_step(optimizer)
            if self._keeper is not None:  # first: another rank, which is done with its step, may save soon
                if rank(self._torch):
                    self._keeper.stop()
                own, count = self._recorder.counts[id(optimizer)], self._recorder.count
                # One that steps less often than another begins no step of the run by its own number.
                self._try(self._keeper.keep, own if own == count else count + 1, number, taken)
            self._look_for_saves()
            batch = " ".join(self._inputs[-_INPUTS:]) or self._fetched
            taken[self._names[id(optimizer)]] = taken.get(self._names[id(optimizer)], 0) + 1
            self._recorder.begin_step(optimizer, batch, taken, is_saved=self._is_saved)
            self._is_saved = False
            if self._control is not None:
                self._try(self._control.control_step, optimizer)
            if self._backward > 1:
                self._see("accumulation")
            rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
            if self._lr.setdefault(id(optimizer), rates) != rates:
                self._see("learning rate")
            self._lr[id(optimizer)], self._backward = rates, 0
            self._events.clear()
        if not self._observe:
            self._inputs, self._samples, self._fetched = [], [], []

    def _count_step(self, optimizer: Any) -> None:
        letter = self._letters.setdefault(id(optimizer), b"abcdefghijklmnopqrstuvwxyz"[len(self._letters) % 26 :][:1])
        # Opened for each step: a process that was forked has a file of its own.
        with open(os.path.join(self._folder, f"count.{os.getpid()}"), "ab", buffering=0) as stream:
            stream.write(letter if _trains(optimizer) else b"-")

    def _before_step(self, optimizer: Any) -> None:
        if any(one is optimizer for one, _ in self._stepping):  # its last step has failed
            self._stepping.clear()
        for entry in self._stepping:
            entry[1] = True
        self._stepping.append([optimizer, False])
        every = (one.grad for group in optimizer.param_groups for one in group["params"])
        own = (local(one.detach()) for one in every if one is not None)
        dense = joined(self._torch, (one.coalesce().values() if one.is_sparse else one for one in own))
        self._norm = math.sqrt(sum(_square(self._torch, one) for one in dense))

    def _after_step(self, optimizer: Any) -> None:
        own, of_others = self._stepping.pop()
        if own is not optimizer or of_others:  # a container, whose optimizers have been recorded
            return
        number = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        parameters, states = self._parameters(own), rng(self._torch)
        if self._sees_changes:
            self._after = own, parameters, states
        record = {
            "rank": rank(self._torch),
            "optimizer": self._name(optimizer),
            "step": number,
            "loss": math.fsum(self._losses) if self._losses else None,
            "gradient_norm": self._norm,
            "lr": [float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            "batch": " ".join(self._inputs[-_INPUTS:]) or None,
            "samples": self._samples,
            "fetched": self._fetched,
            "rng": states,
            "parameters": parameters,
            "between": self._between,
        }
        write(self._folder, {"step": record})
        self._losses, self._inputs, self._samples, self._fetched, self._between = [], [], [], [], None

    def _name(self, optimizer: Any) -> str:
        """Return what an optimizer is called in each run and on each rank, whichever steps first: its class, how many
        parameters its first group has, and how many of the kind were made before it."""
        if id(optimizer) not in self._names:
            there = (one() for one in self._made)
            made = (*(one for one in there if getattr(one, "param_groups", None)), optimizer)
            kinds = [(type(one).__name__, len(one.param_groups[0]["params"])) for one in made]
            number = next(at for at, one in enumerate(made) if one is optimizer)
            kind = "{} {}".format(*kinds[number])
            self._names[id(optimizer)] = f"{kind} {kinds[:number].count(kinds[number])}"
        return self._names[id(optimizer)]

    def _parameters(self, optimizer: Any) -> str:
        tensors = [local(one.detach()) for group in optimizer.param_groups for one in group["params"]]
        every = [digest(self._torch, one)["sha256"] for one in joined(self._torch, tensors)]
        shapes = array.array("q", (size for one in tensors for size in (one.ndim, *one.shape)))
        return sha("".join(every).encode() + shapes.tobytes())

    def _given(self, values: Any) -> Iterator[Any]:
        """Yield the tensors in nested values that have no gradient."""
        for value in self._torch.utils._pytree.tree_leaves(_plain(values)):
            if isinstance(value, self._torch.Tensor) and not value.requires_grad and not value.is_meta:
                yield value

    def _samples_of(self, values: Any) -> list[str]:
        """Return the digests of the samples in nested values: what tensors have at one place of their first dimension,
        whose size is that of the first such tensor; of others, as a mask, each sample has all, but not of offsets."""
        flats = [(local(one), flat_on_cpu(one)) for one in self._given(values) if one.ndim and has_elements(local(one))]
        count = len(flats[0][0]) if flats else 0
        samples = [hashlib.sha256() for _ in range(count)]
        for own, flat in [(own, flat) for own, flat in flats if flat.numel()]:
            data, kind = memoryview(elements(flat)).cast("B"), f"{own.dtype}{list(own.shape[1:])}".encode()
            size, whole = len(data) // (count or 1), hashlib.sha256(data).digest() if len(own) != count else None
            for at, sample in enumerate(samples if whole is None or own.ndim > 1 else ()):
                sample.update(kind)
                sample.update(whole or data[at * size : (at + 1) * size])
        return [sample.hexdigest()[:DIGITS] for sample in samples]

    def _digest(self, values: Any) -> str | None:
        """Return the digest of the tensors in nested values that have no gradient; None if there are none."""
        whole, any_ = hashlib.sha256(), False
        for value in self._given(values):
            whole.update(f"{value.dtype}{list(value.shape)}".encode())
            whole.update(elements(flat) if has_elements(local(value)) and len(flat := flat_on_cpu(value)) else b"")
            any_ = True
        return whole.hexdigest()[:DIGITS] if any_ else None


def _square(torch: Any, tensor: Any) -> float:
    """Return the sum of the squares of all elements, in float64. On the CPU a part at a time, that stays in the cache:
    the norm of torch takes seven times as long there."""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    if tensor.device.type != "cpu":
        return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2
    flat = tensor.reshape(-1)
    parts = (flat[low : low + _PART].double() for low in range(0, flat.numel(), _PART))
    return math.fsum(float(torch.dot(part, part)) for part in parts)


def _plain(values: Any) -> Any:
    """Return nested values with mappings of other classes, such as a tokenizer's batch, as dicts."""
    if issubclass(type(values), Mapping):
        return {str(key): _plain(value) for key, value in values.items()}
    if issubclass(type(values), (list, tuple)):
        return [_plain(value) for value in values]
    return values
