"""Each claim is true in one setting and false in another; its verdict follows from the numbers."""

import json
import shlex
from html.parser import HTMLParser

import click
import pytest
from click.testing import CliRunner

from mpitrain.cli import commands
from mpitrain.machine.compiling import has_compiler
from mpitrain.tools.textbook.claims.claim import (
    FAILS,
    HOLDS,
    ONLY_IF,
    Figures,
    is_true,
    judge,
    verdict,
)
from mpitrain.tools.textbook.claims.report import lines, page, record, rule
from mpitrain.tools.textbook.claims.table import CLAIMS
from mpitrain.tools.words import LANGUAGES, korean, width

pytestmark = pytest.mark.slow

CONDITIONAL = {
    "ring-or-server",
    "async-memory",
    "zero-bytes",
    "sequence-bytes",
    "recomputation-third",
    "mixed-precision-memory",
    "same-training",
    "large-batch",
    "loss-scaling",
    "slow-stage",
    "server-memory",
    "equal-updates",
}
FALSE = {"more-micro-batches", "fewer-stages"}
LONG = {
    "async-gains",
    "bounded-staleness",
    "equal-updates",
    "experts-balance",
    "experts-capacity",
    "large-batch",
    "prefetch",
    "slow-stage",
    "zero-bytes",
    "zero-3-bytes",
}
"""These take seconds: jobs/prove/claims.sh measures them, and all others again under load."""


@pytest.fixture(scope="module")
def judged():
    claims = {name: CLAIMS[name] for name in CLAIMS if name not in LONG}
    return {
        n: judge(n, claim) for n, claim in claims.items() if not claim.compiled or has_compiler()
    }


def expected(name):
    return ONLY_IF if name in CONDITIONAL else FAILS if name in FALSE else HOLDS


def test_each_claim_has_the_verdict_of_its_measured_numbers(judged):
    assert {name: each.verdict for name, each in judged.items()} == {
        name: expected(name) for name in judged
    }


def test_a_flipped_setting_flips_the_verdict(judged):
    for name, each in judged.items():
        assert {one.is_true for one in each.findings} == {True, False}, name
        found = {
            truth: verdict(
                [
                    one._replace(setting=one.setting._replace(is_usual=True))
                    for one in each.findings
                    if one.is_true is truth
                ]
            )
            for truth in (True, False)
        }
        assert found == {True: HOLDS, False: FAILS}, name


def test_the_verdict_is_measured_anew_in_another_setting():
    claim = CLAIMS["more-micro-batches"]
    usual, other = claim.settings
    assert judge("", claim, [usual]).verdict == FAILS
    assert judge("", claim, [other._replace(is_usual=True)]).verdict == HOLDS
    assert judge("", claim, [usual, other._replace(is_usual=True)]).verdict == ONLY_IF


def test_a_value_that_is_not_a_number_never_makes_a_claim_true():
    assert not any(is_true(claim, float("nan")) for claim in CLAIMS.values())


def test_a_damaged_experiment_changes_the_verdict():
    claim = CLAIMS["ring-or-server"]
    doubled = claim._replace(
        experiment=lambda **values: Figures(4 * claim.experiment(**values).value, {})
    )
    assert judge("", claim).verdict == ONLY_IF
    assert judge("", doubled).verdict == FAILS


def test_figures_of_claims_equal_the_published_ones(judged):
    def value(name, index):
        return judged[name].findings[index].figures.value

    assert value("ring-or-server", 2) == 0.25  # 2 (n - 1) / n over n - 1, at 8 ranks
    assert value("tensor-all-reduces", 0) == 4
    assert value("zero-bubble", 0) == pytest.approx(1 / 3)
    idle = judged["more-micro-batches"].findings[0].figures.numbers
    assert [*idle.values()] == pytest.approx([100 * 3 / 5, 100 * 3 / 67])


def test_every_text_of_a_claim_has_a_korean_one(judged):
    texts = {each for claim in CLAIMS.values() for each in (claim.sentence, claim.measure)}
    texts |= {setting.label for claim in CLAIMS.values() for setting in claim.settings}
    texts |= {
        label for each in judged.values() for one in each.findings for label in one.figures.numbers
    }
    assert not sorted(texts - set(korean()))


