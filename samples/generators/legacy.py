"""Samples of torch.save files of other times and machines: older containers, older torch, big endian, NumPy 1."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from lost import package
from sample import sample
from torchsave import TORCH, brief_state, load
from training import detached, full_state, rng_state, seed, train


def records(path: Path) -> dict[str, bytes]:
    """The records of a torch.save archive, by name without the root, in the order of the file."""
    reader = torch._C.PyTorchFileReader(str(path))
    return {name: bytes(reader.get_record(name)) for name in reader.get_all_records()}


def write_records(path: Path, contents: dict[str, bytes]) -> None:
    """Write a torch.save archive with torch's own zip writer, record by record."""
    path.unlink(missing_ok=True)
    writer = torch._C.PyTorchFileWriter(str(path))
    own = ("version", ".data/serialization_id")  # the writer adds these itself
    for name, data in contents.items():
        if name not in own:
            writer.write_record(name, data, len(data))
    writer.write_end_of_file()


def cut_records(path: Path, after: str) -> None:
    """Cut off the records behind the one called `after`: today's writer adds some at the end."""
    data = path.read_bytes()
    end = data.rindex(b"PK\x05\x06")
    size, start = struct.unpack("<II", data[end + 12 : end + 20])
    directory, kept, count = data[start : start + size], 0, 0
    while not directory[:kept].endswith(f"/{after}".encode()):
        name, extra, comment = struct.unpack("<3H", directory[kept + 28 : kept + 34])
        kept, count = kept + 46 + name + extra + comment, count + 1
    (cut,) = struct.unpack("<I", directory[kept + 42 : kept + 46])  # local header of the first record to go
    total = struct.pack("<Q", count) * 2 + struct.pack("<QQ", kept, cut)
    zip64 = b"PK\x06\x06" + struct.pack("<QHHII", 44, 45, 45, 0, 0) + total
    locator = b"PK\x06\x07" + struct.pack("<IQI", 0, cut + kept, 1)
    final = b"PK\x05\x06" + struct.pack("<4H2IH", 0, 0, count, count, kept, cut, 0)
    path.write_bytes(data[:cut] + directory[:kept] + zip64 + locator + final)


@sample(
    "torch/legacy",
    what="whole training state, `_use_new_zipfile_serialization=False`",
    trap="five pickles, then sizes and bytes of the storages; no index: offsets are running sums",
    writer=f"{TORCH} in the format of torch before 1.6",
    load=load,
    reference=False,
    strides=True,
)
def torch_legacy(folder: Path) -> Any:
    """The stream format."""
    state = full_state(train())
    torch.save(state, folder / "ckpt.pt", _use_new_zipfile_serialization=False)
    return state


@sample(
    "torch/legacy_module",
    what="a whole `nn.Module`, `_use_new_zipfile_serialization=False`",
    trap="persistent ids `('module', class, file, source)` hold the source code of the class",
    writer=f"{TORCH} in the format of torch before 1.6",
    load=lambda folder: detached(load(folder).state_dict()),
)
def torch_legacy_module(folder: Path) -> Any:
    """The reference is the module's state dict."""
    module = package().Scripted()  # classes of torch itself would bring their source and its path
    torch.save(module, folder / "ckpt.pt", _use_new_zipfile_serialization=False)
    return detached(module.state_dict())


@sample(
    "torch/legacy_views",
    what="legacy file with storages that are views of storages",
    trap="`view_metadata` in the persistent id: a key of its own, an offset in elements and a size",
    writer="emulation by hand of torch before 0.4, to the grammar of torch 2.13's reader",
    load=load,
)
def torch_legacy_views(folder: Path) -> Any:
    """The sixth element of the persistent id; today's torch writes `None` there."""
    root = torch.arange(10, dtype=torch.float32)
    ids = {"0": ("100", None), "1": ("100", ("101", 2, 5)), "2": ("100", ("102", 7, 3))}
    state = {"whole": root, "middle": root[2:7], "end": root[7:]}

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if not isinstance(value, torch.TypedStorage):
                return None
            key, view = ids[str(len(seen))]
            seen.append(value)
            return ("storage", torch.FloatStorage, key, "cpu", 10, view)

    seen: list[Any] = []
    stream = io.BytesIO()
    for header in (0x1950A86A20F9469CFC6C, 1001, system_information()):
        pickle.dump(header, stream, protocol=2)
    Pickler(stream, protocol=2).dump({key: _ForViews(value) for key, value in state.items()})
    pickle.dump(["100"], stream, protocol=2)
    stream.write(struct.pack("<q", 10) + root.numpy().tobytes())
    (folder / "ckpt.pt").write_bytes(stream.getvalue())
    return detached(state)


