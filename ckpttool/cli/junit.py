"""The report of a trial or of the runs of a command as JUnit XML, which CI systems show.

A test case fails for each cause, with its differences in it, and one for what is not proven; those of comparisons and
checks pass, or are skipped with the reason why they were not judged, as are controls that were not noticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckpttool.resume.compare import NOT_DETERMINED
from ckpttool.text import safe

if TYPE_CHECKING:
    from ckpttool.resume.results import RunReport, TrialReport

Case = tuple[str, str, str | None, str, list[str]]
"""The class and the name of a test case, what is in it (`failure`, `error`, `skipped`), and its message and lines."""
_KINDS = {"failed": "error", "nondeterministic": "failure", "planned": "skipped"}
_NAME = 120  # characters of a name


def junit_xml(report: RunReport | TrialReport) -> str:
    """Return the report as a document of one test suite."""
    from xml.etree.ElementTree import Element, SubElement, indent, tostring

    cases = [*_verdict(report), *_comparisons(report)]
    outcomes = [kind for _, _, kind, _, _ in cases]
    counts = {"tests": len(cases), "failures": outcomes.count("failure")}
    counts |= {"errors": outcomes.count("error"), "skipped": outcomes.count("skipped")}
    suites, word = Element("testsuites"), "run" if report.command == "resume-run" else report.command
    suite = SubElement(suites, "testsuite", name=f"ckpttool verify-resume {word}", time=f"{report.seconds:.3f}")
    for name, count in counts.items():
        suite.set(name, str(count))
    for number, (group, name, kind, message, lines) in enumerate(cases):
        time = f"{report.seconds:.3f}" if number == 0 else "0"
        case = SubElement(suite, "testcase", name=safe(name), classname=group, time=time)
        if kind is not None:
            SubElement(case, kind, message=safe(message)).text = "\n".join(map(safe, lines))
        elif message:
            SubElement(case, "system-out").text = safe(message)
    indent(suites)
    return tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _verdict(report: RunReport | TrialReport) -> Iterator[Case]:
    group, lines = "verify-resume", [finding.message for finding in report.findings]
    unproven, unjudged = getattr(report, "unproven", []), getattr(report, "unjudged", [])
    if report.verdict == "differs":
        for number, cause in enumerate(report.causes or [report.message]):
            # What differs is listed once: no difference says which of several causes it comes of.
            more = lines if number == 0 else ["the differences are listed in the first failure"]
            name = cause.partition(": ")[0][:_NAME]
            yield group, "resume" if name == NOT_DETERMINED else name, "failure", cause, more
    elif report.verdict != "unproven":
        lines += getattr(report.failure, "output", [])
        yield group, "resume", _KINDS.get(report.verdict), report.message, lines
    if unproven or report.verdict == "unproven":
        yield group, "unproven", "failure", report.message, unproven
    if unjudged:
        reasons = [f"{name}: {getattr(report, 'reasons', {}).get(name, '')}" for name in unjudged]
        yield group, "not judged", "skipped", "; ".join(reasons), reasons


def _comparisons(report: RunReport | TrialReport) -> Iterator[Case]:
    for row in report.compared:
        differing = f"{row.differing:,} of {row.count:,} differ between {row.run} and {row.against}"
        message = "; ".join(filter(None, (differing, row.message)))
        # One that differs is in the failure of its cause.
        if row.count and row.equal is not False:
            kind = None if row.equal else "skipped"
            yield f"verify-resume.{row.run}", row.what, kind, message if kind else "", []
    for check in getattr(report, "checks", []):
        if check.passed is not False:
            kind = None if check.passed else "skipped"
            yield f"verify-resume.{check.run}", check.what, kind, check.message, []
    for control in getattr(report, "controls", []):
        yield "verify-resume.control", control.name, None if control.noticed else "skipped", control.message, []