@pytest.mark.parametrize("language", LANGUAGES)
def test_columns_of_a_claim_align_in_both_languages(judged, language):
    for each in judged.values():
        rows = [line for line in lines(each, language) if line.startswith("    ")]
        truth = {korean()["true"], korean()["false"]} if language == "ko" else {"true", "false"}
        starts = {
            width(row[: row.index(f"  {word} ")])
            for row in rows
            for word in truth
            if f"  {word} " in row
        }
        assert len(starts) == 1


class Tags(HTMLParser):
    """The tags that are open, and every text."""

    def __init__(self):
        super().__init__()
        self.open, self.texts, self.links = [], [], []

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "!doctype"):
            self.open.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_page_has_every_claim_and_needs_no_other_file(judged, language):
    parser = Tags()
    parser.feed(page([*judged.values()], language))
    assert not parser.open and not parser.links
    said = "\n".join(parser.texts)
    assert all(rule(each.claim, language) in said for each in judged.values())


def test_each_command_of_a_claim_has_valid_options():
    for line in (line for claim in CLAIMS.values() for line in claim.command.splitlines()):
        words = shlex.split(line)
        assert words[0] == "mpitrain"
        words = words[words.index("--") + 1 :] if "--" in words else words[1:]
        group, context = commands, click.Context(commands)
        while isinstance(group, click.Group):
            _, group, words = group.resolve_command(context, words)
        for word in words:
            if word.startswith("--"):
                assert any(word in option.opts for option in group.params), line
        for key in (word.split("=")[0] for word in words if "." in word and "=" in word):
            from mpitrain.config import keys

            assert key in {each.name for each in keys()}


def test_the_two_commands_of_the_unlucky_rank_give_its_number(judged):
    def flops(line):
        said = CliRunner().invoke(commands, shlex.split(line)[1:]).output
        (total,) = (row for row in said.splitlines() if row.startswith("activations of a step"))
        return float(total.split()[-1])

    mean, busiest = map(flops, CLAIMS["experts-unlucky"].command.splitlines())
    value = judged["experts-unlucky"].findings[0].figures.value
    assert busiest / mean == pytest.approx(value, rel=0.03)


def test_a_claim_that_cannot_be_measured_does_not_keep_the_others_from_their_files(
    tmp_path, no_compiler, monkeypatch
):
    def fails(**values):
        raise OSError("no room")

    (needy,) = (name for name, claim in CLAIMS.items() if claim.compiled)
    broken = {**CLAIMS, "ring-bytes": CLAIMS["ring-bytes"]._replace(experiment=fails)}
    monkeypatch.setattr("mpitrain.tools.textbook.claims.table.CLAIMS", broken)
    words = ["claims", needy, "ring-bytes", "gpipe-bubble", "--json", str(tmp_path / "a.json")]
    found = CliRunner().invoke(commands, [*words, "--language", "en"], standalone_mode=False)
    assert found.return_value == 1, found.output
    for line in ("not measured: ring-bytes: OSError: no room", f"without g++ or zig: {needy}"):
        assert line in found.output
    written = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert [each["name"] for each in written] == ["gpipe-bubble"]


def test_the_command_writes_the_claims_it_prints(tmp_path):
    files = ["--html", str(tmp_path / "page.html"), "--json", str(tmp_path / "claims.json")]
    found = CliRunner().invoke(commands, ["claims", "gpipe-bubble", "fewer-stages", *files])
    assert found.exit_code == 0
    written = json.loads((tmp_path / "claims.json").read_text(encoding="utf-8"))
    assert [each["verdict"] for each in written] == [HOLDS, FAILS]
    assert all(each["sentence"] in found.output for each in written)
    assert "gpipe-bubble" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert written[0] == record(judge("gpipe-bubble", CLAIMS["gpipe-bubble"]), "en")


def test_an_unknown_claim_is_refused():
    found = CliRunner().invoke(commands, ["claims", "nothing"])
    assert found.exception.exit_code == 2
