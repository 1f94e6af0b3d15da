"""Which samples follow a stream, whatever the number of ranks that it is shared among."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from ckpttool.resume.elastic import _follows, _portions
from ckpttool.resume.observe.site.hook import Observer

A = ["abcd", "efgh", "ijkl"]


@pytest.mark.parametrize(
    ("stream", "own", "follows"),
    [
        (A, ["dcba", "hgfe"], True),
        (A, ["abcdfe", "hgijkl"], True),
        (A, ["ba", "cd", "ef"], True),
        (A, ["abcd", "efgh", "ijkl", "zzzz"], True),  # further than A went
        (A, ["abcf"], False),
        (A, ["abcdij"], False),
        (A, ["abcc", "defg"], False),  # one twice
        (A, ["bc", "de"], False),  # one batch of one rank on
        (A, ["efgh", "ijkl"], False),
        (A, ["ab"], False),  # within one step there is no order
        (A, [], False),
        ([], ["ab"], False),
        (["aabb", "aabb"], ["abab"], True),
    ],
)
def test_samples_follow_a_stream_in_portions_of_any_size(stream: list[str], own: list[str], follows: bool) -> None:
    assert _follows([*map(Counter, stream)], [*map(Counter, own)]) == follows


def test_samples_that_ranks_have_alike_count_once() -> None:
    steps = {2: {"samples": {(0, "SGD"): ["c"], (1, "SGD"): ["d"]}}, 1: {"samples": {0: ["a", "b"], 1: ["b", "a"]}}}
    assert [*_portions(steps)] == [Counter("ab"), Counter("cd")]


def test_what_is_given_before_the_samples_does_not_hide_them() -> None:
    """A mask has as many rows as a sample has places: its rows are no samples, and follow in any order."""
    observer = Observer.__new__(Observer)
    observer._torch = torch
    x, offsets = torch.arange(12.0).reshape(4, 3), torch.tensor([0, 2])

    def samples(*values: torch.Tensor) -> set[str]:
        return set(observer._samples_of(values))

    assert samples(torch.eye(3), x).isdisjoint(samples(torch.eye(3), x + 1))
    assert samples(x, torch.eye(3)) == samples(x[[1, 0, 3, 2]], torch.eye(3))
    assert samples(x, offsets) == samples(x, offsets + 1)  # of samples that are packed
