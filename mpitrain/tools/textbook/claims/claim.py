"""A claim: a sentence of a textbook, the experiment that measures it, and the verdict by a threshold."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

HOLDS, ONLY_IF, FAILS = "holds", "holds only if", "does not hold here"

RELATIONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class Figures(NamedTuple):
    """The result of an experiment in one setting.

    value    the number that is compared with the threshold
    numbers  {label: number} that explain the value
    """

    value: float
    numbers: Mapping[str, float]


class ClaimSetting(NamedTuple):
    """The arguments of an experiment.

    label     text with fields in braces for the arguments, such as `{ranks} ranks`
    is_usual  whether the sentence is about this setting; the others show where it becomes wrong
    """

    label: str
    values: Mapping[str, Any]
    is_usual: bool = True


def usual(label: str, **values: Any) -> ClaimSetting:
    return ClaimSetting(label, values)


def other(label: str, **values: Any) -> ClaimSetting:
    return ClaimSetting(label, values, is_usual=False)


class Claim(NamedTuple):
    """A row of the table of claims. The sentence is true in one of its settings, and false in another.

    sentence    as a textbook states it
    source      publication that has the sentence
    measure     what the value means
    bound       (key of RELATIONS, threshold); the sentence is true if `value relation threshold`
    experiment  (arguments of a setting) -> Figures
    command     shell command that shows the same, or two, a line each, whose results are compared
    compiled    whether the experiment needs a compiler, as the simulator does
    """

    sentence: str
    source: str
    measure: str
    bound: tuple[str, float]
    experiment: Callable[..., Figures]
    settings: tuple[ClaimSetting, ...]
    command: str
    compiled: bool = False


class SettingResult(NamedTuple):
    setting: ClaimSetting
    figures: Figures
    is_true: bool


class Judged(NamedTuple):
    """A measured claim, with its verdict: HOLDS, ONLY_IF or FAILS."""

    name: str
    claim: Claim
    findings: tuple[SettingResult, ...]
    verdict: str

    @property
    def conditions(self) -> list[ClaimSetting]:
        return [
            result.setting for result in self.findings if result.setting.is_usual and result.is_true
        ]


def judge(name: str, claim: Claim, settings: Sequence[ClaimSetting] | None = None) -> Judged:
    """Measure a claim in all settings. The usual ones decide the verdict.

    settings  to measure instead of the claim's own; None: the claim's own
    """
    findings = tuple(
        SettingResult(setting, figures, is_true(claim, figures.value))
        for setting in (claim.settings if settings is None else settings)
        for figures in [claim.experiment(**setting.values)]
    )
    return Judged(name, claim, findings, verdict(findings))


def is_true(claim: Claim, value: float) -> bool:
    """Return whether the claim is true for this value; for NaN it never is."""
    relation, threshold = claim.bound
    return not math.isnan(value) and RELATIONS[relation](value, threshold)


def verdict(findings: Sequence[SettingResult]) -> str:
    """Return HOLDS, ONLY_IF or FAILS: the claim is true in all, some, or none of the usual
    settings.
    """
    truths = [result.is_true for result in findings if result.setting.is_usual]
    if all(truths):
        return HOLDS
    return ONLY_IF if any(truths) else FAILS
