"""The page of a trial: that it is one well-formed file with everything in it, and that no name in it is markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from ckpttool.operations.verify_resume.trial.html import trial_page
from ckpttool.operations.verify_resume.trial.results import (
    Check,
    Compared,
    Drift,
    Failure,
    Finding,
    Leg,
    Report,
    Run,
    Step,
    Stuck,
)

EVIL = 'w"><script>alert(1)</script>\x1b[31m\u202e'
MEMORY = {"rank": 0, "parameters": 4_000, "parameters_expected": 4_000, "optimizer": 8_000, "optimizer_expected": 8_000}
VOID = {"meta", "line", "circle", "polyline"}


class Reader(HTMLParser):
    """Checks that what is opened is closed, and keeps the words, the tags and their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID or tag == "polyline":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def report(**more: Any) -> dict[str, Any]:
    def steps(low: int, high: int) -> list[Step]:
        return [Step(i, [5.0 - i, 5.5 - i], 1.0 / (i + 1), "ab") for i in range(low, high)]

    made = Report(
        "recipe.py", "control", "another mesh: B must be the `control`", message="all is equal", steps_before=4,
        steps_after=3, deterministic=["one thread"], notes=["`rng` of rank 3 is new"], seconds=12.5,
    )  # fmt: skip
    made.runs = [
        Run("A", "shard=2", 2, steps=steps(0, 7), steps_per_second=20.5, memory=[MEMORY]),
        Run("B", "shard=4", 4, steps=steps(4, 7), resumed_at=4, steps_per_second=19.0),
        Run("control", "shard=4", 4, steps=steps(4, 7), resumed_at=4),
    ]
    made.route = [Leg("saved", "a", "dcp"), Leg("convert --to safetensors", "b", "safetensors")]
    made.compared = [Compared("model", "B", "A", 31, 0), Compared("losses", "control", "A", 3, 3, "drifts", None)]
    made.checks = [Check("local shapes", "B", 31, True), Check("gradients", "B", 0, None, "the model has dropout")]
    made.drifts = [Drift("control", 1e-6, 2e-7, None, 4e-7, "layers.0.w")]
    for name, value in more.items():
        setattr(made, name, value)
    return made.as_dict()


FINDING = Finding(
    "flipped bit", f"bit 3 of `{EVIL}` is flipped", name=EVIL, index=[2, 5], expected=0.1, found=0.30000000000000004,
    ulp=1234567, differing=1, of=540, absolute=0.2, relative=0.5,
)  # fmt: skip


def test_what_a_trial_found_is_on_the_page() -> None:
    said = read(trial_page(report())).text
    for words in (
        "Resume is exact", "All is equal", "another mesh: B must be the control",
        "4 steps, a save, 3 steps more", "convert --to safetensors", "local shapes", "not checked",
        "the model has dropout", "no verdict", "4.00 kB", "20.5", "layers.0.w", "one thread", "rng", "took 12 s",
    ):  # fmt: skip
        assert words in said, words
    assert "The first difference" not in said


def test_the_first_difference_is_told_down_to_the_element() -> None:
    said = read(trial_page(report(verdict="differs", findings=[FINDING]))).text
    assert "Resume is not exact" in said
    for words in ("flipped bit", "[2, 5]", "0.1", "0.30000000000000004", "1,234,567 ULP", "1 of 540 elements"):
        assert words in said, words


def test_each_run_is_a_curve_and_one_value_that_is_no_number_leaves_no_hole() -> None:
    made = report()
    made["runs"][0]["steps"][2]["loss"] = float("nan")
    drawn = [dict(a) for tag, a in read(trial_page(made)).tags if tag == "polyline"]
    assert [len(str(one["points"]).split()) for one in drawn] == [6, 3, 3, 7, 3, 3]
    assert all(re.fullmatch(r"[\d., ]+", str(one["points"])) for one in drawn)


def test_equal_losses_are_drawn_at_one_place_and_others_are_not() -> None:
    made = report()
    made["runs"][1]["steps"][1]["loss"] += 1.0
    loss = [str(dict(a)["points"]).split() for tag, a in read(trial_page(made)).tags if tag == "polyline"][:3]
    by_a, control, by_b = loss[0][4:], loss[1], loss[2]
    assert control == by_a
    assert [x == y for x, y in zip(by_b, control, strict=True)] == [True, False, True]


def titles(page: str) -> list[str]:
    return [str(attrs["aria-label"]) for tag, attrs in read(page).tags if tag == "svg" and attrs.get("aria-label")]


