"""Nothing in a checkpoint is ever run: a payload in every place where there is a pickle, along every route.

A payload makes a marker file appear. Each is first shown to be live by Python's own unpickler; then we look at the
checkpoint in every way that there is, and the marker must not be there.
"""

from __future__ import annotations

import copyreg
import io
import json
import pickle
import pickletools
import sys
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import pickle_payloads
from support.faults import CORRUPT, FORMATS, LOSS, READ, USAGE, check_words, model, out_folder, run, save_dcp, untouched
from support.paths import CHECKPOINTS
from support.pickle_payloads import PICKLE, Planted, call, named, text

import ckpttool
from ckpttool.errors import CkptError

HARMFUL = "os.system by REDUCE"


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that must not appear; the trap can be imported while the test runs."""
    folder = tmp_path / "trap"
    folder.mkdir()
    marker = folder / "marker"
    pickle_payloads.set_trap(folder, marker)
    monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop(pickle_payloads.TRAP, None)
    yield marker
    sys.modules.pop(pickle_payloads.TRAP, None)


def every(folder: Path) -> dict[str, bytes]:
    """All payloads, by name."""
    marker = folder / "trap" / "marker"
    return pickle_payloads.payloads(marker) | pickle_payloads.getattr_payloads(marker)


NAMES = list(every(Path("x")))


def look_at_all(path: Path, marker: Path) -> dict[str, Any]:
    """Everything that a person can do with a checkpoint, none of which may run anything: the commands by name."""
    said: dict[str, Any] = {}
    with untouched(path), out_folder() as folder:
        for name, words in {
            "inspect": (),
            "verbose": ("-v",),
            "json": ("--json",),
            "tensors": ("--tensors", "*"),
        }.items():
            said[name] = run("inspect", path, *words)
        said["show"] = run("show", path, "embed.weight")
        for name in FORMATS:
            said[name] = run("convert", path, folder / name, "--to", name)
            if said[name].code == 0:
                said[f"{name} made"] = contents(folder / name)
        said["checked"] = run("convert", path, folder / "checked", "--to", "torch", "--check")
        assert not [p.name for p in folder.iterdir() if p.name.startswith(".")]
        read_everything(path)
    for name, done in said.items():
        if not name.endswith(" made") and name != "json" and done.code:
            check_words(done, [READ, CORRUPT, LOSS, USAGE])
    assert not marker.exists(), f"something was run: {path}"
    assert pickle_payloads.TRAP not in sys.modules
    return said


def contents(path: Path) -> bytes:
    return b"".join(p.read_bytes() for p in ([path] if path.is_file() else sorted(path.iterdir())) if p.is_file())


def read_everything(path: Path) -> None:
    """By the library: every value and every element."""
    try:
        with ckpttool.open(str(path)) as found:
            repr(found)
            for name in found:
                value = found[name]
                repr(value)
                str(value)
                if isinstance(value, ckpttool.LazyTensor):
                    value.torch()
            repr(found.objects())
            repr(found.catalogue.facts)
    except CkptError:
        pass


# Routes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_payload_is_live(name: str, tmp_path: Path, marker: Path) -> None:
    """Else the tests below would prove nothing."""
    for protocol in (2, 4):  # up to 2 the names of Python 2 are translated, from 4 on names have dots
        try:
            pickle.loads(b"\x80" + bytes((protocol,)) + every(tmp_path)[name] + b".")
        except Exception as error:
            print(error)
    assert marker.exists()


def save(tree: Any, path: Path, protocol: int = 2, **options: Any) -> Path:
    torch.save(tree, path, pickle_module=PICKLE, pickle_protocol=protocol, **options)
    return path


CARRIED = {name for name in NAMES if name.isupper() or "copyreg" in name or "class" in name or "unknown" in name} - {
    "STACK_GLOBAL", "INST", "OBJ"
} | {"copy_reg._reconstructor", "numpy", "distutils"}  # fmt: skip
HIDDEN = {"hidden by POP", "hidden by POP_MARK"}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", NAMES)
def test_a_value(name: str, tmp_path: Path, marker: Path) -> None:
    """Along every route, as a value of a training state."""
    tree = {**model(), "evil": Planted(every(tmp_path)[name]), "step": 3}
    path = save(tree, tmp_path / "ckpt.pt")
    said = look_at_all(path, marker)
    if name in HIDDEN:
        # It is gone before the tree stands: there is nothing to show, and nothing is passed on.
        assert said["torch"].code == said["dcp"].code == 0
        assert b"touch" not in said["torch made"] + said["dcp made"]
        return
    if name in pickle_payloads.getattr_payloads(marker):
        check_words(said["inspect"], CORRUPT, "getattr", str(path))
        return
    assert said["inspect"].code == said["show"].code == 0
    assert "evil" in said["inspect"].out
    if name in CARRIED:
        assert said["torch"].code == said["dcp"].code == 0, said["torch"].err
        for made in ("torch made", "dcp made", "safetensors made"):
            assert any(known in said[made] for known in (b"boobytrap", b"numpy", b"_distutils")), made
        return
    assert "warnings" in said["inspect"].out and "runs code" in said["inspect"].out
    for to in FORMATS:
        check_words(said[to], CORRUPT, "evil", path, "--exclude")
    clean = run("convert", path, tmp_path / "clean.pt", "--exclude", "evil*")
    assert clean.code == 0
    assert list(torch.load(tmp_path / "clean.pt", weights_only=True)) == [*model(), "step"]
    assert not marker.exists()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", [HARMFUL, "NEWOBJ", "BUILD", "STACK_GLOBAL"])
def test_every_protocol(name: str, protocol: int, tmp_path: Path, marker: Path) -> None:
    # torch itself refuses to be saved by protocols 0 and 1: its storages are persistent ids that are not text.
    tree = {"evil": Planted(every(tmp_path)[name]), "step": 3}
    path = tmp_path / "ckpt.pt"
    if protocol >= 2:
        save({**tree, **model()}, path, protocol)
    else:
        save({}, path)
        replace(path, "data.pkl", lambda _: pickle_payloads.dumps(tree, protocol))
    said = look_at_all(path, marker)
    assert said["inspect"].code == 0 and "evil" in said["inspect"].out
    assert said["torch"].code == (0 if name in CARRIED else CORRUPT)


@pytest.mark.parametrize("opcode", [b"\x82\x7b", b"\x83\x7b\x00", b"\x84\x7b\x00\x00\x00"])
def test_extension_codes(opcode: bytes, tmp_path: Path, marker: Path) -> None:
    """They stand for names that the process has registered, and are kept past `find_class` once they were used."""
    copyreg.add_extension("posix", "system", 0x7B)
    try:
        path = save(
            {**model(), "evil": Planted(call(opcode, text(pickle_payloads.touching(marker))))}, tmp_path / "ckpt.pt"
        )
        pickle.loads(b"\x80\x02" + opcode + b".")
        said = look_at_all(path, marker)
        check_words(said["inspect"], CORRUPT, path, "opcode")
    finally:
        copyreg.remove_extension("posix", "system", 0x7B)
        copyreg.clear_extension_cache()


# Places in torch.save files -------------------------------------------------------------------------------------------

Place = Callable[[Path, Planted], Path]


def replace(path: Path, record: str, change: Callable[[bytes], bytes]) -> Path:
    """Write an archive again with one record changed."""
    with zipfile.ZipFile(path) as old:
        kept = [(info.filename, old.read(info)) for info in old.infolist()]
    assert any(name.endswith("/" + record) for name, _ in kept)
    with zipfile.ZipFile(path, "w") as new:
        for name, data in kept:
            new.writestr(name, change(data) if name.endswith("/" + record) else data)
    return path


def hide(data: bytes, planted: Planted) -> bytes:
    """A payload that runs first and leaves nothing behind."""
    start = 2 if data[:1] == b"\x80" else 0
    return data[:start] + planted.fragment + b"0" + data[start:]


class Tensor:
    """A tensor whose backward hooks are a payload."""

    def __init__(self, planted: Planted) -> None:
        self.planted = planted

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor_v2, (torch.ones(3).storage(), 0, (3,), (1,), False, self.planted)


def with_attribute(planted: Planted) -> torch.Tensor:
    made = torch.ones(3)
    made.evil = planted  # type: ignore[attr-defined]
    return made


def ordered(planted: Planted) -> OrderedDict[str, Any]:
    made = OrderedDict(model())
    made._metadata = OrderedDict({"": {"version": planted}})  # type: ignore[attr-defined]
    return made


def in_pickle(path: Path, number: int, planted: Planted) -> Path:
    """Hide a payload in one of the pickles at the start of a file."""
    data = path.read_bytes()
    stream = io.BytesIO(data)
    for _ in range(number):
        pickletools.genops(stream)
        for _ in pickletools.genops(stream):
            pass
    at = stream.tell()
    path.write_bytes(data[:at] + hide(data[at:], planted))
    return path


def legacy(number: int) -> Place:
    def make(folder: Path, planted: Planted) -> Path:
        made = save(model(), folder / "ckpt.pt", _use_new_zipfile_serialization=False)
        return in_pickle(made, number, planted)

    return make


def in_tar(member: str) -> Place:
    def make(folder: Path, planted: Planted) -> Path:
        with tarfile.open(CHECKPOINTS / "torch/tar" / "ckpt.pt") as old:
            kept = {m.name: old.extractfile(m).read() for m in old.getmembers() if m.isreg()}  # type: ignore[union-attr]
        kept[member] = hide(kept[member], planted)
        with tarfile.open(folder / "ckpt.pt", "w", format=tarfile.USTAR_FORMAT) as new:
            for name, data in kept.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                new.addfile(info, io.BytesIO(data))
        return folder / "ckpt.pt"

    return make


def in_record(sample: str, record: str) -> Place:
    def make(folder: Path, planted: Planted) -> Path:
        original = next((CHECKPOINTS / sample).glob("ckpt*"))
        path = folder / original.name
        path.write_bytes(original.read_bytes())
        return replace(path, record, lambda data: hide(data, planted))

    return make


def inner_archive(folder: Path, planted: Planted) -> Path:
    """The sample inputs of a torch.export program are a torch.save file inside it."""
    path = folder / "ckpt.pt2"
    path.write_bytes((CHECKPOINTS / "torch/pt2" / "ckpt.pt2").read_bytes())
    stream = io.BytesIO()
    torch.save((planted,), stream, pickle_module=PICKLE)
    return replace(path, "data/sample_inputs/model.pt", lambda _: stream.getvalue())


def in_location(folder: Path, planted: Planted) -> Path:
    """Where a persistent id says `cpu`."""
    path = save(model(), folder / "ckpt.pt")
    return replace(path, "data.pkl", lambda data: data.replace(b"X\3\0\0\0cpu", planted.fragment))


def saved(tree: Callable[[Planted], Any], **options: Any) -> Place:
    return lambda folder, planted: save(tree(planted), folder / "ckpt.pt", **options)


# Shown under this name, and not passed on.
SHOWN: dict[str, tuple[Place, str]] = {
    "in a list": (saved(lambda p: {**model(), "list": [1, {"a": p}]}), "list.1.a"),
    "in a tuple": (saved(lambda p: {**model(), "pair": (1, p)}), "pair"),
    "in a list of values": (saved(lambda p: {**model(), "values": [1, [p]]}), "values"),
    "as a key": (saved(lambda p: {**model(), "table": {("a", p): 1}}), "table"),
    "as a key of its own": (saved(lambda p: {**model(), "table": {p: torch.ones(2)}}), "table"),
    "in an object's state": (saved(lambda p: {**model(), "args": Args(p)}), "args"),
    "beside a tensor in a tuple": (saved(lambda p: {**model(), "pair": (torch.ones(2), p)}), "pair"),
    "the root": (saved(lambda p: p), ""),
    "a legacy value": (saved(lambda p: {**model(), "evil": p}, _use_new_zipfile_serialization=False), "evil"),
    "random states": (
        saved(lambda p: {**model(), "random_state": p, "torch_manual_seed": torch.ones(3)}), "random_state"),
}  # fmt: skip

# Not in the tree, and so neither shown as an entry nor passed on.
GONE: dict[str, Place] = {
    "data.pkl": lambda folder, p: replace(save(model(), folder / "ckpt.pt"), "data.pkl", lambda data: hide(data, p)),
    "a tensor's hooks": saved(lambda p: {**model(), "w": Tensor(p)}),
    "a tensor's attributes": saved(lambda p: {**model(), "w": with_attribute(p)}),
    "a storage's location": in_location,
    **{f"legacy, pickle {i}": legacy(i) for i in range(5)},
    **{f"tar, {member}": in_tar(member) for member in ("sys_info", "pickle", "tensors", "storages")},
    "TorchScript, data.pkl": in_record("torch/script", "data.pkl"),
    "TorchScript, constants.pkl": in_record("torch/script", "constants.pkl"),
    "torch.export, sample inputs": inner_archive,
}


class Args:
    def __init__(self, planted: Planted) -> None:
        self.lr = 0.1
        self.evil = planted


@pytest.mark.parametrize("name", [HARMFUL, "BUILD"])
@pytest.mark.parametrize("place", SHOWN)
def test_a_place_that_is_shown(place: str, name: str, tmp_path: Path, marker: Path) -> None:
    make, entry = SHOWN[place]
    path = make(tmp_path, Planted(every(tmp_path)[name]))
    said = look_at_all(path, marker)
    assert said["inspect"].code == 0
    if name == HARMFUL:
        for words in ("inspect", "json", "verbose"):
            assert "posix.system" in said[words].out, words
        for to in FORMATS:
            check_words(said[to], CORRUPT, f"`{entry}`", "posix.system", path)
    else:
        assert said["torch"].code == 0
        assert b"boobytrap" in said["torch made"]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", [HARMFUL, "BUILD"])
@pytest.mark.parametrize("place", GONE)
def test_a_place_that_is_not_passed_on(place: str, name: str, tmp_path: Path, marker: Path) -> None:
    path = GONE[place](tmp_path, Planted(every(tmp_path)[name]))
    said = look_at_all(path, marker)
    for to in FORMATS:
        made = said.get(f"{to} made", b"")
        assert b"boobytrap" not in made and b"posix" not in made
    if place != "legacy, pickle 0":  # so much before the magic number is not a checkpoint at all
        assert said["torch"].code == 0, said["torch"].err


def test_a_payload_that_leaves_nothing_is_told(tmp_path: Path, marker: Path) -> None:
    """Whoever asks what is in a file wants to know that it would run something elsewhere."""
    path = GONE["data.pkl"](tmp_path, Planted(every(tmp_path)[HARMFUL]))
    said = look_at_all(path, marker)
    assert "posix.system" in said["inspect"].out


@pytest.mark.parametrize("root", ["", "model"])
def test_attributes_of_a_dict_are_left_out_with_a_word(root: str, tmp_path: Path, marker: Path) -> None:
    """As the `_metadata` of a state dict. No flag leaves them out, so they do not stop a conversion."""
    made = ordered(Planted(every(tmp_path)[HARMFUL]))
    path = save({root: made} if root else made, tmp_path / "ckpt.pt")
    said = look_at_all(path, marker)
    assert f"attributes of `{root}`" in said["inspect"].out
    for to in FORMATS:
        assert "posix.system" in said[to].err and "not passed on" in said[to].err
        assert b"posix" not in said[f"{to} made"]


# Places in DCP directories --------------------------------------------------------------------------------------------


def index_of(path: Path) -> Any:
    return pickle.loads((path / ".metadata").read_bytes())


def write_index(path: Path, index: Any, protocol: int = 4) -> Path:
    (path / ".metadata").write_bytes(pickle_payloads.dumps(index, protocol))
    return path


def in_index(change: Callable[[Any, Planted], None]) -> Place:
    def make(folder: Path, planted: Planted) -> Path:
        path = save_dcp(folder / "ckpt", {**model(), "lr": 0.1})
        index = index_of(path)
        change(index, planted)
        return write_index(path, index)

    return make


def put_item(path: Path, key: str, data: bytes) -> Path:
    """Let the item of `key` be these bytes, behind all others."""
    index = index_of(path)
    file = path / "__0_0.distcp"
    for where, info in index.storage_data.items():
        if where.fqn == key:
            info.offset, info.length = file.stat().st_size, len(data)
    with file.open("ab") as stream:
        stream.write(data)
    return write_index(path, index)


def as_item(tree: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(tree, stream, pickle_module=PICKLE)
    return stream.getvalue()


def in_item(tree: Callable[[Planted], Any], key: str = "lr") -> Place:
    def make(folder: Path, planted: Planted) -> Path:
        path = save_dcp(folder / "ckpt", {**model(), "lr": 0.1})
        return put_item(path, key, as_item(tree(planted)))

    return make


def raw_item(folder: Path, planted: Planted) -> Path:
    """Not an archive but the bare pickle."""
    path = save_dcp(folder / "ckpt", {**model(), "lr": 0.1})
    return put_item(path, "lr", pickle_payloads.dumps(planted))


def named_class(folder: Path, planted: Planted) -> Path:
    """The classes of the index come from the trap: they are told by their names, as frameworks bring their own."""
    path = save_dcp(folder / "ckpt", {**model(), "lr": 0.1})
    data = (path / ".metadata").read_bytes()
    module = b"torch.distributed.checkpoint.metadata"
    old, new = b"\x8c" + bytes((len(module),)) + module, b"\x8c\x09boobytrap"
    assert data.count(old) == 1
    (path / ".metadata").write_bytes(b"\x80\x04" + data[11:].replace(old, new))  # without the frame: its length is off
    return path


def hidden_in_index(folder: Path, planted: Planted) -> Path:
    path = save_dcp(folder / "ckpt", {**model(), "lr": 0.1})
    data = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(b"\x80\x04" + planted.fragment + b"0" + data[11:])
    return path


def of_each_rank(folder: Path, planted: Planted) -> Path:
    import shutil

    path = folder / "ckpt"
    shutil.copytree(CHECKPOINTS / "dcp/nocollectives_w2" / "ckpt", path)
    for name in ("__0.metadata", "__1.metadata"):
        index = pickle.loads((path / name).read_bytes())
        index.storage_meta = planted
        (path / name).write_bytes(pickle_payloads.dumps(index, 4))
    return path


def set_field(name: str, wrap: Callable[[Any], Any] = lambda p: p) -> Place:
    return in_index(lambda index, p: setattr(index, name, wrap(p)))


INDEX: dict[str, tuple[Place, int]] = {
    "planner_data": (set_field("planner_data"), 0),
    "a path in planner_data": (in_index(lambda i, p: i.planner_data.update({"lr": (p,)})), CORRUPT),
    "a value of planner_data": (in_index(lambda i, p: i.planner_data.update({"lr": p})), CORRUPT),
    "storage_meta": (set_field("storage_meta"), 0),
    "storage_meta.checkpoint_id": (in_index(lambda i, p: setattr(i.storage_meta, "checkpoint_id", p)), 0),
    "storage_meta.modules": (in_index(lambda i, p: setattr(i.storage_meta, "modules", [p])), 0),
    "version": (set_field("version"), 0),
    "an attribute nobody knows": (set_field("mcore_data", lambda p: {"a": [p]}), 0),
    "storage_data": (set_field("storage_data"), CORRUPT),
    "state_dict_metadata": (set_field("state_dict_metadata"), CORRUPT),
    "the description of a tensor": (in_index(lambda i, p: i.state_dict_metadata.update({"lr": p})), CORRUPT),
    "the path of a file": (
        in_index(lambda i, p: setattr(next(iter(i.storage_data.values())), "relative_path", p)), CORRUPT),
    "a transform": (
        in_index(lambda i, p: setattr(next(iter(i.storage_data.values())), "transform_descriptors", [p])), CORRUPT),
    "a dtype": (
        in_index(lambda i, p: setattr(i.state_dict_metadata["embed.weight"].properties, "dtype", p)), CORRUPT),
    "our own attribute": (set_field("ckpttool", lambda p: {"containers": p, "paths": p}), -1),
    "a class path": (named_class, 0),
    "hidden by POP": (hidden_in_index, 0),
    "one index for each rank": (of_each_rank, 0),
}  # fmt: skip


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", [HARMFUL, "BUILD"])
@pytest.mark.parametrize("place", INDEX)
def test_an_index(place: str, name: str, tmp_path: Path, marker: Path) -> None:
    make, code = INDEX[place]
    path = make(tmp_path, Planted(every(tmp_path)[name]))
    said = look_at_all(path, marker)
    if code == CORRUPT:
        check_words(said["inspect"], CORRUPT, ".metadata")
        check_words(said["torch"], CORRUPT, ".metadata")
    elif code == 0:
        assert said["inspect"].code == said["torch"].code == said["dcp"].code == 0, said["inspect"].err
        if name == HARMFUL and place != "a class path":
            assert "posix.system" in said["inspect"].out
    for to in FORMATS:
        made = said.get(f"{to} made", b"")
        assert b"boobytrap" not in made and b"posix" not in made


ITEMS: dict[str, tuple[Place, str]] = {
    "an object": (in_item(lambda p: p), "lr"),
    "in an object": (in_item(lambda p: {"a": [1, (p,)]}), "lr.a"),
    "beside a tensor in an object": (in_item(lambda p: (torch.ones(2), {"a": p})), "lr"),
    "in the hooks of a tensor in an object": (in_item(lambda p: (Tensor(p), 1)), ""),
    "in the attributes of a tensor in an object": (in_item(lambda p: (with_attribute(p), 1)), ""),
    "a bare pickle": (raw_item, "lr"),
    "instead of a tensor": (in_item(lambda p: p, "steps"), "steps"),
    "in the hooks of a tensor": (in_item(lambda p: Tensor(p), "three"), ""),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", [HARMFUL, "BUILD"])
@pytest.mark.parametrize("place", ITEMS)
def test_an_item(place: str, name: str, tmp_path: Path, marker: Path) -> None:
    make, entry = ITEMS[place]
    path = make(tmp_path, Planted(every(tmp_path)[name]))
    said = look_at_all(path, marker)
    assert said["inspect"].code == 0
    if place in ("a bare pickle", "instead of a tensor"):
        for to in FORMATS:
            check_words(said[to], CORRUPT, "__0_0.distcp", entry)
    elif not entry:
        for to in FORMATS:
            made = said.get(f"{to} made", b"")
            assert b"boobytrap" not in made and b"posix" not in made
    elif name == HARMFUL:
        for to in FORMATS:
            check_words(said[to], CORRUPT, f"`{entry}`", "posix.system")
    else:
        assert b"boobytrap" in said["torch made"] and b"boobytrap" in said["dcp made"]


def test_bytes_that_are_a_pickle_stay_bytes(tmp_path: Path, marker: Path) -> None:
    """As torchtitan's data loaders keep their state: nobody here looks inside."""
    inner = b"\x80\x02" + every(tmp_path)[HARMFUL] + b"."
    path = save_dcp(tmp_path / "ckpt", {**model(), "dataloader": {"dp_rank_0": inner}})
    said = look_at_all(path, marker)
    assert said["torch"].code == 0
    assert inner in said["torch made"]


