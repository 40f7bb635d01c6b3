"""Measured claims as lines of text, as objects for JSON, and as an HTML page."""

import html
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from mpitrain.tools.textbook.claims.claim import (
    FAILS,
    HOLDS,
    ONLY_IF,
    Claim,
    ClaimSetting,
    Judged,
    SettingResult,
)
from mpitrain.tools.words import padded, said, text, width


def number(value: float) -> str:
    """Return whole numbers with commas between thousands, others with four digits."""
    return f"{value:,.0f}" if value == round(value) else f"{value:,.4g}"


def label(setting: ClaimSetting, language: str) -> str:
    return text(setting.label, language, **setting.values)


def rule(claim: Claim, language: str) -> str:
    return text(
        "{measure}; true if {relation} {threshold}",
        language,
        measure=text(claim.measure, language),
        relation=claim.bound[0],
        threshold=f"{claim.bound[1]:g}",
    )


def numbers(finding: SettingResult, language: str) -> str:
    return "; ".join(
        f"{text(name, language)} {number(value)}" for name, value in finding.figures.numbers.items()
    )


def headline(judged: Judged, language: str) -> str:
    """Return the verdict; of a claim that is true in some settings only, also these settings."""
    words = text(judged.verdict, language)
    if judged.verdict != ONLY_IF:
        return words
    return f"{words}: {'; '.join(label(setting, language) for setting in judged.conditions)}"


def lines(judged: Judged, language: str) -> Iterator[str]:
    claim = judged.claim
    yield f"{judged.name}: {text(claim.sentence, language)}"
    yield f"  {headline(judged, language)}"
    yield f"  {rule(claim, language)}"
    names = [label(result.setting, language) for result in judged.findings]
    columns = max(map(width, names))
    for is_usual in (True, False):
        rows = [
            (name, result)
            for name, result in zip(names, judged.findings, strict=True)
            if result.setting.is_usual == is_usual
        ]
        if rows and not is_usual:
            yield f"  {text('elsewhere', language)}"
        for name, result in rows:
            truth = padded(text("true" if result.is_true else "false", language), 5)
            yield (
                f"    {padded(name, columns)}  {number(result.figures.value):>10}  {truth}  "
                f"{numbers(result, language)}"
            )
    yield f"  {text('published in', language)}: {said(claim.source, language)}"
    yield from (f"  $ {line}" for line in claim.command.splitlines())


def summary(judged: Sequence[Judged], language: str) -> str:
    counts = Counter(claim.verdict for claim in judged)
    return text(
        "holds: {holds}, holds only if: {only}, does not hold here: {fails}",
        language,
        holds=counts[HOLDS],
        only=counts[ONLY_IF],
        fails=counts[FAILS],
    )


def record(judged: Judged, language: str) -> dict[str, Any]:
    claim = judged.claim
    return {
        "name": judged.name,
        "sentence": text(claim.sentence, language),
        "verdict": judged.verdict,
        "measure": text(claim.measure, language),
        "relation": claim.bound[0],
        "threshold": claim.bound[1],
        "settings": [
            {
                "setting": label(result.setting, language),
                "values": dict(result.setting.values),
                "usual": result.setting.is_usual,
                "value": result.figures.value,
                "true": result.is_true,
                "numbers": {
                    text(name, language): value for name, value in result.figures.numbers.items()
                },
            }
            for result in judged.findings
        ],
        "source": claim.source,
        "command": claim.command,
    }


STYLE = (
    "body { font: 16px/1.45 sans-serif; max-width: 1080px; margin: 1.5em auto; padding: 0 1em } "
    "h2 { font-size: 1.1em; margin: 1.6em 0 0.3em } table { border-collapse: collapse; margin: 0.4em 0 } "
    "td { padding: 0.15em 1.2em 0.15em 0; vertical-align: top } td.n { text-align: right } "
    ".holds { color: #17663a } .only { color: #8a5a00 } .fails { color: #9c1c1c } "
    ".other { color: #555 } p { margin: 0.2em 0 } .verdict { font-weight: bold } "
    "code { background: #f1f1f1; padding: 0.1em 0.3em }"
)
CLASSES = {HOLDS: "holds", ONLY_IF: "only", FAILS: "fails"}


def page(judged: Sequence[Judged], language: str) -> str:
    title = html.escape(text("Claims of textbooks, measured", language))
    return "\n".join(
        [
            f'<!doctype html>\n<html lang="{language}"><head><meta charset="utf-8"><title>{title}</title>'
            f"<style>{STYLE}</style></head><body>\n<h1>{title}</h1>",
            f"<p>{html.escape(summary(judged, language))}</p>",
            *(line for claim in judged for line in _section(claim, language)),
            "</body></html>\n",
        ]
    )


def _section(judged: Judged, language: str) -> Iterator[str]:
    claim = judged.claim
    yield f'<h2 id="{judged.name}">{html.escape(text(claim.sentence, language))}</h2>'
    yield (
        f'<p class="verdict {CLASSES[judged.verdict]}">{html.escape(headline(judged, language))}</p>'
    )
    yield f"<p>{html.escape(rule(claim, language))}</p>"
    yield "<table>"
    ordered = sorted(judged.findings, key=lambda result: not result.setting.is_usual)
    yield from (_row(result, language) for result in ordered)
    yield "</table>"
    yield f"<p>{html.escape(text('published in', language))}: {html.escape(said(claim.source, language))}</p>"
    yield from (f"<p><code>{html.escape(line)}</code></p>" for line in claim.command.splitlines())


def _row(finding: SettingResult, language: str) -> str:
    truth = text("true" if finding.is_true else "false", language)
    name = html.escape(label(finding.setting, language))
    start = "<tr>"
    if not finding.setting.is_usual:
        start = '<tr class="other">'
        name = f"{html.escape(text('elsewhere', language))}: {name}"
    return (
        f"{start}<td>{name}</td>"
        f'<td class="n">{number(finding.figures.value)}</td><td>{truth}</td>'
        f"<td>{html.escape(numbers(finding, language))}</td></tr>"
    )