def test_small_differences_have_a_logarithmic_chart_of_their_own() -> None:
    """A difference of 1e-6 is no pixel of the losses; B is compared with what it is judged by, here the control."""
    made = report()
    assert [title.partition(",")[0] for title in titles(trial_page(made))] == ["Loss by step", "Gradient norm by step"]
    made["runs"][1]["steps"][1]["loss"] += 1e-6
    made["runs"][1]["steps"][2]["loss"] += 1e-3
    page = trial_page(made)
    assert titles(page)[1] == "Loss: |difference| from control, logarithmic by step, of B"
    points = [str(dict(a)["points"]).split() for tag, a in read(page).tags if tag == "polyline"][3]
    none, small, large = (float(point.partition(",")[2]) for point in points)
    assert none - small > 30 and small - large > 60, "zero, a millionth and a thousandth are apart"
    assert {"0", "1e-6", "1e-3", "step"} <= {word.strip() for word in read(page).words}


def test_the_subtitle_does_not_repeat_the_title_and_digests_are_no_values() -> None:
    digest = Finding("rng differs", "the RNG of rank 0 is not as it was", expected="ab" * 32, found="cd" * 32)
    page = trial_page(report(verdict="differs", message="resume is not exact: the loss differs", findings=[digest]))
    said = read(page).text
    assert "Resume is not exact The loss differs" in said
    assert "abab" not in said and "cdcd" not in said


def test_runs_are_columns_of_the_sharding() -> None:
    checks = [Check("memory", run, 2, run != "B", "8 B") for run in ("A", "B")] + [Check("losses agree", "A", 2, True)]
    said = read(trial_page(report(checks=checks))).text
    assert "check A B note memory passed failed 8 B losses agree passed not checked" in said


def test_the_page_says_how_it_was_made() -> None:
    said = read(trial_page(report(), {"torch": "2.9.0", "command": EVIL})).text
    assert "How this was made torch 2.9.0 command" in said
    assert "How this was made" not in read(trial_page(report())).text


def test_a_run_that_hung_says_where() -> None:
    failure = Failure("B", "rank 1 came no further in 60 s", [Stuck(1, "step 5", "recipe.py:40 in step", ["<frame>"])])
    said = read(trial_page(report(verdict="failed", failure=failure))).text
    assert "did not finish" in said
    assert "rank 1: step 5 · recipe.py:40 in step" in said
    assert "<frame>" in said


@pytest.mark.parametrize("verdict", ["same", "differs"])
def test_names_are_no_markup(verdict: str) -> None:
    failure = Failure(EVIL, EVIL, [Stuck(0, EVIL, EVIL, [EVIL], EVIL)])
    made = report(
        verdict=verdict, recipe=EVIL, rule=EVIL, rule_message=EVIL, message=EVIL, notes=[EVIL], deterministic=[EVIL],
        findings=[FINDING, FINDING], failure=failure, drifts=[Drift(EVIL, 1, 1, 1, 1, EVIL)],
        route=[Leg(EVIL, EVIL, EVIL)], compared=[Compared(EVIL, EVIL, EVIL, 1, 1, EVIL)],
        checks=[Check(EVIL, EVIL, 1, False, EVIL)], device=EVIL,
    )  # fmt: skip
    made["runs"][0]["name"] = made["runs"][0]["mesh"] = made["runs"][0]["started"] = EVIL
    page = trial_page(made)
    reader = read(page)
    assert not {tag for tag, _ in reader.tags} & {"script", "img", "iframe", "link", "a"}
    assert not [a for _, attrs in reader.tags for a in attrs if a.startswith("on")]
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert page.count("&lt;script&gt;") >= 20


def test_nothing_is_loaded_from_anywhere() -> None:
    page = trial_page(report())
    reader = read(page)
    assert not [attrs for _, attrs in reader.tags if {"src", "href", "srcset"} & set(attrs)]
    assert "url(" not in page
    assert "@import" not in page
    assert "prefers-color-scheme: dark" in page


def test_tables_name_their_rows_and_columns() -> None:
    tags = read(trial_page(report())).tags
    tables = sum(tag == "table" for tag, _ in tags)
    scopes = [attrs.get("scope") for tag, attrs in tags if tag == "th"]
    assert tables >= 5
    assert set(scopes) == {"col", "row"}
    assert [attrs["lang"] for tag, attrs in tags if tag == "html"] == ["en"]
    assert all(attrs.get("aria-label") or attrs.get("aria-hidden") for tag, attrs in tags if tag == "svg")


def test_an_empty_report_is_a_page() -> None:
    assert "did not finish" in read(trial_page({})).text
