"""What a pickle would cost is told before it is run; what writers make costs nothing."""

from __future__ import annotations

import pickle
import struct
import weakref
from collections import OrderedDict
from typing import Any

import pytest

from ckpttool.errors import CorruptError
from ckpttool.serialization import pickle_opcodes as opcodes
from ckpttool.serialization import unpickler as pickles

PAIR = b"K\x01K\x02\x86"


def doubled(levels: int, *, memoize: bool) -> bytes:
    """A tuple that holds one twice, that one another twice, and so on: `2 ** levels` elements to hash."""
    made = PAIR + (b"\x94" if memoize else b"q\x00")
    for n in range(levels):
        put = b"\x94" if memoize else b"q" + bytes((n + 1,))
        made += b"0h" + bytes((n,)) + b"h" + bytes((n,)) + b"\x86" + put
    return made


def whole(value: bytes, protocol: int = 2) -> bytes:
    return b"\x80" + bytes((protocol,)) + value + b"."


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "value",
    [
        {(i, (i, str(i))): [i] for i in range(2000)},
        OrderedDict((("layer", i), {"a": (1, 2, 3)}) for i in range(2000)),
        [((1, 2),) * 500] * 50,
        {("x", 1.5): {frozenset({(1, 2), (3, 4)})}},
        (1, (2, (3, (4, ())))),
    ],
    ids=["keys", "ordered", "shared", "sets", "nested"],
)
def test_what_writers_make_is_light(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert opcodes.check(data) == len(data)


@pytest.mark.parametrize("memoize", [False, True])
@pytest.mark.parametrize("pair", [PAIR, b"(" + b"K\x01" * 17 + b"t", b"(" + b"K\x01" * 17 + b"t\x85", b"h\x00\x85"])
def test_a_guarded_key_that_takes_centuries(pair: bytes, memoize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard finds it, and what it finds is read again as a whole, which says what it is."""
    monkeypatch.setattr(opcodes, "_GUARDED", 0)
    known = {("torch", "Size"): ().__add__}
    for value in (doubled(60, memoize=memoize), b"ctorch\nSize\n" + doubled(60, memoize=memoize) + b"\x85R"):
        data = whole(b"}" + value.replace(PAIR, b"\x8c\x01a" + (b"\x940" if memoize else b"q\x000") + pair) + b"Ns", 4)
        found = opcodes.guarded(data)
        assert found is not None
        with pytest.raises(pickles._Shared):
            pickles._Unpickler(pickles._Pieces(found.pieces), known, None, calls=found.calls).load()


def test_a_guarded_key_is_small() -> None:
    """What the guard is not asked for is no larger than it thinks, and is flat."""
    for flat in (
        b"(" + b"K\x01" * 16 + b"t\x85",
        b"(" + b"K\x01" * 16 + b"tq\x05\x85",
        b"K\x01K\x01K\x01\x87r\5\0\0\0\x85",
    ):
        value = pickle.loads(whole(flat))
        assert opcodes._light(0).match(flat).end() == len(flat)  # type: ignore[union-attr]
        assert 1 + len(value) + len(value[0]) <= opcodes.FLAT_COST
        assert opcodes._light(0).match(flat + b"\x85").end() == len(flat)  # type: ignore[union-attr]


def test_the_same_as_a_value_is_no_key() -> None:
    data = whole(b"}K\x00" + doubled(60, memoize=False) + b"s")
    assert opcodes.check(data) == len(data)


def test_the_bound_on_keys() -> None:
    """`n` doublings of a pair cost `2 ** (n + 2)`: a million and one for each byte may be."""
    assert opcodes.check(whole(b"}" + doubled(17, memoize=False) + b"Ns")) is not None
    with pytest.raises(CorruptError, match="shared so often"):
        opcodes.check(whole(b"}" + doubled(18, memoize=False) + b"Ns"))


def test_one_long_key_again_and_again() -> None:
    key = b"(" + b"K\x01" * 5000 + b"tq\x01"
    assert opcodes.check(whole(b"}" + key + b"Ns" + b"h\x01Ns" * 100)) is not None
    with pytest.raises(CorruptError, match="shared so often"):
        opcodes.check(whole(b"}" + key + b"Ns" + b"h\x01Ns" * 1000))


def test_it_is_not_hidden_by_text() -> None:
    """Bytes in a string that look like opcodes, and numbers of the memo in both ways."""
    text = b"X" + struct.pack("<I", 40) + b"h\x00\x86q" * 10
    lines = b"".join(b"0g%d\ng%d\n\x86p%d\n" % (n, n, n + 1) for n in range(60))
    for value in (text + b"0" + doubled(60, memoize=False), PAIR + b"p0\n" + lines):
        with pytest.raises(CorruptError, match="shared so often"):
            opcodes.check(whole(b"}" + value + b"Ns"))


def test_a_string_of_brackets_is_no_list() -> None:
    data = pickle.dumps("]" * 6_000_000, 2)
    assert opcodes.check(data) == len(data)


def test_a_stack_that_is_not_there_is_left_to_the_machine() -> None:
    data = whole(doubled(20, memoize=False) + b"\x87\x87\x87" + b"R" * 30)
    assert opcodes.check(data) == len(data)


def test_reading_many_pickles_does_not_keep_them() -> None:
    """What fails leaves cycles, and the collector has to find them though it was switched off meanwhile."""

    class Marked:
        pass

    left: list[weakref.ref[Marked]] = []

    def persistent(pid: Any) -> Any:
        marked = Marked()
        marked.itself = marked  # type: ignore[attr-defined]
        left.append(weakref.ref(marked))
        return marked

    for _ in range(30_000):
        pickles.load(b"\x80\x02K\x01Q.", what="p", persistent=persistent)
        if left[0]() is None:
            return
    raise AssertionError("nothing is ever collected")
