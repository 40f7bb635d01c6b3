"""The output of `certify`: lines for people, JSON for programs, JUnit for ReFrame and CI."""

from collections.abc import Sequence
from statistics import median
from typing import Any
from xml.etree import ElementTree

from mpitrain.errors import visible
from mpitrain.tools.bench.pairs import Pair, usual
from mpitrain.tools.certify.verdict import RATES, Certificate, Evidence, Speeds, best, usual_rates
from mpitrain.tools.text_table import figure


def lines(evidence: Evidence, certificate: Certificate) -> list[str]:
    failed, others = failures(certificate), []
    sound = [verdict.node for verdict in certificate.nodes if not verdict.reasons]
    for node in sound:
        text = "not judged" if certificate.awaits else f"PASS  {_speeds(evidence, node)}"
        others.append(f"{visible(node):<{_width(certificate)}}  {text}")
    others += measured(evidence)
    if evidence.pairs and evidence.crowded:
        others.append(
            "ranks share cores, so a link is slow only below a quarter of the usual bandwidth"
        )
    if certificate.awaits:
        others.append(f"stopped before the end of: {certificate.awaits}")
    return [
        *failed,
        *others,
        f"{0 if certificate.awaits else len(sound)} of {len(certificate.nodes)} node(s) pass, "
        f"{len(certificate.others)} other failure(s); {evidence.collectives} collectives checked",
    ]


def failures(certificate: Certificate) -> list[str]:
    pairs = [(verdict.node, why) for verdict in certificate.nodes for why in verdict.reasons]
    pairs += [("", why) for why in certificate.others]
    return [f"{visible(node):<{_width(certificate)}}  FAIL  {visible(why)}" for node, why in pairs]


def measured(evidence: Evidence) -> list[str]:
    """Return a line for each kind of measurement: the worst value, whose it is, and the usual one."""
    rows = []
    if evidence.speeds:
        for name, (what, unit, units) in RATES.items():
            rates = [best(own, name) for own in evidence.speeds]
            rank = rates.index(min(rates))
            whose = f"rank {rank} on {visible(evidence.facts[rank].host)}"
            rows.append(
                f"{what}: least {figure(rates[rank] / unit)} {units} ({whose}), "
                f"usual {figure(median(rates) / unit)}"
            )
    if pairs := evidence.pairs:
        slowest = min(pairs, key=lambda pair: pair.best_GBs)
        latest = max(pairs, key=lambda pair: pair.fastest_us)
        fast, soon = usual(pairs)
        rows += [
            f"links: least {figure(slowest.best_GBs)} GB/s ({_ends(slowest)}), usual {figure(fast)}",
            f"links: most {figure(latest.fastest_us)} us ({_ends(latest)}), usual {figure(soon)}",
        ]
        sent, resent = sum(p.sent for p in pairs), sum(p.resent for p in pairs)
        rows.append(
            f"links: {resent:,} of {sent:,} segments were sent again"
            if sent
            else "links: lost frames not asked, as no counter of TCP or InfiniBand saw the messages"
        )
    return rows


def _ends(pair: Pair) -> str:
    return visible(f"{pair.first_host} and {pair.second_host}")


def _width(certificate: Certificate) -> int:
    return max((len(verdict.node) for verdict in certificate.nodes), default=0)


def _speeds(evidence: Evidence, node: str) -> str:
    ranks = [rank for rank, fact in enumerate(evidence.facts) if fact.host == node]
    rates = [
        f"{what} {figure(min(best(evidence.speeds[rank], name) for rank in ranks) / unit)} {units}"
        for name, (what, unit, units) in RATES.items()
    ]
    return f"{len(ranks)} rank(s), at least: {', '.join(rates)}"


def document(
    evidence: Evidence, certificate: Certificate, header: dict[str, Any]
) -> dict[str, Any]:
    speeds = evidence.speeds or [Speeds([], [])] * len(evidence.facts)
    steps: Sequence[tuple[str, ...]] = evidence.steps or [()] * len(evidence.facts)
    rates = {name: max(usual_rates(evidence.facts, speeds, name), default=0.0) for name in RATES}
    fast, soon = usual(evidence.pairs) if evidence.pairs else (0.0, 0.0)
    return {
        "header": header,
        "passes": certificate.passes,
        "awaits": certificate.awaits,
        "nodes": [
            {
                "node": verdict.node,
                # null: not judged yet
                "passes": None
                if certificate.awaits and not verdict.reasons
                else not verdict.reasons,
                "reasons": verdict.reasons,
            }
            for verdict in certificate.nodes
        ],
        "others": certificate.others,
        "usual": {
            "gemm_GFLOPs": rates["gemm"] / 1e9,
            "memory_GBs": rates["memory"] / 1e9,
            "link_GBs": fast,
            "link_us": soon,
        },
        "ranks": [
            {"node": fact.host, **fact._asdict(), **own._asdict(), "steps": list(step)}
            for fact, own, step in zip(evidence.facts, speeds, steps, strict=True)
        ],
        "pairs": [pair._asdict() for pair in evidence.pairs],
        "collectives": evidence.collectives,
        "jobs": evidence.jobs._asdict(),
    }


def junit(certificate: Certificate) -> str:
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
        elif certificate.awaits:
            ElementTree.SubElement(case, "skipped", message=f"before: {certificate.awaits}")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(
        suite, encoding="unicode"
    )
