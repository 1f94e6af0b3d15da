"""The pages of `verify-resume trial --html` and `verify-resume run --html`, made from what `--json` prints."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpttool.analysis.statistics.results import Stats
from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.findings import DIFFERENCE, Finding
from ckpttool.reports.charts import Curve, charts, styles
from ckpttool.reports.page import Book, Mark, Prose, Section, render
from ckpttool.text import duration, plural, size

_VERDICTS = {
    "same": "Resume is exact",
    "differs": "Resume is not exact",
    "failed": "The trial did not finish",
    "nondeterministic": "The command does not repeat itself",
    "planned": "Nothing was run",
}
_IS_GOOD = {"same": True, "nondeterministic": None, "planned": None}
_RUNS = {
    "A": "trained without interruption",
    "A2": "run A repeated, as B differs",
    "B": "resumed",
    "control": "reference: resumed by torch alone",
}
_MEASURED = {"loss": "Loss", "gradient_norm": "Gradient norm"}
_DIGEST = re.compile(r"[0-9a-f]{64}")


def trial_page(report: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> str:
    """Return the page of the dict that a trial prints with `--json`; `environment` says how it was made,
    `{"torch": "2.9.0"}`."""
    before, after = report.get("steps_before"), plural(report.get("steps_after") or 0, "step")
    trained = f"{plural(before, 'step')}, a save, {after} more" if before else after
    title = f"Resume trial: {trained} on {report.get('device') or 'cpu'}"
    return _page(report, environment, "verify-resume trial", str(report.get("recipe", "")), title)


def run_page(report: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> str:
    """Return the page of the dict that `verify-resume run` prints with `--json`."""
    notes = [*report["notes"]]
    if report["nondeterministic"]:
        notes.append(f"nondeterministic, as run A2 differs from run A: {', '.join(report['nondeterministic'])}")
    if report["unjudged"]:
        notes.append(f"no training state, and not judged: {', '.join(report['unjudged'])}")
    runs = [{**run, "mesh": shlex.join(run["command"]), "started": run["stopped"] or ""} for run in report["runs"]]
    failure = report["failure"]
    if failure is not None:
        output = {"rank": 0, "phase": "the last lines of its output", "where": None, "stack": failure["output"]}
        failure = {"message": failure["message"], "ranks": [{**output, "error": failure["message"]}]}
    report = {**report, "notes": notes, "runs": runs, "failure": failure, "deterministic": report["settings"]}
    title = f"Resume of a command: stopped after step {report['at']}, compared until step {report['until']}"
    return _page(report, environment, "verify-resume run", shlex.join(report["words"]), title)


def _page(report: Mapping[str, Any], environment: Mapping[str, str] | None, command: str, path: str, title: str) -> str:
    verdict = str(report.get("verdict", "failed"))
    book = Book(command, path, title, Stats(path), Catalogue(""))
    book.verdict, book.is_good = _VERDICTS.get(verdict, verdict), _IS_GOOD.get(verdict, False)
    book.detail = _detail(report.get("message") or "")
    runs = report.get("runs") or ()
    drawn = {title: _curves(runs, key) for key, title in _MEASURED.items()}
    resumed = next((run["resumed_at"] for run in runs if run.get("resumed_at") is not None), None)
    book.sections = [
        Section("Trial", facts=[*_criterion(report)]),
        *_first_difference(report),
        *_failure(report.get("failure")),
        Section("Curves", charts=[chart for name, curves in drawn.items() for chart in charts(name, curves, resumed)]),
        Section("Notes", facts=[*_notes(report)]),
    ]
    book.chapters = {
        "Steps": [_steps(name, key, runs) for key, name in _MEASURED.items()],
        "Differences": [_differences(report)],
        "Compared": [_compared(report), _checks(report), _drifts(report)],
        "Runs": [_runs(runs), _memory(runs), _provenance(report, environment or {})],
    }
    return render(book)


def _detail(message: str) -> str:
    """Return what a message says beyond the title: `resume is not exact: the loss ...` is `The loss ...`."""
    detail = re.sub(r"^(resume is not exact|exact resume): ", "", message)
    return detail[:1].upper() + detail[1:]


def _criterion(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "criterion", Prose(report.get("rule_message") or report.get("rule") or "")
    if route := report.get("route"):
        yield "route", Prose(" → ".join(_leg(leg["message"], leg["format"]) for leg in route))


def _leg(message: str, format_: str) -> str:
    return message if format_ in message else f"{message} ({format_})"


def _notes(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if settings := report.get("deterministic"):
        yield "determinism", Prose("; ".join(settings))
    for note in report.get("notes") or ():
        yield "note", Prose(note)


# What differs ---------------------------------------------------------------------------------------------------------


def _first_difference(report: Mapping[str, Any]) -> Iterator[Section]:
    """Yield the first difference, down to the element."""
    findings = report.get("findings") or ()
    if not findings:
        return
    first = findings[0]
    values = {key: first.get(key) for key in ("expected", "found") if not _is_digest(first.get(key))}
    differing, of = first.get("differing"), first.get("of")
    facts = {
        "likely cause": Prose(report["cause"]) if report.get("cause") else None,
        "run": first.get("run"),
        "name": first.get("name"),
        "rank": first.get("rank"),
        "step": first.get("step"),
        "element": None if not first.get("index") else f"[{', '.join(map(str, first['index']))}]",
        # All digits: they tell a float from its neighbours.
        **values,
        "distance": None if first.get("ulp") is None else f"{first['ulp']:,} ULP",
        "differing": None
        if differing is None
        else f"{differing:,}{f' of {of:,} elements' if differing and of else ''}",
        "largest difference": _figure(first.get("absolute")),
        "relative": _figure(first.get("relative")),
    }
    shown = [(k, v if isinstance(v, Prose) else str(v)) for k, v in facts.items() if v is not None and v != ""]
    item = Finding(DIFFERENCE, first["kind"], first["message"])
    yield Section("The first difference", [item], shown, note=first.get("hint") or "")


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _differences(report: Mapping[str, Any]) -> Section:
    findings = report.get("findings") or ()
    return Section(
        "All differences",
        headers=("kind", "run", "what", "ULP", "hint"),
        rows=[
            (
                *(one["kind"], one.get("run") or "", Prose(one["message"])),
                *("" if one.get("ulp") is None else f"{one['ulp']:,}", Prose(one.get("hint") or "")),
            )
            for one in findings
        ],
        numbers=(3,),
    )


def _failure(failure: Mapping[str, Any] | None) -> Iterator[Section]:
    """Yield where each rank was when its run ended."""
    if failure is not None:
        logs = []
        for rank in failure["ranks"]:
            where = f"rank {rank['rank']}: {rank['phase']}" + (f" · {rank['where']}" if rank["where"] else "")
            logs.append((where, "\n".join([*rank["stack"], *filter(None, [rank["error"]])])))
        yield Section("Where it stopped", lead=failure["message"], logs=logs)


# Steps ----------------------------------------------------------------------------------------------------------------


def _curves(runs: Sequence[Mapping[str, Any]], key: str) -> list[Curve]:
    """Return what each run measured, where that is finite."""
    style = styles([run["name"] for run in runs])
    curves = []
    for run in runs:
        seen = ((step["number"], step.get(key)) for step in run["steps"])
        points = [(number, value) for number, value in seen if value is not None and math.isfinite(value)]
        message = ", ".join(filter(None, (_purpose(run), run.get("mesh"))))
        curves.append(Curve(run["name"], style[run["name"]], points, message))
    return curves


def _steps(title: str, key: str, runs: Sequence[Mapping[str, Any]]) -> Section:
    """Return what each run measured at each step, and whether B has exactly what its reference has."""
    measured = {
        run["name"]: {step["number"]: step[key] for step in run["steps"] if step.get(key) is not None} for run in runs
    }
    measured = {name: values for name, values in measured.items() if values}
    expected = measured.get("control", measured.get("A"))
    found = measured.get("B")
    is_judged = expected is not None and found is not None

    def verdict(step: int) -> str | Mark:
        if expected is None or found is None or step not in expected or step not in found:
            return ""
        is_equal = expected[step] == found[step] or (math.isnan(expected[step]) and math.isnan(found[step]))
        return Mark("equal", True) if is_equal else Mark("differs", False)

    against = "control" if "control" in measured else "A"
    return Section(
        title,
        headers=("step", *measured, *([f"B with {against}"] if is_judged else [])),
        rows=[
            (
                f"{step:,}",
                *("" if step not in values else repr(values[step]) for values in measured.values()),
                *([verdict(step)] if is_judged else []),
            )
            for step in sorted({step for values in measured.values() for step in values})
        ],
        numbers=range(1, len(measured) + 1),
    )


# What was compared ----------------------------------------------------------------------------------------------------


def _compared(report: Mapping[str, Any]) -> Section:
    words = {True: "equal", False: "differs", None: "no verdict"}
    return Section(
        "What was compared",
        headers=("what", "runs", "compared", "differing", "verdict", "note"),
        rows=[
            (
                *(one["what"], f"{one['run']} with {one['against']}", f"{one['count']:,}", f"{one['differing']:,}"),
                *(Mark(words[one["equal"]], one["equal"]), Prose(one["message"])),
            )
            for one in report.get("compared") or ()
        ],
        numbers=(2, 3),
    )


def _checks(report: Mapping[str, Any]) -> Section:
    """Return a row for each check of the sharding, with the results of the runs; a note that all runs share once."""
    checks = report.get("checks") or ()
    runs = [*dict.fromkeys(check["run"] for check in checks)]
    words = {True: "passed", False: "failed", None: "not checked"}
    rows: list[tuple[str | Mark, ...]] = []
    for what in dict.fromkeys(check["what"] for check in checks):
        by_run = {check["run"]: check for check in checks if check["what"] == what}
        messages: dict[str, list[str]] = {}
        for run, check in by_run.items():
            messages.setdefault(check["message"], []).append(run)
        shared = len(messages) == 1
        notes = [text if shared else f"{', '.join(names)}: {text}" for text, names in messages.items() if text]
        results = [by_run[run]["passed"] if run in by_run else None for run in runs]
        rows.append((what, *(Mark(words[passed], passed) for passed in results), Prose("; ".join(notes))))
    return Section("Sharding", headers=("check", *runs, "note"), rows=rows)


def _drifts(report: Mapping[str, Any]) -> Section:
    drifts = report.get("drifts") or ()
    figures = ("loss", "loss_relative", "gradient_norm", "parameters")
    return Section(
        "Drift",
        headers=("run", "loss", "relative", "gradient norm", "parameters", "most in"),
        rows=[
            (one["run"], *(_figure(one[key], 4) or "–" for key in figures), one["parameter"] or "") for one in drifts
        ],
        numbers=(1, 2, 3, 4),
        note="How far a run on another mesh is from A. Informational: it does not count for the verdict.",
    )


# Runs -----------------------------------------------------------------------------------------------------------------


def _purpose(run: Mapping[str, Any]) -> str:
    """Return what a run is for, or the checkpoint that it resumed from."""
    return _RUNS.get(run["name"]) or run.get("source") or ""


def _runs(runs: Sequence[Mapping[str, Any]]) -> Section:
    return Section(
        "Runs",
        headers=("run", "what", "mesh or command", "ranks", "steps", "steps/s", "processes", "time"),
        rows=[
            (
                *(
                    run["name"],
                    _purpose(run),
                    run["mesh"],
                    "–" if run["world_size"] is None else str(run["world_size"]),
                ),
                *(f"{len(run['steps']):,}", _figure(run.get("steps_per_second"), 3) or "–", run["started"] or ""),
                duration(run["seconds"]) if run["seconds"] else "",
            )
            for run in runs
        ],
        numbers=(3, 4, 5, 7),
    )


def _memory(runs: Sequence[Mapping[str, Any]]) -> Section:
    keys = ("parameters", "parameters_expected", "optimizer", "optimizer_expected")
    return Section(
        "Memory of each rank",
        headers=("rank", "parameters", "expected", "optimizer", "expected"),
        rows=[
            (f"{run['name']}, rank {rank['rank']}", *(size(rank[key]) for key in keys))
            for run in runs
            for rank in run.get("memory") or ()
        ],
        numbers=(1, 2, 3, 4),
    )


def _provenance(report: Mapping[str, Any], environment: Mapping[str, str]) -> Section:
    took = [("time", duration(report["seconds"]))] if report.get("seconds") else []
    kept = [("files", str(report["folder"]))] if report.get("folder") else []
    return Section("How this was made", facts=[*environment.items(), *took, *kept])


def _figure(value: float | None, digits: int = 9) -> str:
    return "" if value is None else f"{value:.{digits}g}"