class _ForViews:
    """Pickles as a tensor over the whole of a storage of its own."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        size = tuple(self.tensor.shape)
        storage = self.tensor.clone()._typed_storage()
        return torch._utils._rebuild_tensor_v2, (storage, 0, size, (1,), False, OrderedDict())


def system_information() -> dict[str, Any]:
    """The third pickle of a legacy file, and a member of the tar."""
    return {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}


@sample(
    "torch/tar",
    what="tar of `sys_info`, `pickle`, `tensors`, `storages`",
    trap="tensors are persistent ids; views of storages; sizes and strides in binary; `weights_only=True` refuses it",
    writer="emulation by hand of torch 0.1.10, to the grammar of torch 2.13's reader",
    load=load,
)
def torch_tar(folder: Path) -> Any:
    """The format of the first torch, with a tie, a transposed tensor and a storage that is a view of another."""
    base = torch.arange(35, dtype=torch.float32)
    counts = torch.arange(6, dtype=torch.int64)
    state = OrderedDict(
        weight=base.view(5, 7), tied=base.view(5, 7), transposed=base.view(5, 7).t(), part=base[3:9], counts=counts[2:]
    )
    storages = io.BytesIO()
    pickle.dump(2, storages, protocol=2)
    for key, kind, values in ((1, torch.FloatStorage, base), (2, torch.LongStorage, counts)):
        pickle.dump((key, "cpu", kind), storages, protocol=2)
        storages.write(struct.pack("<q", values.numel()) + values.numpy().tobytes())
    pickle.dump([(3, 1, 3, 6)], storages, protocol=2)  # storage 3 is elements 3..9 of storage 1

    # name -> (tensor key, storage key, offset in that storage)
    places = {
        "weight": (11, 1, 0),
        "tied": (11, 1, 0),
        "transposed": (12, 1, 0),
        "part": (13, 3, 0),
        "counts": (14, 2, 2),
    }
    tensors = io.BytesIO()
    pickle.dump(4, tensors, protocol=2)
    for name in ("weight", "transposed", "part", "counts"):
        key, storage, offset = places[name]
        kind = torch.LongTensor if name == "counts" else torch.FloatTensor
        pickle.dump((key, storage, kind), tensors, protocol=2)
        shape, strides = state[name].shape, state[name].stride()
        tensors.write(struct.pack("<ii", len(shape), 0))
        tensors.write(struct.pack(f"<{2 * len(shape)}q", *shape, *strides) + struct.pack("<q", offset))

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> str | None:
            return str(value.key) if isinstance(value, _TarKey) else None

    content = io.BytesIO()
    Pickler(content, protocol=2).dump(OrderedDict((name, _TarKey(places[name][0])) for name in state))
    members = {
        "sys_info": pickle.dumps({**system_information(), "protocol_version": 1000}, protocol=2),
        "pickle": content.getvalue(),
        "tensors": tensors.getvalue(),
        "storages": storages.getvalue(),
    }
    with tarfile.open(folder / "ckpt.pt", "w:", format=tarfile.PAX_FORMAT) as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return OrderedDict(detached(state))


class _TarKey:
    """Stands for a tensor in the tar's pickle."""

    def __init__(self, key: int) -> None:
        self.key = key


@sample(
    "torch/old20",
    what="archive without `byteorder`, `.format_version` and `.storage_alignment`",
    trap="storages in the order of their names (0, 1, 10, 11, 2): the order of the file is not that of the tensors",
    writer="emulation of torch 2.0: records of torch 2.13 written again",
    load=load,
    reference=False,
    strides=True,
)
def torch_old20(folder: Path) -> Any:
    """What torch up to 2.0 wrote."""
    state = brief_state()
    torch.save(state, folder / "ckpt.pt")
    new = records(folder / "ckpt.pt")
    old = {"data.pkl": new["data.pkl"]}
    old |= {name: new[name] for name in sorted(new) if name.startswith("data/")}
    write_records(folder / "ckpt.pt", old)
    cut_records(folder / "ckpt.pt", after="version")
    return state


@sample(
    "torch/bigendian",
    what="archive of a big-endian machine",
    trap="`byteorder` says `big`: each element is to be swapped, of complex numbers each half",
    writer="emulation: records of torch 2.13 with swapped payloads, written again",
    load=load,
    strides=True,
)
def torch_bigendian(folder: Path) -> Any:
    """Only dtypes with a typed storage: torch's reader does not swap the others."""
    state = {"model": train().model.state_dict(), "step": 3}
    for index, dtype in enumerate(
        (torch.float64, torch.float16, torch.bfloat16, torch.int16, torch.int32, torch.uint8)
    ):
        state[str(dtype)] = (torch.arange(6) + index).to(dtype)
    state["torch.complex64"] = torch.arange(6).to(torch.complex64) * (1 + 2j)
    state["torch.complex128"] = torch.arange(6).to(torch.complex128) * (1 + 2j)
    torch.save(state, folder / "ckpt.pt")
    contents = records(folder / "ckpt.pt")
    for key, dtype in storage_dtypes(contents["data.pkl"]).items():
        unit = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
        data = contents[f"data/{key}"]
        contents[f"data/{key}"] = b"".join(data[i : i + unit][::-1] for i in range(0, len(data), unit))
    contents["byteorder"] = b"big"
    write_records(folder / "ckpt.pt", contents)
    return state


def storage_dtypes(data: bytes) -> dict[str, torch.dtype]:
    """The dtype of each storage that a `data.pkl` names."""
    found: dict[str, torch.dtype] = {}

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            _, kind, key, _, numel = pid
            found[key] = kind.dtype
            untyped = torch.UntypedStorage(numel * kind.dtype.itemsize)
            return torch.TypedStorage(wrap_storage=untyped, dtype=kind.dtype, _internal=True)

    Unpickler(io.BytesIO(data)).load()
    return found


@sample(
    "torch/numpy1",
    what="generator states and arrays under the global names of NumPy 1",
    trap="`numpy.core.multiarray` where NumPy 2 says `numpy._core.multiarray`",
    writer="emulation: names changed in the pickle of torch 2.13",
    load=load,
    reference=False,
    strides=True,
)
def torch_numpy1(folder: Path) -> Any:
    """A training state from before NumPy 2."""
    seed()
    state = {"rng": rng_state(), "weight": torch.arange(3.0), "loss": rng_state()["numpy"][1][:3].astype(float).mean()}
    torch.save(state, folder / "ckpt.pt")
    contents = records(folder / "ckpt.pt")
    contents["data.pkl"] = contents["data.pkl"].replace(b"cnumpy._core.", b"cnumpy.core.")
    write_records(folder / "ckpt.pt", contents)
    return state