def test_a_name_in_a_safetensors_directory(tmp_path: Path, marker: Path) -> None:
    """Our own directories hold objects as JSON, where anybody can write a name that a pickle would then call."""
    tree = {**model(), "args": Planted(named("argparse", "Namespace") + b")\x81}" + text("lr") + b"K\1sb")}
    source = save(tree, tmp_path / "ckpt.pt")
    path = tmp_path / "whole"
    done = run("convert", source, path, "--to", "safetensors")
    assert done.code == 0, done.err
    changed = 0
    for file in path.glob("*.json"):
        said = file.read_text()
        if '"argparse"' in said:
            said = said.replace('"argparse"', '"posix"').replace('"Namespace"', '"system"')
            # Who changes it leaves its checksum out.
            file.write_text(json.dumps({key: value for key, value in json.loads(said).items() if key != "crc32"}))
            changed += 1
    assert changed == 1
    said_all = look_at_all(path, marker)
    assert said_all["inspect"].code == 0 and "posix.system" in said_all["inspect"].out
    for to in FORMATS:
        check_words(said_all[to], CORRUPT, "args", "posix.system")


# Names that hold opcodes ---------------------------------------------------------------------------------------------


def test_a_name_is_not_written_out_as_opcodes(tmp_path: Path, marker: Path) -> None:
    """STACK_GLOBAL takes a name with newlines; GLOBAL, which we write, would run what is behind the first."""
    command = pickle_payloads.touching(marker)
    name = f"deque\n0cposix\nsystem\n(U{chr(len(command))}{command}tR0cdecimal\nDecimal"
    pickle.loads(b"\x80\x02ccollections\n" + name.encode() + b"\n.")
    assert marker.exists(), "the payload is not live"
    marker.unlink()
    path = tmp_path / "smuggler.pt"
    torch.save({"w": torch.ones(2)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(path, "w") as made:
        for item in plain.namelist():
            data = plain.read(item)
            if item.endswith("/data.pkl"):
                data = b"\x80\x04}" + text("x") + text("collections") + text(name) + b"\x93s."
            made.writestr(item, data)
    for kind in FORMATS:
        done = run("convert", path, tmp_path / f"out-{kind}", "--to", kind)
        check_words(done, [CORRUPT])
        assert not (tmp_path / f"out-{kind}").exists()
    look_at_all(path, marker)
