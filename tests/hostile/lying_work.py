"""Small files that ask for work without end: what is short to write, shared, and then walked, copied or cut again and
again."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

from support.lying_files import CORRUPT, HALF, Saved, file, integer, ints, lie, many, saved, tensor, tree
from support.lying_shards import MESHES, SPECS, dtensor, items, mesh, new, placement, replicate, sharded, spec
from support.pickle_payloads import call, named, text

WORK = "asks for far more work than its size allows"


def of(value: bytes, protocol: int = 2) -> Callable[[Path], Path]:
    return file("ckpt.pt", lambda: saved(value, protocol))


def raw(data: Callable[[], bytes]) -> Callable[[Path], Path]:
    return file("ckpt.pt", lambda: Saved(data()).bytes())


def put(value: bytes, index: int) -> bytes:
    """A value that is remembered, and taken from the stack."""
    return value + b"r" + struct.pack("<I", index) + b"0"


def get(index: int) -> bytes:
    return b"j" + struct.pack("<I", index)


# What a pickle calls --------------------------------------------------------------------------------------------------


def getattrs(length: int, times: int) -> bytes:
    name = put(text("a" * length), 0)
    return name + named("builtins", "getattr") * times + named("torch", "Outer") + (get(0) + b"\x86R") * times


def merged(count: int, times: int, function: str = "OrderedDict") -> bytes:
    """One dict of many attributes that many objects are given."""
    state = put(b"}(" + b"".join(text(f"a{n}") + b"N" for n in range(count)) + b"u", 0)
    ordered = call(named("collections", "OrderedDict"))
    if function == "OrderedDict":
        return state + items((ordered + get(0) + b"b") for _ in range(times))
    if function == "one":
        return state + ordered + (get(0) + b"b") * times
    state += put(tensor(), 1)
    return state + items(call(named("torch._utils", function), get(1), b"\x88", ordered, get(0)) for _ in range(times))


def multiples(count: int) -> bytes:
    """Keys whose hashes are all the same."""
    return b"}(" + b"".join(integer(n * HALF) + b"N" for n in range(count)) + b"u"


def doubled(levels: int, entries: int) -> bytes:
    """A key of tuples of tuples, above many entries."""
    key = integer(1) + integer(2) + b"\x86"
    for level in range(levels):
        key = put(key, level) + get(level) * 2 + b"\x86"
    return b"}" + key + tree(**{f"w{n}": b"N" for n in range(entries)}) + b"s"


# Sharded tensors ------------------------------------------------------------------------------------------------------


def ranks_shared(count: int, times: int) -> bytes:
    """One list of ranks, a mesh and a tensor of its own for each use of it."""
    ranks = put(items(map(integer, range(count))), 0)
    one = (dtensor(spec(mesh((count,), get(0), (0,)), placement()), (2 * count, 3)) for _ in range(times))
    return ranks + tree(**{f"w{n}": value for n, value in enumerate(one)})


def state_shared(count: int, times: int, owner: str) -> bytes:
    """One dict that is the state of every mesh, or of every spec."""
    more = {f"a{n}": b"N" for n in range(count)}
    ranks = items([integer(0), integer(1)])
    of_a_mesh = {"_flatten_rank_map": ranks, "_coordinate_on_dim": items([integer(0)])}
    of_a_spec = {"mesh": new(MESHES, "DeviceMesh", tree(**of_a_mesh)), "placements": many(replicate())}
    state = put(tree(**(of_a_mesh if owner == "mesh" else of_a_spec), **more), 0)

    def built() -> bytes:
        return (
            spec(new(MESHES, "DeviceMesh", get(0)), replicate())
            if owner == "mesh"
            else new(SPECS, "DTensorSpec", get(0))
        )

    return state + tree(**{f"w{n}": dtensor(built()) for n in range(times)})


def worlds(count: int, size: int) -> bytes:
    """ShardedTensors of other worlds, each of a million."""
    return tree(**{f"w{n}": sharded((4, 3), world=size - n) for n in range(count)})


def strided(factor: int, times: int, dims: int = 1) -> bytes:
    """Local tensors that are cut into many boxes each. The elements of the storage are repeated."""
    world, local = 2, tuple(factor for _ in range(dims))
    ranks = items(map(integer, range(world**dims)))
    ref = tensor(local, (0,) * dims)
    made = spec(mesh((world,) * dims, ranks, (0,) * dims), *(placement(d, factor) for d in range(dims)))
    return put(made, 0) + tree(**{f"w{n}": dtensor(get(0), (world * factor,) * dims, ref) for n in range(times)})


def strided_twice(factor: int) -> bytes:
    made = spec(mesh((2, 2), items(map(integer, range(4))), (0, 0)), placement(0, factor), placement(0, factor))
    return tree(w=dtensor(made, (4 * factor * factor,), tensor((factor * factor,), (0,))))


def stepped(size: int, dims: int, times: int) -> bytes:
    """Meshes that step through a million ranks which are not theirs."""
    layout = new(
        "torch.distributed._mesh_layout", "_MeshLayout", tree(shape=ints((size,) * dims), stride=ints((0,) * dims))
    )
    ranks = put(items(map(integer, range(size**dims))), 0)
    one = (
        dtensor(spec(mesh((size,) * dims, get(0), (0,) * dims, layout), *[replicate()] * dims)) for _ in range(times)
    )
    return ranks + tree(**{f"w{n}": value for n, value in enumerate(one)})


for name, make in (
    ("a long name through 400 getattr", of(getattrs(150_000, 400))),
    ("a name through 20,000 getattr", of(getattrs(1_000, 20_000))),
    ("10,000 attributes merged by 600 calls", of(merged(10_000, 600))),
    ("10,000 attributes given to one dict 600 times", of(merged(10_000, 600, "one"))),
    ("10,000 attributes of 600 parameters", of(merged(10_000, 600, "_rebuild_parameter_with_state"))),
    ("40,000 ranks shared by 300 meshes", of(ranks_shared(40_000, 300))),
    ("a state of 20,000 entries shared by 500 specs", of(state_shared(20_000, 500, "spec"))),
    ("a state of 20,000 entries shared by 500 meshes", of(state_shared(20_000, 500, "mesh"))),
    ("60 worlds of a million", of(worlds(60, 1 << 20))),
    ("a strided layout of 4,096 parts, 300 times", of(strided(4096, 300))),
    ("strided layouts of 4,096 parts along two dimensions", of(strided(4096, 1, 2))),
    ("strided layouts of 256 parts along three dimensions", of(strided(256, 1, 3))),
    ("a strided layout of strided parts", of(strided_twice(4096))),
    ("100 meshes of 40 x 40 x 40 that go nowhere", of(stepped(40, 3, 100))),
):
    lie(f"work: {name}", make, WORK, code=CORRUPT)

lie("work: 4,000 keys of one hash", of(multiples(4_000)), WORK, code=CORRUPT)  # other forms: test_keys_of_one_hash
lie(
    "work: a key of 130,000 elements above 10,000 entries",
    of(doubled(15, 10_000)),
    r"a key of tuples has more than \d+ elements",
)
