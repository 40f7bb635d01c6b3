"""Measured claims as one page of HTML that needs no other file."""

import html
from collections.abc import Iterator, Sequence

from mpitrain.tools.textbook.claims.claim import FAILS, HOLDS, ONLY_IF, Judged, SettingResult
from mpitrain.tools.textbook.claims.text import headline, label, number, numbers, rule, summary
from mpitrain.tools.textbook.words import text

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
    """Return the page: a summary, then a section for each claim."""
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
    yield f"<p>{html.escape(text('published in', language))}: {html.escape(claim.source)}</p>"
    yield f"<p><code>{html.escape(claim.command)}</code></p>"


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
