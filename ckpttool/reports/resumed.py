"""What `verify-resume trial` and `verify-resume run` found, as blocks and as a page, made from what `--json` prints."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpttool.analysis.statistics.results import Stats
from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.findings import DIFFERENCE, NOTE, Finding
from ckpttool.reports.charts import Curve, charts, styles
from ckpttool.reports.page import Book, Section, render, sections
from ckpttool.reports.report import Block, Column, Facts, Findings, Line, Styled, Table, TextLike, Verbatim, known
from ckpttool.text import duration, plural, size

Document = Mapping[str, Any]
_VERDICTS = {
    "same": ("PASS", "green", "Resume is exact", True),
    "differs": ("FAIL", "red", "Resume is not exact", False),
    "failed": ("FAIL", "red", "A run did not finish", False),
    "nondeterministic": ("NONDETERMINISTIC", "yellow", "Training does not repeat itself", None),
    "unproven": ("UNPROVEN", "yellow", "Exact resume is not proven", False),
    "planned": ("PLAN", "dim", "Nothing was run", None),
}
_RUNS = {
    "A": "trained without interruption",
    "A2": "run A repeated",
    "B": "resumed",
    "control": "reference: resumed by torch alone",
}
_MEASURED = {"loss": "Loss", "gradient_norm": "Gradient norm"}
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SAME = {True: Styled("same", "green"), False: Styled("differs", "red"), None: Styled("no verdict", "dim")}
_NOTICED = {True: Styled("noticed", "green"), False: Styled("not noticed", "yellow"), None: Styled("–", "dim")}
_PASSED = {True: Styled("passed", "green"), False: Styled("failed", "red"), None: Styled("not checked", "dim")}
_SHOWN = 10  # findings that a terminal shows without `-v`


def blocks(document: Document, verbose: bool = False) -> Iterator[Block]:
    """Yield the verdict, what was run, what was compared and checked, and what differs; with `verbose` also what was
    measured in each step, and where each rank was when its run ended."""
    word, style, *_ = _VERDICTS[document["verdict"]]
    yield Line([Styled(word, style), "  ", document["message"]])
    yield Facts(known(_about(document)), "What was run", is_apart=True)
    yield from _compared(document["compared"])
    yield _checks(document.get("checks") or ())
    yield _controls(document.get("controls") or ())
    differences = [Finding(DIFFERENCE, one["kind"], _told(one), hint=one["hint"]) for one in document["findings"]]
    yield Findings("found", differences, _SHOWN, plural(len(differences), "difference"))
    yield from _failure(document["failure"], verbose)
    if verbose:
        yield _measured("loss", document["runs"])


def page(document: Document, environment: Mapping[str, str] | None = None) -> str:
    """Return the page of a trial or a run; `environment` says how it was made, `{"torch": "2.9.0"}`."""
    runs, verdict = document["runs"], _VERDICTS[document["verdict"]]
    is_trial = "recipe" in document
    path = document["recipe"] if is_trial else shlex.join(document["words"])
    book = Book(f"verify-resume {'trial' if is_trial else 'run'}", path, _title(document), Stats(path), Catalogue(""))
    book.verdict, book.is_good = verdict[2:]
    book.call = (environment or {}).get("command", "")
    # What the message says beyond the title: `resume is not exact: the loss ...` is `The loss ...`.
    detail = re.sub(r"^(resume is not exact|exact resume): ", "", document["message"])
    book.detail = detail[:1].upper() + detail[1:]
    drawn = {title: _curves(runs, key) for key, title in _MEASURED.items()}
    resumed = next((run["resumed_at"] for run in runs if run["resumed_at"] is not None), None)
    notes = [Finding(NOTE, "note", note) for note in document["notes"]]
    found = [block for block in blocks(document, verbose=True) if not isinstance(block, (Facts, Line))]
    facts = Facts(known(_about(document)), "What was run")
    book.sections = [
        *sections([facts]),
        *_first_difference(document),
        *sections(block for block in found if isinstance(block, Verbatim)),
        Section("Curves", charts=[chart for name, curves in drawn.items() for chart in charts(name, curves, resumed)]),
        *sections([Findings("Notes", notes)]),
    ]
    compared = [block for block in found if isinstance(block, Table) and block.title not in ("losses",)]
    book.chapters = {
        "Steps": [*sections(_measured(key, runs) for key in _MEASURED)],
        "Differences": [*sections(block for block in found if isinstance(block, Findings))],
        "Compared": [*sections([*compared, _drifts(document["drifts"])])],
        "Runs": [*sections([_table_of_runs(runs), _memory(runs)]), _provenance(document, environment or {})],
    }
    return render(book)


# What was run ---------------------------------------------------------------------------------------------------------


def _title(document: Document) -> str:
    if "recipe" not in document:
        at, until = document["at"], document["until"]
        return f"Resume of a command: from step {at}, compared up to step {until}"
    before, after = document["steps_before"], document["steps_after"]
    trained = f"{plural(before, 'step')}, a save, {after:,} more" if before else plural(after, "step")
    return f"Resume trial: {trained} on {document['device']}"


def _about(document: Document) -> Iterator[tuple[str, TextLike | None]]:
    is_planned = document["verdict"] == "planned"
    yield "criterion", document["rule_message"]
    yield "likely cause", document.get("cause")
    for leg in document["route"]:
        yield "route", f"{leg['message']}  {duration(leg['seconds'])}"
    for run in document["runs"]:
        yield f"run {run['name']}", _run(run, document.get("at"), is_planned)
        if is_planned:
            yield "before stop", run["stopped"]
    for drift in document["drifts"]:
        yield "loss drift", f"{drift['loss_relative']:.2%} vs A (informational)"
    yield "resumed with", document.get("resumed_with") or None
    yield "crossed", ", ".join(document.get("crossed") or ())
    yield "not crossed", ", ".join(document.get("not_crossed") or ())
    yield "nondeterministic", ", ".join(document.get("nondeterministic") or document.get("unrepeated") or ())
    yield "not loaded", ", ".join(document.get("not_loaded") or ())
    yield "begun anew", ", ".join(document.get("begun_anew") or ())
    yield "not proven", ", ".join(document.get("unproven") or ())
    reasons = document.get("reasons") or {}
    unjudged = document.get("unjudged") or ()
    yield "not judged", ", ".join(f"{one} ({reasons[one]})" if one in reasons else one for one in unjudged)
    yield "determinism", ", ".join(document.get("deterministic") or document.get("settings") or ())
    if (cost := document.get("cost")) is not None:
        disk = f", {size(cost['checkpoint_bytes'])} a checkpoint" if cost["checkpoint_bytes"] is not None else ""
        yield "cost", f"{plural(cost['runs'], 'start')}, {plural(cost['steps'], 'step')}{disk}"
    yield "time", duration(document["seconds"]) if document["seconds"] else None
    yield "kept in", document["folder"]


def _run(run: Document, at: int | None, is_planned: bool) -> str:
    resumed = f", resumed at step {run['resumed_at']}" if run["resumed_at"] is not None else ""
    if "command" in run:
        stopped = f"; stopped at step {at} {run['stopped']}" if run["stopped"] else ""
        facts = "" if is_planned else f" ({duration(run['seconds'])}{stopped}{resumed})"
        return f"{shlex.join(run['command'])}{facts}"
    rate = f", {run['steps_per_second']:.3g} steps/s" if run["steps_per_second"] else ""
    return f"{plural(run['world_size'], 'rank')}, {run['mesh']}{resumed}, {plural(len(run['steps']), 'step')}{rate}"


def _failure(failure: Document | None, verbose: bool) -> Iterator[Block]:
    """Yield where each rank was when its run ended, or what a command wrote last."""
    if failure is None:
        return
    if "output" in failure:
        yield Verbatim(f"the last lines of run {failure['run']}", "\n".join(f"  {line}" for line in failure["output"]))
        return
    lines = []
    for rank in failure["ranks"]:
        error = f": {rank['error']}" if rank["error"] else ""
        lines.append(f"  rank {rank['rank']}: {rank['phase']}, {rank['where'] or 'not in the recipe'}{error}")
        lines += [f"    {frame}" for frame in rank["stack"]] if verbose else []
    yield Verbatim("ranks", "\n".join(lines))


# What was compared ----------------------------------------------------------------------------------------------------


def _compared(rows: Sequence[Document]) -> Iterator[Block]:
    """Yield tables of comparisons: of checkpoints with a row for each step and a column for each part, and others."""
    by_step: dict[str, dict[str, TextLike]] = {}
    others = []
    for row in rows:
        step, _, kind = row["what"].rpartition(": ")
        if step.startswith("step "):
            differing = f" {row['differing']:,} of {row['count']:,}" if row["equal"] is False else ""
            mark = _SAME[row["equal"]]
            by_step.setdefault(step, {})[kind] = Styled(mark.text + differing, mark.style)
        else:
            equal = f"{row['count'] - row['differing']:,} of {row['count']:,} equal"
            who = f"{row['run']} with {row['against']}"
            others.append([row["what"], who, equal, _SAME[row["equal"]], row["message"]])
    kinds = [*dict.fromkeys(kind for cells in by_step.values() for kind in cells)]
    cells = [[step, *(of.get(kind, "") for kind in kinds)] for step, of in by_step.items()]
    yield Table("checkpoints", [Column(), *map(Column, kinds)], cells, limit=None)
    yield Table("compared", [*(Column() for _ in range(4)), Column(fit="wrap")], others, limit=None)


def _checks(checks: Sequence[Document]) -> Table:
    """Return a row for each check of the sharding, with the results of the runs; a note that all runs share once."""
    runs = [*dict.fromkeys(check["run"] for check in checks)]
    rows: list[list[TextLike]] = []
    for what in dict.fromkeys(check["what"] for check in checks):
        by_run = {check["run"]: check for check in checks if check["what"] == what}
        messages: dict[str, list[str]] = {}
        for run, check in by_run.items():
            messages.setdefault(check["message"], []).append(run)
        notes = [t if len(messages) == 1 else f"{', '.join(names)}: {t}" for t, names in messages.items() if t]
        results = [_PASSED[by_run[run]["passed"]] if run in by_run else "" for run in runs]
        rows.append([what, *results, "; ".join(notes)])
    return Table("sharding", [Column("check"), *map(Column, runs), Column("note", fit="wrap")], rows, limit=None)


def _controls(controls: Sequence[Document]) -> Table:
    """Return a row for each control, with the first difference that it made."""
    rows: list[list[TextLike]] = [
        [one["name"], _NOTICED[one["noticed"]], one["what"] or one["message"]] for one in controls
    ]
    return Table("controls", [Column("left out"), Column(), Column("first difference", fit="wrap")], rows, limit=None)


def _told(finding: Document) -> str:
    return f"{finding['kind']}: {finding['message']}"


def _first_difference(document: Document) -> Iterator[Section]:
    """Yield the first difference, down to the element."""
    for first in document["findings"][:1]:
        values = {key: first[key] for key in ("expected", "found") if not _is_digest(first[key])}
        of = f" of {first['of']:,} elements" if first["differing"] and first["of"] else ""
        facts = {
            **{key: first[key] for key in ("run", "name", "rank", "step")},
            "element": None if not first["index"] else f"[{', '.join(map(str, first['index']))}]",
            # All digits: they tell a float from its neighbours.
            **values,
            "distance": _distance(first),
            "differing": None if first["differing"] is None else f"{first['differing']:,}{of}",
            "largest difference": _figure(first["absolute"]),
            "relative": _figure(first["relative"]),
        }
        shown = [(title, str(value)) for title, value in facts.items() if value is not None and value != ""]
        item = Finding(DIFFERENCE, first["kind"], first["message"])
        yield Section("The first difference", [item], shown, note=first["hint"] or "")


def _distance(first: Document) -> str | None:
    """Return how far two values are apart: a step counter in steps, and others in ULP."""
    if first["ulp"] is None:
        return None
    if (first["name"] or "").endswith(".step"):
        return plural(round(abs(first["found"] - first["expected"])), "step")
    return f"{first['ulp']:,} ULP"


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


# Runs -----------------------------------------------------------------------------------------------------------------


def _curves(runs: Sequence[Document], key: str) -> list[Curve]:
    """Return what each run measured, where that is finite."""
    style = styles([run["name"] for run in runs])
    curves = []
    for run in runs:
        seen = ((step["number"], step.get(key)) for step in run["steps"])
        points = [(number, value) for number, value in seen if isinstance(value, float) and math.isfinite(value)]
        message = ", ".join(filter(None, (_purpose(run), run.get("mesh"))))
        curves.append(Curve(run["name"], style[run["name"]], points, message))
    return curves


def _measured(key: str, runs: Sequence[Document]) -> Table:
    """Return what each run measured at each step, and whether B has exactly what its reference has."""
    measured = {
        run["name"]: {step["number"]: step[key] for step in run["steps"] if step.get(key) is not None} for run in runs
    }
    measured = {name: values for name, values in measured.items() if values}
    against = "control" if "control" in measured else "A"
    expected, found = measured.get(against, {}), measured.get("B", {})
    rows: list[list[TextLike]] = []
    for step in sorted({step for values in measured.values() for step in values}):
        cells = ["" if step not in values else repr(values[step]) for values in measured.values()]
        is_judged = step in expected and step in found
        verdict = Styled("equal", "green") if repr(expected.get(step)) == repr(found.get(step)) else _SAME[False]
        rows.append([f"{step:,}", *cells, *([verdict if is_judged else ""] if expected and found else [])])
    columns = [Column("step", is_number=True), *(Column(name, is_number=True) for name in measured)]
    columns += [Column(f"B with {against}")] if expected and found else []
    return Table("losses" if key == "loss" else key, columns, rows, limit=None, name=_MEASURED[key])


def _purpose(run: Document) -> str:
    """Return what a run is for, or the checkpoint that it resumed from."""
    return _RUNS.get(run["name"]) or run.get("source") or ""


def _table_of_runs(runs: Sequence[Document]) -> Table:
    titles = ("run", "what", "mesh or command", "ranks", "steps", "steps/s", "processes", "time")
    rows: list[list[TextLike]] = []
    for run in runs:
        mesh = run["mesh"] if "mesh" in run else shlex.join(run["command"])
        ranks = "–" if run["world_size"] is None else str(run["world_size"])
        rate = _figure(run.get("steps_per_second"), 3) or "–"
        started = run.get("started") or run.get("stopped") or ""
        time = duration(run["seconds"]) if run["seconds"] else ""
        rows.append([run["name"], _purpose(run), mesh, ranks, f"{len(run['steps']):,}", rate, started, time])
    return Table("runs", [Column(title, is_number=i in (3, 4, 5, 7)) for i, title in enumerate(titles)], rows)


def _memory(runs: Sequence[Document]) -> Table:
    keys = ("parameters", "parameters_expected", "optimizer", "optimizer_expected")
    columns = [Column(key.replace("_", " "), is_number=key != "rank") for key in ("rank", *keys)]
    rows = [
        [f"{run['name']}, rank {rank['rank']}", *(size(rank[key]) for key in keys)]
        for run in runs
        for rank in run.get("memory") or ()
    ]
    return Table("memory of each rank", columns, rows, limit=None)


def _drifts(drifts: Sequence[Document]) -> Table:
    figures = ("loss", "loss_relative", "gradient_norm", "parameters")
    titles = ("run", "loss", "relative", "gradient norm", "parameters", "most in")
    rows = [[one["run"], *(_figure(one[key], 4) or "–" for key in figures), one["parameter"] or ""] for one in drifts]
    columns = [Column(title, is_number=0 < i < 5) for i, title in enumerate(titles)]
    return Table("drift from A, which does not count for the verdict", columns, rows)


def _provenance(document: Document, environment: Mapping[str, str]) -> Section:
    took = [("time", duration(document["seconds"]))] if document["seconds"] else []
    kept = [("files", str(document["folder"]))] if document["folder"] else []
    return Section("How this was made", facts=[*environment.items(), *took, *kept])


def _figure(value: float | None, digits: int = 9) -> str:
    return "" if value is None else f"{value:.{digits}g}"
