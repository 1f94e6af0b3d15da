"""The page of a trial: what `ckpttool verify-resume trial --html` writes. Pure.

verdict and rule . loss curves over each other . the first difference . what was compared . checks . speed and memory
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpttool.operations.verify_resume.trial.curves import Curve, chart
from ckpttool.operations.verify_resume.trial.markup import Raw, facts, number, page, pill, prose, section, table, text
from ckpttool.text import duration, plural, size

Report = Mapping[str, Any]

_VERDICTS = {
    "same": "Training goes on as if nothing had happened",
    "differs": "Training does not go on as it would have",
    "failed": "The trial did not come to its end",
}
_RULES = {"bitwise": "same mesh", "control": "another mesh, against a control", "checkpoints": "checkpoints"}
_RUNS = {"A": "trained without a break", "B": "resumed", "control": "resumed by torch alone"}
_MOST = 200  # findings in the table


def trial_page(report: Report) -> str:
    """One self-contained HTML file, light and dark, of the dict that a trial prints with `--json`."""
    verdict = str(report.get("verdict", "failed"))
    return page(
        f"{_VERDICTS.get(verdict, verdict)} - ckpttool verify-resume",
        _head(report, verdict),
        _charts(report),
        section("The first difference", _first(report)) if report.get("findings") else "",
        section("All differences", _findings(report)) if len(report.get("findings", ())) > 1 else "",
        section("Where it stopped", _failure(report)) if report.get("failure") else "",
        section("What was compared", _compared(report)),
        section("Sharding", _checks(report)),
        section("Drift", *_drifts(report)),
        section("Runs", _runs(report)),
        section("Memory of each rank", _memory(report)),
        section("What was switched on", _list(report.get("deterministic", ()))),
        section("Notes", _list(report.get("notes", ()))),
        f"<footer>{text(report.get('schema', ''))}{_took(report)}</footer>",
    )


def _took(report: Report) -> str:
    seconds = report.get("seconds")
    return f" · took {duration(seconds)}" if seconds else ""


def _head(report: Report, verdict: str) -> str:
    title = _VERDICTS.get(verdict, verdict)
    before, after = report.get("steps_before") or 0, report.get("steps_after") or 0
    rule = str(report.get("rule", ""))
    steps = f"{plural(before, 'step')}, a save, {plural(after, 'step')} more" if before else plural(after, "step")
    return (
        f'<header><h1>Resume trial</h1><p class="soft"><code>{text(report.get("recipe", ""))}</code> · {text(steps)}'
        f" on {text(report.get('device', 'cpu'))}</p></header>"
        f'<div class="verdict {text(verdict)}"><strong>{text(title)}</strong>{prose(str(report.get("says", "")))}</div>'
        f"<p><strong>Rule: {text(_RULES.get(rule, rule))}.</strong> {prose(str(report.get('rule_says', '')))}</p>"
        f"{_route(report)}"
    )


def _route(report: Report) -> str:
    legs = report.get("route") or ()
    if not legs:
        return ""
    items = "".join(f"<li>{prose(str(leg['says']))}{_format(leg)}</li>" for leg in legs)
    return f'<ol class="route" aria-label="the way of the checkpoint">{items}</ol>'


def _format(leg: Mapping[str, Any]) -> str:
    kind = str(leg.get("format") or "")
    return f' <span class="soft">{text(kind)}</span>' if kind and kind not in str(leg["says"]) else ""


# Curves ---------------------------------------------------------------------------------------------------------------


def _charts(report: Report) -> str:
    runs = report.get("runs") or ()
    mark = next((run["resumed_at"] for run in runs if run.get("resumed_at") is not None), None)
    losses = [Curve(run["name"], [(s["number"], s["loss"]) for s in run["steps"]], _what(run)) for run in runs]
    norms = [
        Curve(
            run["name"],
            [(s["number"], s["gradient_norm"]) for s in run["steps"] if s.get("gradient_norm") is not None],
            _what(run),
        )
        for run in runs
    ]
    drawn = chart("Loss", losses, mark) + chart("Gradient norm", norms, mark)
    return f'<section aria-label="curves"><div class="charts">{drawn}</div></section>' if drawn else ""


def _what(run: Mapping[str, Any]) -> str:
    return ", ".join(part for part in (_RUNS.get(run["name"], run.get("source") or ""), run.get("mesh") or "") if part)


# Differences ----------------------------------------------------------------------------------------------------------


def _first(report: Report) -> str:
    finding = report["findings"][0]
    of = finding.get("of")
    differing = None if finding.get("differing") is None else number(finding["differing"])
    index = finding.get("index")
    return f'<div class="first"><p>{prose(str(finding["says"]))}</p>' + facts([
        ("kind", finding["kind"]),
        ("run", finding.get("run")),
        ("name", Raw(f"<code>{text(finding['name'])}</code>") if finding.get("name") else None),
        ("rank", finding.get("rank")),
        ("step", finding.get("step")),
        ("element", Raw(f"<code>[{', '.join(map(str, index))}]</code>") if index is not None else None),
        ("expected", _value(finding.get("expected"))),
        ("found", _value(finding.get("found"))),
        ("distance", f"{number(finding['ulp'])} ULP" if finding.get("ulp") is not None else None),
        ("differing", f"{differing} of {number(of)} elements" if differing and of else differing),
        ("largest difference", number(finding["absolute"]) if finding.get("absolute") is not None else None),
        ("relative", number(finding["relative"]) if finding.get("relative") is not None else None),
    ]) + (f"<p>{prose(finding['hint'])}</p>" if finding.get("hint") else "") + "</div>"  # fmt: skip


def _value(value: Any) -> Raw | None:
    if value is None:
        return None
    # As many digits as tell it from its neighbours, and no fewer.
    return Raw(f'<span class="mono">{text(repr(value) if isinstance(value, float) else value)}</span>')


def _findings(report: Report) -> str:
    found = report["findings"]
    rows = [
        (f["kind"], f.get("run", ""), prose(str(f["says"])), number(f.get("ulp")) if f.get("ulp") is not None else "")
        for f in found[:_MOST]
    ]
    caption = f"the first {_MOST} of {len(found):,}" if len(found) > _MOST else ""
    return table(("kind", "run", "what", "ULP"), rows, numbers=(3,), caption=caption)


def _failure(report: Report) -> str:
    failure = report["failure"]
    made = [f"<p>{prose(str(failure['says']))}</p>"]
    for rank in failure.get("ranks", ()):
        where = f" · {text(rank['where'])}" if rank.get("where") else ""
        stack = "\n".join(rank.get("stack") or ())
        error = f"<p>{text(rank['error'])}</p>" if rank.get("error") else ""
        said = f"rank {text(rank['rank'])}: {text(rank['phase'])}{where}"
        made.append(
            f"<details><summary>{said}</summary>{error}<pre>{text_block(stack)}</pre></details>"
            if stack or error
            else f"<p>{said}</p>"
        )
    return "".join(made)


def text_block(value: str) -> str:
    """Lines as they are, each made safe."""
    return "\n".join(text(line) for line in value.splitlines())


# Tables ---------------------------------------------------------------------------------------------------------------


def _compared(report: Report) -> str:
    rows = [
        (
            c["what"], f"{c['run']} with {c['against']}", number(c["count"]), number(c["differing"]),
            pill(c["equal"], "equal", "differs", "not judged"), prose(str(c.get("says") or "")),
        )
        for c in report.get("compared") or ()
    ]  # fmt: skip
    headers = ("what", "runs", "compared", "differing", "verdict", "note")
    return table(headers, rows, numbers=(2, 3)) if rows else ""


def _checks(report: Report) -> str:
    rows = [
        (
            c["what"], c["run"], number(c["count"]), pill(c["passed"], "passed", "failed", "not checked"),
            prose(str(c.get("says") or "")),
        )
        for c in report.get("checks") or ()
    ]  # fmt: skip
    return table(("check", "run", "checked", "verdict", "note"), rows, numbers=(2,)) if rows else ""


def _drifts(report: Report) -> Iterator[str]:
    drifts = report.get("drifts") or ()
    if drifts:
        yield '<p class="soft">How far a run on another mesh comes from A. It is reported, and not judged.</p>'
        yield table(
            ("run", "loss", "relative", "gradient norm", "parameters", "most in"),
            [
                (
                    d["run"], number(d["loss"], 4), number(d["loss_relative"], 4), number(d["gradient_norm"], 4),
                    number(d["parameters"], 4), Raw(f"<code>{text(d['parameter'])}</code>") if d["parameter"] else "",
                )
                for d in drifts
            ],
            numbers=(1, 2, 3, 4),
        )  # fmt: skip


def _runs(report: Report) -> str:
    rows = [
        (
            run["name"], _RUNS.get(run["name"], run.get("source") or ""), run["mesh"], number(run["world"]),
            number(len(run["steps"])), number(run.get("steps_per_second"), 3), run.get("started") or "",
            duration(run["seconds"]) if run.get("seconds") else "",
        )
        for run in report.get("runs") or ()
    ]  # fmt: skip
    headers = ("run", "what", "mesh", "ranks", "steps", "steps/s", "processes", "time")
    return table(headers, rows, numbers=(3, 4, 5, 7)) if rows else ""


def _memory(report: Report) -> str:
    rows = [
        (
            f"{run['name']}, rank {m['rank']}", size(m["parameters"]), size(m["parameters_expected"]),
            size(m["optimizer"]), size(m["optimizer_expected"]),
        )
        for run in report.get("runs") or () for m in run.get("memory") or ()
    ]  # fmt: skip
    headers = ("rank", "parameters", "expected", "optimizer", "expected")
    return table(headers, rows, numbers=(1, 2, 3, 4)) if rows else ""


def _list(items: Any) -> str:
    rows = "".join(f"<li>{prose(str(item))}</li>" for item in items)
    return f"<ul>{rows}</ul>" if rows else ""
