"""What was found of the corpus when it was last measured, and the page of the documentation that shows it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping

from support.paths import ROOT
from support.resume_corpus import BY_NAME, CORPUS, SCRIPTS, Outcome, graded

RECORD = SCRIPTS / "found.json"
PAGE = ROOT / "docs" / "explanation" / "what-is-found.md"
_MOST = 150  # characters of what was said
_FRACTION = re.compile(r"-?\d+\.\d+(e[+-]?\d+)?")
_TABLE = re.compile(r"(?<=<!-- begin -->\n).*(?=<!-- end -->)", re.DOTALL)
Record = Mapping[tuple[str, str], Outcome]


def recorded() -> dict[tuple[str, str], Outcome]:
    """Return what was found, by the script and the fault, with today's grades."""
    outcomes = {(one["script"], one["fault"]): Outcome(**one) for one in json.loads(RECORD.read_text())}
    for (name, fault), outcome in outcomes.items():
        script = BY_NAME[name]
        outcome.grade = graded(script, next((one for one in script.faults if one.name == fault), None), outcome)
    return outcomes


def with_table(page: str, record: Record) -> str:
    """Return the page with the tables of what was found, and the sentence above them."""
    return _TABLE.sub(lambda _: "\n".join([_sentence(record), "", *_rows(record), ""]), page)


def _sentence(record: Record) -> str:
    grades = Counter(outcome.grade for (_, fault), outcome in record.items() if fault)
    without = Counter(outcome.grade for (_, fault), outcome in record.items() if not fault)
    counts = [
        f"{grades[grade]} are {text}"
        for grade, text in (
            ("right", "found and named, without any other cause"),
            ("named", "found, and named by the first difference"),
            ("vague", "found but not named"),
            ("wrong cause", "found, but another cause is named"),
            ("false pass", "not found"),
            ("not possible", "not tried"),
        )
        if grades[grade]
    ]
    less = [
        f"{fault.what} ({script.name})"
        for script in CORPUS
        for fault in script.faults
        if (outcome := record.get((script.name, fault.name))) is not None and outcome.grade != "right"
    ]
    faults = f"Of {sum(grades.values())} planted faults, {'; '.join(counts)}. Not named right away: {', '.join(less)}."
    return f"{faults} Of {sum(without.values())} scripts without a fault, {without['right']} get the right verdict."


def _rows(record: Record) -> Iterable[str]:
    """One row for each kind of fault, with the verdict on its first script; then one for each script."""
    scripts: dict[str, dict[str, Outcome | None]] = {}
    for script in CORPUS:
        for fault in script.faults:
            scripts.setdefault(fault.what, {})[script.name] = record.get((script.name, fault.name))
    yield from ("| fault | scripts | verdict | message in the first of these scripts |", "|---|---|---|---|")
    for what, found in scripts.items():
        outcome = next(iter(found.values()))
        verdict, message = (outcome.verdict, _shown(outcome)) if outcome is not None else ("not measured", "")
        yield f"| {what} | {_first(found)} | {verdict} | {message} |"
    yield from ("", "| script | what it does | faults |", "|---|---|---|")
    for script in CORPUS:
        yield f"| {script.name} | {script.style} | {len(script.faults)} |"


def _first(names: Iterable[str]) -> str:
    first, *others = names
    return f"{first} and {len(others)} more" if others else first


def _shown(outcome: Outcome) -> str:
    """Return the sentence of a verdict, short and without the digits that another machine may compute otherwise."""
    exact, found, lost = outcome.message.partition("; not loaded")
    if found:
        return f"{exact.partition(':')[0]}{found}{lost}"
    said = _FRACTION.sub("…", outcome.message.removeprefix("resume is not exact: ")).replace("|", "\\|")
    return said if len(said) <= _MOST else f"{said[:_MOST].rpartition(' ')[0]} …".replace("`…", "…")
