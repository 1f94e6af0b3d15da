"""The losses that scripts log: files that tensorboard, transformers and others have written."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from ckpttool.analysis.logged import from_files
from ckpttool.analysis.losses import Output
from ckpttool.errors import CorruptError, UsageError
from ckpttool.serialization.event_files import scalars


def read(text: str, out: Path) -> dict[int, float]:
    source = from_files(text)
    assert source is not None
    return dict(source(str(out), "", 0))


def test_json_lines_with_other_lines_and_a_last_one_that_was_cut(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "loss": 2.5},
        {"step": 2, "loss": 2.25},
        {"step": 2, "eval_loss": 9.0},
        {"step": 2, "loss": 2.0},
    ]
    (tmp_path / "log.jsonl").write_text(
        "start\n" + "[" * 9000 + "\n" + "\n".join(map(json.dumps, rows)) + '\n{"step": 3, "lo'
    )
    assert read("json:log.jsonl", tmp_path) == {1: 2.5, 2: 2.0}
    assert read("json:{out}/*.jsonl:eval_loss", tmp_path) == {2: 9.0}


def test_rows_count_where_they_have_no_step(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"train/loss": 2.5}\n{"train/loss": 2.25}\n')
    assert read("json:log.jsonl", tmp_path) == {1: 2.5, 2: 2.25}


def test_lightnings_table(tmp_path: Path) -> None:
    # What pytorch_lightning.loggers.CSVLogger 2.6.6 writes for `self.log("train_loss", ...)` and a validation.
    folder = tmp_path / "lightning_logs" / "version_0"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text(
        "epoch,step,train_loss,val_loss\n0,0,1.25,\n0,1,1.125,\n0,1,,3.5\n1,2,1.0625,\n"
    )
    assert read("csv:**/metrics.csv", tmp_path) == {0: 1.25, 1: 1.125, 2: 1.0625}
    assert read("csv:**/metrics.csv:val_loss", tmp_path) == {1: 3.5}


def test_the_lines_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "log_1.txt").write_text("Step 1 | loss:2.5 lr:0.1 \nStep 2 | loss:2.25 lr:0.1 \n")
    assert read("text:log_*.txt", tmp_path) == {1: 2.5, 2: 2.25}
    assert read("none", tmp_path) == {}


def test_the_last_state_of_the_trainer(tmp_path: Path) -> None:
    history = [{"step": 1, "loss": 3.0, "learning_rate": 1e-3}, {"step": 2, "loss": 2.0}, {"step": 2, "eval_loss": 4.0}]
    for step in (1, 2, 10):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        rows = [*history[:step], {"step": 3, "train_loss": 2.5, "train_runtime": 1.0}]
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": rows[:step]}))
    assert read("trainer:.", tmp_path) == {1: 3.0, 2: 2.0}


def test_no_loss_by_that_name_is_an_error_that_names_those_there_are(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"step": 1, "lm_loss": 2.5}\n')
    with pytest.raises(UsageError, match=r"has no `loss`, but lm_loss"):
        read("json:log.jsonl", tmp_path)
    assert read("json:absent.jsonl", tmp_path) == {}
    assert from_files("loss ([0-9.]+)") is None


# output ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "lines", "losses"),
    [
        (None, "step 4: loss 2,345.67 in 4 ms", {4: 2345.67}),
        (None, "step 1,200 | loss=2,71, lr 0.1", {1200: 2.71}),
        (None, "step=0004 train_loss=2.5e-3\rstep=0005 train_loss=nan", {4: 2.5e-3, 5: float("nan")}),
        # Ranks that print in any order.
        (None, "step 4: loss 2.5\nstep 4: loss 1.5\n", {4: 2.0}),
        (None, "step 4: loss 2.5step 4: loss 1.5\n\n", {4: 2.0}),
        (r"^(\d+) .*ce ([\d.,]+)", "start\n4 of 8: ce 2,345.5\n5 of 8: ce 1.5\n", {4: 2345.5, 5: 1.5}),
        # The losses of one step after another, in the log of a run that goes on after step 3.
        (r"loss=([\d.]+)", "loss=2.5\nloss=1.5\n", {4: 2.5, 5: 1.5}),
    ],
)
def test_the_output(pattern: str | None, lines: str, losses: dict[int, float], tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(lines)
    assert repr(Output(pattern)("", str(tmp_path / "log.txt"), 3)) == repr(losses)


# event files ----------------------------------------------------------------------------------------------------------


def field(number: int, wire: int, data: bytes) -> bytes:
    return bytes([number << 3 | wire]) + (bytes([len(data)]) if wire == 2 else b"") + data


def checksum(data: bytes) -> bytes:
    """The CRC-32C of RFC 3720, bit by bit, masked as TensorFlow's records have it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def record(event: bytes) -> bytes:
    length = struct.pack("<Q", len(event))
    return length + checksum(length) + event + checksum(event)


