"""The output of a certificate: lines for people, JSON for programs, JUnit for ReFrame and CI."""

from typing import Any
from xml.etree import ElementTree

from mpitrain.bench.collectives.columns import figure
from mpitrain.certify.evidence import Evidence
from mpitrain.certify.verdict import RATES, Certificate, best, usual_rates
from mpitrain.errors import visible


def lines(evidence: Evidence, certificate: Certificate) -> list[str]:
    """Return a line for each node, one for each other failure, and the result."""
    width = max((len(verdict.node) for verdict in certificate.nodes), default=0)
    found = [
        f"{visible(verdict.node):<{width}}  "
        + (
            "FAIL  " + visible("; ".join(verdict.reasons))
            if verdict.reasons
            else f"PASS  {_speeds(evidence, verdict.node)}"
        )
        for verdict in certificate.nodes
    ]
    found += [f"{'':<{width}}  FAIL  {visible(reason)}" for reason in certificate.others]
    bad = sum(bool(verdict.reasons) for verdict in certificate.nodes)
    return [
        *found,
        f"{len(certificate.nodes) - bad} of {len(certificate.nodes)} node(s) pass, "
        f"{len(certificate.others)} other failure(s); {evidence.collectives} collectives checked",
    ]


def _speeds(evidence: Evidence, node: str) -> str:
    """Return the number of ranks on a node, and the lowest of their rates for each of RATES."""
    ranks = [rank for rank, fact in enumerate(evidence.facts) if fact.node == node]
    rates = [
        f"{what} {figure(min(best(evidence.speeds[rank], name) for rank in ranks) / unit)} {units}"
        for name, (what, unit, units) in RATES.items()
    ]
    return f"{len(ranks)} rank(s), at least: {', '.join(rates)}"


def document(
    evidence: Evidence, certificate: Certificate, header: dict[str, Any]
) -> dict[str, Any]:
    """Return the JSON document: verdicts, usual values and all measurements."""
    usual = {
        name: max(usual_rates(evidence.facts, evidence.speeds, name), default=0.0) for name in RATES
    }
    return {
        "header": header,
        "passes": certificate.passes,
        "nodes": [
            {"node": verdict.node, "passes": not verdict.reasons, "reasons": verdict.reasons}
            for verdict in certificate.nodes
        ],
        "others": certificate.others,
        "usual": {"gemm_GFLOPs": usual["gemm"] / 1e9, "memory_GBs": usual["memory"] / 1e9},
        "ranks": [
            {**fact._asdict(), **speeds._asdict(), "steps": list(step)}
            for fact, speeds, step in zip(
                evidence.facts, evidence.speeds, evidence.steps, strict=True
            )
        ],
        "pairs": [pair._asdict() for pair in evidence.pairs],
        "collectives": evidence.collectives,
        "jobs": evidence.jobs._asdict(),
    }


def junit(certificate: Certificate) -> str:
    """Return a JUnit file: a test case for each node, and one for each other failure."""
    cases = [(verdict.node, verdict.reasons) for verdict in certificate.nodes]
    cases += [("job", [reason]) for reason in certificate.others]
    failures = sum(bool(reasons) for _, reasons in cases)
    suite = ElementTree.Element(
        "testsuite", name="mpitrain certify", tests=str(len(cases)), failures=str(failures)
    )
    for name, reasons in cases:
        case = ElementTree.SubElement(
            suite, "testcase", classname="mpitrain.certify", name=visible(name)
        )
        if reasons:
            text = visible("; ".join(reasons))
            ElementTree.SubElement(case, "failure", message=text).text = text
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(
        suite, encoding="unicode"
    )
