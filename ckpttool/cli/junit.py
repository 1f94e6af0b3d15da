"""The report of the runs of a command as JUnit XML, which CI systems show: a test case for each comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.text import safe

if TYPE_CHECKING:
    from ckpttool.resume.results import Compared, RunReport

_KINDS = {
    "differs": "failure",
    "failed": "error",
    "unproven": "failure",
    "nondeterministic": "skipped",
    "planned": "skipped",
}


def junit_xml(report: RunReport) -> str:
    """Return the report as a document of one test suite. What is not judged is skipped; what was not reached because a
    run failed is an error."""
    from xml.etree.ElementTree import Element, SubElement, indent, tostring

    cases = [case for case in report.compared if case.count]
    kind = _KINDS.get(report.verdict)
    outcomes = [kind, *("failure" if case.equal is False else "skipped" for case in cases if case.equal is not True)]
    outcomes += [None if control.noticed else "skipped" for control in report.controls]
    counts = {"tests": len(cases) + len(report.controls) + 1, "failures": outcomes.count("failure")}
    counts |= {"errors": outcomes.count("error"), "skipped": outcomes.count("skipped")}
    suites = Element("testsuites")
    suite = SubElement(suites, "testsuite", name="ckpttool verify-resume run", time=f"{report.seconds:.3f}")
    for name, count in counts.items():
        suite.set(name, str(count))
    whole = SubElement(suite, "testcase", name="resume", classname="verify-resume", time=f"{report.seconds:.3f}")
    if kind is not None:
        verdict = SubElement(whole, kind, message=safe(report.message))
        lines = [finding.message for finding in report.findings]
        lines += report.failure.output if report.failure is not None else []
        verdict.text = "\n".join(safe(line) for line in lines)
    for case in cases:
        element = SubElement(suite, "testcase", name=case.what, classname=f"verify-resume.{case.run}", time="0")
        if case.equal is not True:
            SubElement(element, "failure" if case.equal is False else "skipped", message=_message(case))
    for control in report.controls:
        element = SubElement(suite, "testcase", name=control.name, classname="verify-resume.control", time="0")
        if not control.noticed:
            SubElement(element, "skipped", message=safe(control.message))
    indent(suites)
    return tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _message(case: Compared) -> str:
    differing = f"{case.differing:,} of {case.count:,} differ between {case.run} and {case.against}"
    return safe("; ".join(filter(None, (differing, case.message))))