def event(step: int, tag: bytes, value: bytes) -> bytes:
    summary = field(1, 2, field(1, 2, tag) + value)
    return field(1, 1, struct.pack("<d", 0.5)) + field(2, 0, bytes([step])) + field(5, 2, summary)


def test_scalars_of_both_kinds() -> None:
    simple = field(2, 5, struct.pack("<f", 2.5))
    as_tensor = field(8, 2, field(1, 0, b"\x01") + field(2, 2, b"") + field(4, 2, struct.pack("<f", 1.25)))
    text = field(8, 2, field(1, 0, b"\x07") + field(8, 2, b"words"))
    data = b"".join(
        map(record, (field(3, 2, b"brain.Event:2"), event(1, b"loss", simple), event(2, b"loss", as_tensor)))
    )
    data += record(event(3, b"note", text))
    assert list(scalars(data)) == [("loss", 1, 2.5), ("loss", 2, 1.25)]


# What tensorboard 2.21 writes for two losses.
WRITTEN = (
    b"H\0\0\0\0\0\0\0\xfe\x92H\x9d\t\xb9;\xce\x8f<\xc1\xdaA\x1a\rbrain.Event:2R.\n,tensorboard.summary.writer"
    b".event_file_writerSQ\xa3\0\x1a\0\0\0\0\0\0\0\x12\x9b\xd8-\t\0\0\0\0\0\0\xe0?\x10\x01*\r\n\x0b\n\x04loss\x15\0\0 @"
    b"a\xb6\xdd\x7f\x1a\0\0\0\0\0\0\0\x12\x9b\xd8-\t\0\0\0\0\0\0\xe0?\x10\x02*\r\n\x0b\n\x04loss\x15\0\0\x10@\xbdW=\xdc"
)


def test_what_tensorboard_has_written() -> None:
    assert list(scalars(WRITTEN)) == [("loss", 1, 2.5), ("loss", 2, 2.25)]


@pytest.mark.parametrize("length", [0, 5, 11, 12, 20, 40])
def test_an_event_file_that_was_cut(length: int) -> None:
    data = record(event(1, b"loss", field(2, 5, struct.pack("<f", 2.5))))
    assert list(scalars(data[:length])) == []
    assert list(scalars(WRITTEN[: -length or None]))[:1] == [("loss", 1, 2.5)]


def test_a_flipped_bit_of_an_event_file_is_an_error(tmp_path: Path) -> None:
    for at in range(len(WRITTEN)):
        with pytest.raises(CorruptError, match=r"the record of the event at byte \d+ has the checksum"):
            list(scalars(WRITTEN[:at] + bytes((WRITTEN[at] ^ 1,)) + WRITTEN[at + 1 :]))
    (tmp_path / "a.tfevents.1").write_bytes(WRITTEN[:-1] + b"\0")
    with pytest.raises(CorruptError, match=r"`.*a\.tfevents\.1`: the record"):
        read("tensorboard:*", tmp_path)


def test_tensorboard_reads_the_same(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "runs")) as writer:
        for step in range(300):
            writer.add_scalar("train/loss", 3.0 / (step + 1), step, new_style=step % 2 == 0)
            writer.add_text("note", "x" * 300, step)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    theirs = EventAccumulator(str(tmp_path / "runs"), {"scalars": 0, "tensors": 0}).Reload()
    expected = {one.step: one.value for one in theirs.Scalars("train/loss")}
    found = read("tensorboard:runs", tmp_path)
    assert len(found) == 300 and len(expected) >= 150
    assert all(found[step] == value for step, value in expected.items())
