"""All checks of all subjects, in one report."""

import time
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from fedjax_dp.audit.conformance import attack, masks
from fedjax_dp.audit.conformance.accounting import check_accounting
from fedjax_dp.audit.conformance.adaptive import check_adaptive, check_later_noise
from fedjax_dp.audit.conformance.contribution import check_contribution
from fedjax_dp.audit.conformance.findings import CHECKS, Draws, Finding
from fedjax_dp.audit.conformance.noise import check_noise
from fedjax_dp.audit.conformance.report import Report
from fedjax_dp.audit.conformance.sampling import check_sampling
from fedjax_dp.audit.conformance.subjects import (
    SUBJECTS,
    Accounting,
    AdaptiveAggregation,
    Masking,
    MaskSource,
    NotStarted,
    Run,
    Sampling,
    Subject,
    said,
    view_of,
)
from fedjax_dp.core import checks as rules
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, Positive, ProperFraction, Seed

# `(draws, significance) -> findings` of one group of checks of one subject.
_Check = Callable[[Draws, float], Iterator[Finding]]


@checked
def check(
    *subjects: Subject,
    checks: Sequence[str] = CHECKS,
    confidence: ProperFraction = 0.99,
    draws: Count = 256,
    budget: Positive = 600.0,
    seed: Seed = 0,
) -> Report:
    """Checks whether subjects do what they claim.

    Guarantee: if all subjects do, a report has a failure with probability at most `1 − confidence`,
    over the seeds. Checks without chance, such as of floats under one seed, do not err.

    Args:
      *subjects: at least one, each with a name of its own.
      checks: groups of checks: "contribution", "noise", "sampling", "accounting", "attack" and
        "masks"; those that concern a subject are tried.
      confidence: of the whole report, in (0, 1).
      draws: seeds of a test of noise, at least 64; attacks use eight times as many.
      budget: seconds after which no check is begun, above 0. A call that does not return is not
        ended; those of `Served` have a time limit.
      seed: of all inputs, and of the seeds that subjects are given.

    Returns:
      The report.

    Raises:
      ValueError: if an argument is not valid.
    """
    require_subjects(subjects)
    rules.whole("draws", draws, at_least=64)
    rules.require(len(checks) > 0, "checks", f"name some of {', '.join(CHECKS)}", checks)
    for group in checks:
        rules.one_of("checks", group, CHECKS)
    planned = [
        (subject.name, group, run)
        for subject in subjects
        for group, run in _checks_of(subject)
        if group in checks
    ]
    rule = "concern a subject: " + ", ".join(f"{type(s).__name__} {s.name!r}" for s in subjects)
    rules.require(len(planned) > 0, "checks", rule, checks)
    start, findings = time.monotonic(), []
    significance = (1 - confidence) / len(planned)
    for name, group, run in planned:
        if time.monotonic() - start > budget:
            sentence = f"not begun within {budget:g} s"
            findings.append(Finding(name, group, "open", sentence))
            continue
        # Inputs of one check do not depend on which others are tried.
        purpose = zlib.crc32(f"{group} of {name}".encode())
        with np.errstate(all="ignore"), warnings.catch_warnings():
            # Of subjects, on inputs that are meant to break them.
            warnings.simplefilter("ignore")
            try:
                # One after another: an error loses none of those before.
                for finding in run(Draws(seed, purpose, draws), significance):
                    findings.append(finding)
            except NotStarted:
                raise
            except Exception as error:
                sentence = f"the check itself raises {said(error)}, which decides nothing"
                findings.append(Finding(name, group, "open", sentence))
    return Report(tuple(findings), confidence, time.monotonic() - start)


def require_subjects(subjects: Collection[Subject]) -> None:
    """Requires subjects with different names."""
    rules.require(len(subjects) > 0, "subjects", "be at least one", subjects)
    for subject in subjects:
        kinds = ", ".join(kind.__name__ for kind in SUBJECTS)
        rules.require(isinstance(subject, SUBJECTS), "subjects", f"be of {kinds}", subject)
    names = [subject.name for subject in subjects]
    rules.require(len(set(names)) == len(names), "subjects", "have different names", names)


def _checks_of(subject: Subject) -> list[tuple[str, _Check]]:
    """The groups of checks that concern a subject."""
    match subject:
        case Run():
            return [
                ("noise", partial(attack.check_rounds, subject)),
                ("attack", partial(attack.check_attack, subject)),
            ]
        case Sampling():
            return [("sampling", partial(check_sampling, subject))]
        case Accounting():
            return [("accounting", lambda draws, significance: check_accounting(subject))]
        case Masking():
            return [("masks", partial(masks.check_masks, subject))]
        case MaskSource():
            return [("masks", partial(masks.check_source, subject))]
    view = view_of(subject)
    groups: list[tuple[str, _Check]] = [
        ("contribution", partial(check_contribution, subject.name, view)),
        ("noise", partial(check_noise, subject.name, view)),
        ("attack", partial(attack.check_attack, attack.run_of(subject.name, view))),
    ]
    if isinstance(subject, AdaptiveAggregation):
        groups.append(("contribution", partial(check_adaptive, subject)))
        groups.append(("noise", partial(check_later_noise, subject)))
    return groups


def assert_conforms(*subjects: Subject, **options: Any) -> None:
    """Checks subjects, for a test.

    Args:
      *subjects: as in `check`.
      **options: as in `check`.

    Raises:
      AssertionError: if a check failed; its text says which, with an input that shows it.
    """
    report = check(*subjects, **options)
    if report.is_failed:
        raise AssertionError(report.to_text())
