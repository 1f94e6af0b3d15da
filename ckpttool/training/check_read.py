"""Comparing what all ranks have read with the CRCs that the writer left.

A record that one rank has read whole is compared there. Of one of which each rank has read a part, the CRCs of the
parts are told to a rank that puts them together: nothing is read twice.
"""

from __future__ import annotations

from array import array
from functools import partial

from ckpttool.catalogue.entries import Record
from ckpttool.storage.files import Pool
from ckpttool.training import collectives
from ckpttool.training.read import Reader
from ckpttool.transfer.checksums import Pieces, check
from ckpttool.transfer.file_checksums import WholeFiles

NOT_ASKED_FOR = "check=False"
NO_CHECKSUM = "no checksum there"
READ_IN_PART = "read in part"

# What no rank has read of a record (the padding of a flat parameter) is read for its checksum if it is no more.
_GAP = 64 << 10
_SHARE = 32


def check_read(reader: Reader | None, *, in_parts: bool) -> tuple[int, dict[str, int]]:
    """Return how many bytes that this rank has read were checked, and of the others how many were not, and why. With
    `in_parts` ranks read parts of the same records. Raises CorruptError, the same on every rank. A collective."""
    pieces = reader.pieces if reader is not None else Pieces()
    parts: list[Record] = []

    def check_whole() -> bytes:
        parts[:] = [
            record for record in pieces.records() if reader is not None and not _check(record, pieces, reader, 0)
        ]
        return pieces.packed(parts)

    messages = collectives.all_gather_of(check_whole)
    left: set[Record] = set()
    if any(messages):
        shares = [message for message in messages if in_parts or message]
        left.update(*collectives.all_gather_of(lambda: [] if reader is None else _check_parts(shares, reader)))
    whole = WholeFiles(reader.source.catalogue if reader is not None and reader.check else None)
    whole.note((record for record in pieces.records() if record not in left), pieces)
    check_files(whole, None if reader is None else reader.pool)
    if reader is None:
        return 0, {}
    without = sum(pieces.used(record) for record in parts if record in left)
    checked = reader.digested + sum(map(pieces.used, pieces.records())) - without
    reasons = {NO_CHECKSUM if reader.check else NOT_ASKED_FOR: reader.unrecorded, READ_IN_PART: without}
    return checked, {why: nbytes for why, nbytes in reasons.items() if nbytes}


def check_files(whole: WholeFiles, pool: Pool | None) -> None:
    """Compare the files of which the ranks together have read all tensors with the manifest beside them, each on one of
    those that have read something: `whole` is what this rank has read, through `pool`. Raises CorruptError, the same on
    every rank. A collective."""
    if not any(collectives.all_gather(bool(whole))):
        return
    rows = collectives.all_gather_of(whole.packed)
    readers, own = [rank for rank, row in enumerate(rows) if row], collectives.rank()

    def check_own() -> None:
        if pool is None or own not in readers:
            return
        for rank in readers:
            if rank != own:
                whole.unpack(rows[rank])
        for number in whole.complete():
            if number % len(readers) == readers.index(own):
                whole.check(number, pool.crc)

    collectives.all_gather_of(check_own)


def _check_parts(messages: list[bytes], reader: Reader) -> list[Record]:
    """Check this rank's share of the records that no rank has read whole; return those of which too much is unread."""
    number, shares = collectives.rank(), len(messages)
    together = Pieces()
    for message in messages:
        # A hash of integers is the same in every process.
        together.unpack(array("q", message), lambda record: shares == 1 or hash(record[:2]) % shares == number)
    return [r for r in together.records() if not _check(r, together, reader, max(_GAP, r.nbytes // _SHARE))]


def _check(record: Record, read: Pieces, reader: Reader, gap: int) -> bool:
    """Compare a record with its checksum, and return True, unless more than `gap` bytes of it were not read."""
    if read.unread(record) > gap:
        return False
    catalogue = reader.source.catalogue
    check(record, read, catalogue, partial(reader.pool.crc, catalogue.files[record.file].location))
    return True
