"""Which samples follow a stream, whatever the number of ranks that it is shared among."""

from __future__ import annotations

from collections import Counter

import pytest

from ckpttool.resume.elastic import _follows, _portions

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
