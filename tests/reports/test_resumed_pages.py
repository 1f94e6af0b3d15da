"""The pages of `verify-resume trial` and `run`: that each is one well-formed file with everything in it, that no name
in it is markup, and how it is in a real browser."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.chromium import Page

from ckpttool.reports.resumed import page as page_of
from ckpttool.resume import results
from ckpttool.resume.results import Compared, Drift, Failure, Leg, RankCheck, Run, RunDifference, Step, Stuck

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
        if not self.open or self.open[-1] not in ("style", "script"):
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

    made = results.TrialReport(
        recipe="recipe.py", rule="control", rule_message="another mesh: B must be the `control`", steps_before=4,
        message="all is equal", steps_after=3, deterministic=["one thread"], notes=["`rng` of rank 3 is new"],
        seconds=12.5,
    )  # fmt: skip
    made.runs = [
        Run("A", "shard=2", 2, steps=steps(0, 7), steps_per_second=20.5, memory=[MEMORY]),
        Run("B", "shard=4", 4, steps=steps(4, 7), resumed_at=4, steps_per_second=19.0),
        Run("control", "shard=4", 4, steps=steps(4, 7), resumed_at=4),
    ]
    made.route = [Leg("saved", "a", "dcp"), Leg("convert --to safetensors", "b", "safetensors")]
    made.compared = [Compared("model", "B", "A", 31, 0), Compared("losses", "control", "A", 3, 3, "drifts", None)]
    made.checks = [
        RankCheck("local shapes", "B", 31, True),
        RankCheck("gradients", "B", 0, None, "the model has dropout"),
    ]
    made.drifts = [Drift("control", 1e-6, 2e-7, None, 4e-7, "layers.0.w")]
    for name, value in more.items():
        setattr(made, name, value)
    return made.as_dict()


FINDING = RunDifference(
    "flipped bit", f"bit 3 of `{EVIL}` is flipped", name=EVIL, index=[2, 5], expected=0.1, found=0.30000000000000004,
    ulp=1234567, differing=1, of=540, absolute=0.2, relative=0.5,
)  # fmt: skip


def test_what_a_trial_found_is_on_the_page() -> None:
    said = read(page_of(report())).text
    for words in (
        "Resume is exact", "All is equal", "another mesh: B must be the control",
        "4 steps, a save, 3 more on cpu", "convert --to safetensors", "local shapes", "not checked",
        "the model has dropout", "no verdict", "4.00 kB", "20.5", "layers.0.w", "one thread", "rng", "time 12 s",
    ):  # fmt: skip
        assert words in said, words
    assert "The first difference" not in said


def test_the_first_difference_is_told_down_to_the_element() -> None:
    said = read(page_of(report(verdict="differs", findings=[FINDING]))).text
    assert "Resume is not exact" in said
    for words in ("flipped bit", "[2, 5]", "0.1", "0.30000000000000004", "1,234,567 ULP", "1 of 540 elements"):
        assert words in said, words


def test_each_run_is_a_curve_and_one_value_that_is_no_number_leaves_no_hole() -> None:
    made = report()
    made["runs"][0]["steps"][2]["loss"] = float("nan")
    drawn = [dict(a) for tag, a in read(page_of(made)).tags if tag == "polyline"]
    assert [len(str(one["points"]).split()) for one in drawn] == [6, 3, 3, 7, 3, 3]
    assert all(re.fullmatch(r"[\d., ]+", str(one["points"])) for one in drawn)


def test_equal_losses_are_drawn_at_one_place_and_others_are_not() -> None:
    made = report()
    made["runs"][1]["steps"][1]["loss"] += 1.0
    loss = [str(dict(a)["points"]).split() for tag, a in read(page_of(made)).tags if tag == "polyline"][:3]
    by_a, control, by_b = loss[0][4:], loss[1], loss[2]
    assert control == by_a
    assert [x == y for x, y in zip(by_b, control, strict=True)] == [True, False, True]


def titles(page: str) -> list[str]:
    return [str(attrs["aria-label"]) for tag, attrs in read(page).tags if tag == "svg" and attrs.get("aria-label")]


def test_small_differences_have_a_logarithmic_chart_of_their_own() -> None:
    """A difference of 1e-6 is not a pixel of the losses; B is compared with what it is judged by, here the control."""
    made = report()
    assert [title.partition(",")[0] for title in titles(page_of(made))] == ["Loss by step", "Gradient norm by step"]
    made["runs"][1]["steps"][1]["loss"] += 1e-6
    made["runs"][1]["steps"][2]["loss"] += 1e-3
    page = page_of(made)
    assert titles(page)[1] == "Loss: |difference| from control, logarithmic by step, of B"
    points = [str(dict(a)["points"]).split() for tag, a in read(page).tags if tag == "polyline"][3]
    none, small, large = (float(point.partition(",")[2]) for point in points)
    assert none - small > 30 and small - large > 60, "zero, a millionth and a thousandth are apart"
    assert {"0", "1e-6", "1e-3", "step"} <= {word.strip() for word in read(page).words}


def test_the_subtitle_does_not_repeat_the_title_and_digests_are_no_values() -> None:
    digest = RunDifference("rng differs", "the RNG of rank 0 is not as it was", expected="ab" * 32, found="cd" * 32)
    page = page_of(report(verdict="differs", message="resume is not exact: the loss differs", findings=[digest]))
    said = read(page).text
    assert "Resume is not exact The loss differs" in said
    assert "abab" not in said and "cdcd" not in said


def test_runs_are_columns_of_the_sharding() -> None:
    checks = [RankCheck("memory", run, 2, run != "B", "8 B") for run in ("A", "B")] + [
        RankCheck("losses agree", "A", 2, True)
    ]
    said = read(page_of(report(checks=checks))).text
    assert "check A B note memory passed failed 8 B losses agree passed" in said


def test_the_page_says_how_it_was_made() -> None:
    said = read(page_of(report(), {"torch": "2.9.0", "command": EVIL})).text
    assert "How this was made torch 2.9.0 command" in said
    assert "How this was made" not in read(page_of(report(seconds=0.0))).text


def test_a_run_that_hung_says_where() -> None:
    failure = Failure("B", "rank 1 came no further in 60 s", [Stuck(1, "step 5", "recipe.py:40 in step", ["<frame>"])])
    said = read(page_of(report(verdict="failed", failure=failure))).text
    assert "did not finish" in said
    assert "rank 1: step 5, recipe.py:40 in step" in said
    assert "<frame>" in said


def evil(verdict: str = "differs") -> dict[str, Any]:
    """The report of a trial in which every text is markup."""
    failure = Failure(EVIL, EVIL, [Stuck(0, EVIL, EVIL, [EVIL], EVIL)])
    made = report(
        verdict=verdict, recipe=EVIL, rule=EVIL, rule_message=EVIL, message=EVIL, notes=[EVIL], deterministic=[EVIL],
        findings=[FINDING, FINDING], failure=failure, drifts=[Drift(EVIL, 1, 1, 1, 1, EVIL)],
        route=[Leg(EVIL, EVIL, EVIL)], compared=[Compared(EVIL, EVIL, EVIL, 1, 1, EVIL)],
        checks=[RankCheck(EVIL, EVIL, 1, False, EVIL)], device=EVIL,
    )  # fmt: skip
    made["runs"][0]["name"] = made["runs"][0]["mesh"] = made["runs"][0]["started"] = EVIL
    return made


@pytest.mark.parametrize("verdict", ["same", "differs"])
def test_names_are_no_markup(verdict: str) -> None:
    page = page_of(evil(verdict))
    reader = read(page)
    tags = [tag for tag, _ in reader.tags]
    assert not {*tags} & {"img", "iframe", "link", "object"} and tags.count("script") == 2
    assert not [a for _, attrs in reader.tags for a in attrs if a.startswith("on")]
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert page.count("&lt;script&gt;") >= 20 and EVIL not in page


def test_nothing_is_loaded_from_anywhere() -> None:
    page = page_of(report())
    reader = read(page)
    assert not [attrs for _, attrs in reader.tags if {"src", "srcset"} & set(attrs)]
    assert all(str(attrs["href"]).startswith("#") for _, attrs in reader.tags if "href" in attrs)
    assert "url(" not in page
    assert "@import" not in page
    assert "prefers-color-scheme: dark" in page


def test_tables_name_their_rows_and_columns() -> None:
    tags = read(page_of(report())).tags
    tables = sum(tag == "table" for tag, _ in tags)
    scopes = [attrs.get("scope") for tag, attrs in tags if tag == "th"]
    assert tables >= 5
    assert set(scopes) == {"col", "row"}
    assert [attrs["lang"] for tag, attrs in tags if tag == "html"] == ["en"]
    assert all(attrs.get("aria-label") or attrs.get("aria-hidden") for tag, attrs in tags if tag == "svg")


# Of a command ---------------------------------------------------------------------------------------------------------


def run_report(**more: Any) -> dict[str, Any]:
    def run(name: str, *losses: float) -> results.ScriptRun:
        made = results.ScriptRun(name, ["python", "train.py", "--out", name], name, f"{name}/log", 2)
        made.steps = [results.Loss(8 - len(losses) + i + 1, loss) for i, loss in enumerate(losses)]
        return made

    made = results.RunReport(
        words=["python", EVIL], rule="bitwise", rule_message="B must be A", at=4, until=8, stop="sigterm"
    )
    made.verdict = "differs"
    made.message, made.cause, made.first_step = "the moments of `exp_avg` were lost", "`exp_avg` is all zero", 5
    made.runs = [run("A", 5.0, 4.5, 4.0, 3.5), run("A2", 5.0, 4.5, 4.0, 3.5), run("B", 4.5, 4.25, 3.0)]
    made.runs[2].resumed_at = 5
    made.compared = [Compared("step 6: model", "B", "A", 31, 3, "bitwise", equal=False)]
    made.findings = [
        RunDifference("moments lost", "`exp_avg` is all zero", step=6, hint="save `optimizer.state_dict()`")
    ]
    made.settings, made.unjudged, made.nondeterministic = ["PYTHONHASHSEED=0"], ["time"], ["rng"]
    for name, value in more.items():
        setattr(made, name, value)
    return made.as_dict()


def test_the_page_of_a_command_has_the_causes_and_each_step() -> None:
    said = read(page_of(run_report(), {"torch": "2.9.0"})).text
    for words in (
        "Resume is not exact", "The moments of exp_avg were lost", "likely cause exp_avg is all zero", "B must be A",
        "save optimizer.state_dict()", "step A A2 B B with A 5 5.0 5.0 6 4.5 4.5 4.5 equal 7 4.0 4.0 4.25 differs",
        "model step 6 differs 3 of 31", "PYTHONHASHSEED=0", "not judged time",
        "python train.py --out A2", "from step 4, compared up to step 8",
    ):  # fmt: skip
        assert words in said, words
    failure = results.FailedCommand("B", "it ended with exit code 1", ["KeyError: 3"])
    said = read(page_of(run_report(verdict="failed", failure=failure, message="it ended with exit code 1"))).text
    assert "It ended with exit code 1" in said and "KeyError: 3" in said


@pytest.mark.parametrize(("verdict", "style"), [("same", "same"), ("nondeterministic", "undecided")])
def test_a_verdict_that_is_neither_is_no_failure(verdict: str, style: str) -> None:
    assert f'class="verdict {style}"' in page_of(run_report(verdict=verdict))


# The browser ----------------------------------------------------------------------------------------------------------


PAGES = ["summary", "steps", "differences", "compared", "runs"]


@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1280, "light")])
@pytest.mark.parametrize("name", ["trial", "run"])
def test_every_page_is_drawn(tmp_path: Path, page: Page, name: str, width: int, scheme: str) -> None:
    page.view(width, 800, scheme)
    page.requests.clear()
    path = tmp_path / f"{name}.html"
    path.write_text(page_of(evil(), {"command": EVIL}) if name == "trial" else page_of(run_report()))
    page.open(path)
    assert page.ask("[...document.querySelectorAll('nav a')].map(one => one.dataset.page)") == PAGES
    assert page.ask("document.scripts.length") == 2
    for one in PAGES:
        page.ask(f"location.hash = '{one}'")
        page.ask("new Promise(done => setTimeout(done, 30))")
        shown = page.ask("[...document.querySelectorAll('section')].filter(one => !one.hidden).map(one => one.id)")
        assert shown == [f"page-{one}"]
        assert len(page.ask(f"document.getElementById('page-{one}').innerText")) > 30, one
        assert page.ask("document.documentElement.scrollWidth") <= width, f"{one} is wider than the window"
    background = page.ask("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(252, 252, 253)" if scheme == "light" else "rgb(17, 19, 20)")
    if name == "trial":
        cells = page.ask("[...document.querySelectorAll('#page-compared td')].map(one => one.textContent)")
        assert any(cell == 'w"><script>alert(1)</script>\\x1b[31m\\u202e' for cell in cells), cells
    assert page.problems == [] and page.requests == [path.as_uri()]


def test_keys_and_print(tmp_path: Path, page: Page) -> None:
    (tmp_path / "x.html").write_text(page_of(evil()))
    page.view(1280, 800, "light")
    page.open(tmp_path / "x.html")
    current = "document.querySelector('nav [aria-current]').dataset.page"
    for name in [*PAGES[1:], PAGES[0]]:
        page.press("ArrowRight")
        assert page.ask(current) == name
    page.press("/")  # there is nothing to search
    assert page.ask(current) == "summary"
    page.ask("dispatchEvent(new Event('beforeprint'))")
    page.send("Emulation.setEmulatedMedia", media="print")
    heights = page.ask("[...document.querySelectorAll('section, pre')].map(one => one.offsetHeight)")
    page.send("Emulation.setEmulatedMedia", media="")
    assert len(heights) == len(PAGES) + 1 and min(heights) > 20
    assert page.problems == []
