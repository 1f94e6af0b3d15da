"""Processes of a job that were not started alike: they find that out before anything is done."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.paths import CHECKPOINTS
from torch.distributed import HashStore

from ckpttool.catalogue.entries import Catalogue
from ckpttool.errors import CkptError, UsageError
from ckpttool.producers.open import open_source
from ckpttool.transfer import agreement
from ckpttool.transfer.execute import Transferred
from ckpttool.transfer.processes import Coordinator, _packed, _SharedWork, _unpack

SOURCE = CHECKPOINTS / "dcp" / "fsdp2_w4" / "ckpt"


def outcomes(world: int, work: Callable[[Coordinator], Any]) -> list[Any]:
    """What each rank returns or raises."""
    store = HashStore()

    def run(rank: int) -> Any:
        shared = _SharedWork(rank, world, store)
        try:
            with shared.together():
                return work(shared)
        except Exception as error:
            return error

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(run, range(world)))


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("to_world", (2, 2, 3), "rank 2 was started with `--to-world 3`, and rank 0 with `--to-world 2`"),
        ("like", (None, "b", None), "rank 1 was started with `--like b`, and rank 0 without `--like`"),
        ("check", (True, True, False), "rank 2 was started without `--check`, and rank 0 with `--check`"),
        ("dst", ("/a", "/b", "/a"), "rank 1 was started to write `/b`, and rank 0 to write `/a`"),
        ("only", (["model"], [], ["model"]), "rank 1 was started without `--only`, and rank 0 with `--only model`"),
    ],
)
def test_other_arguments_are_an_error_of_all_ranks(name: str, values: tuple[Any, ...], expected: str) -> None:
    errors = outcomes(3, lambda own: agreement.check_arguments(own, {"src": "s", name: values[own.rank]}))
    first = errors[0]
    assert isinstance(first, UsageError) and first.exit_code == 2
    assert first.message == expected
    # The exit code of rank 0 is that of all, also of those that outlive it.
    assert {type(error) for error in errors} == {UsageError}


def test_the_same_arguments_pass_in_any_spelling_that_is_the_same() -> None:
    spellings: list[dict[str, Any]] = [
        {"only": ("model",), "like": Path("x"), "to_world": None},
        {"only": ["model"], "like": "x", "to_world": None},
    ]
    assert outcomes(2, lambda own: agreement.check_arguments(own, spellings[own.rank])) == [None, None]


def catalogue(path: Path) -> Catalogue:
    source = open_source(str(path))
    source.close()
    return source.catalogue


def flip_last(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_another_checkpoint_is_an_error_and_a_copy_of_the_same_is_not(tmp_path: Path) -> None:
    """Nodes without a common file system have copies: other inodes and times, and the same bytes."""
    copy = tmp_path / "copy"
    shutil.copytree(SOURCE, copy)
    for file in copy.iterdir():
        os.utime(file, ns=(1, 1))

    def seen(*paths: Path) -> list[Any]:
        opened = [catalogue(path) for path in paths]
        return outcomes(len(paths), lambda own: agreement.check_source(own, "src", opened[own.rank]))

    assert seen(SOURCE, SOURCE, copy) == [None, None, None]
    flip_last(copy / "__1_0.distcp")
    for error in seen(SOURCE, copy):
        assert isinstance(error, CkptError)
        assert error.message == "rank 1 sees another checkpoint at `src` than rank 0: `__1_0.distcp` differs"
    shorter = tmp_path / "one.pt"
    shutil.copy(CHECKPOINTS / "torch" / "full" / "ckpt.pt", shorter)
    assert all(isinstance(error, UsageError) for error in seen(SOURCE, shorter))


def test_one_process_agrees_with_itself() -> None:
    agreement.check_arguments(Coordinator(), {"to_world": 2})
    agreement.check_source(Coordinator(), "src", catalogue(SOURCE))


def test_what_rank_0_refuses_is_what_every_rank_raises() -> None:
    """In a training script each rank gets an error that says why, and a rank that outlives rank 0 its exit code."""

    def work(own: Coordinator) -> None:
        if own.is_first:
            raise UsageError("no", hint="yes")

    for error in outcomes(3, work):
        assert isinstance(error, UsageError) and (error.message, error.hint) == ("no", "yes")


def test_rank_0_stays_until_others_have_read_why_it_failed() -> None:
    """It may keep the store itself: without it they would only say that rank 0 is gone."""
    store = HashStore()

    def other() -> None:
        time.sleep(0.3)
        with pytest.raises(UsageError, match="no"), _SharedWork(1, 2, store).together():
            pass

    with ThreadPoolExecutor() as threads:
        running = threads.submit(other)
        with pytest.raises(UsageError), _SharedWork(0, 2, store).together():
            raise UsageError("no")
        assert store.check(["left/1"])
        running.result()


def test_what_another_process_has_done_is_added() -> None:
    """With the values that were out of range there, of which nobody else knows."""
    done = Transferred(moved=7, checked=5, unchecked=2, overflowed={"model.w": 3, "é": 1}, crcs={(0, 64): 9, (2, 8): 1})
    own = Transferred(moved=1, overflowed={"model.w": 1}, crcs={(1, 0): 4})
    _unpack(_packed(done), own)
    assert (own.moved, own.checked, own.unchecked) == (8, 5, 2)
    assert own.overflowed == {"model.w": 4, "é": 1}
    assert own.crcs == {(1, 0): 4, (0, 64): 9, (2, 8): 1}
