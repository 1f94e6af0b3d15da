"""CRC-32 against zlib's: of every length and start, piece by piece, and without the library that makes it fast."""

from __future__ import annotations

import subprocess
import sys
import zlib

from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.storage import crc


@settings(max_examples=200)
@given(st.binary(max_size=3000), st.integers(0, 70), st.integers(0, 3000))
def test_it_is_the_crc_of_zlib(data: bytes, start: int, cut: int) -> None:
    view = memoryview(bytearray(data))[start:]
    assert crc.crc32(view) == zlib.crc32(view)
    assert crc.crc32(view[cut:], crc.crc32(view[:cut])) == zlib.crc32(view)


def test_long_runs() -> None:
    data = bytes(range(256)) * (1 << 14)
    assert crc.crc32(data) == zlib.crc32(data)


def test_the_fast_one_is_installed_here() -> None:
    assert crc.crc32 is not zlib.crc32


def test_zlib_is_used_where_there_is_no_wheel() -> None:
    said = (
        "import sys, zlib\n"
        "sys.modules['isal'] = None\n"
        "from ckpttool.storage import crc\n"
        "from ckpttool.transfer import checksums\n"
        "assert crc.crc32 is zlib.crc32\n"
        "assert checksums.of([b'abc', b'def']) == zlib.crc32(b'abcdef')\n"
    )
    subprocess.run([sys.executable, "-c", said], check=True, timeout=300)
