"""What was found of the corpus when it was last measured, and the page of the documentation that shows it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping

from support.paths import ROOT
from support.resume_corpus import BY_NAME, CORPUS, SCRIPTS, Fault, Outcome, Script, graded

RECORD = SCRIPTS / "found.json"
PAGE = ROOT / "docs" / "explanation" / "what-is-found.md"
_MOST = 160  # characters of what was said
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
    """Return the page with the table, and the sentence above it, of what was found."""
    return _TABLE.sub(lambda _: "\n".join([_sentence(record), "", *_rows(record), ""]), page)


def _sentence(record: Record) -> str:
    grades = Counter(outcome.grade for (_, fault), outcome in record.items() if fault)
    without = Counter(outcome.grade for (_, fault), outcome in record.items() if not fault)
    counts = [
        f"{grades[grade]} {text}"
        for grade, text in (
            ("right", "are found and named, and nothing else is"),
            ("named", "are found, and the first difference names them"),
            ("vague", "are found, and not named"),
            ("wrong cause", "are found, and something else is named"),
            ("false pass", "are not found"),
            ("not possible", "could not be tried"),
        )
        if grades[grade]
    ]
    faults = f"Of {sum(grades.values())} faults, {'; '.join(counts)}."
    return f"{faults} Of {sum(without.values())} scripts without one, {without['right']} have the right verdict."


def _rows(record: Record) -> Iterable[str]:
    yield from ("| what is wrong | verdict | what is said |", "|---|---|---|")
    for script in CORPUS:
        for fault in (None, *script.faults):
            yield _row(script, fault, record.get((script.name, fault.name if fault is not None else "")))


def _row(script: Script, fault: Fault | None, outcome: Outcome | None) -> str:
    what = f"**{script.name}**: {script.style}" if fault is None else fault.what
    if outcome is None:
        return f"| {what} | not measured | |"
    is_short = outcome.verdict == "same" and (fault is None or fault.expects != "told")
    said = "" if is_short else _shown(outcome)
    return f"| {what} | {outcome.verdict} | {said} |"


def _shown(outcome: Outcome) -> str:
    """Return the sentence of a verdict, short and without the digits that another machine may compute otherwise."""
    said = _FRACTION.sub("…", outcome.message.removeprefix("resume is not exact: ")).replace("|", "\\|")
    return said if len(said) <= _MOST else f"{said[:_MOST].rpartition(' ')[0]} …".replace("`…", "…")
