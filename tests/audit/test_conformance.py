"""The conformance kit: correct subjects pass, planted defects are found, each by its check."""

import dataclasses
import itertools
import math
import pathlib
import sys
import time
from functools import partial
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import planted
import pytest
from dp_accounting import NoOpDpEvent
from marks import later, slow, telling
from planted import CLAIM, SIZE, aggregation
from scipy import stats

from fedjax_dp import clients, data, server
from fedjax_dp.audit import conformance
from fedjax_dp.audit.conformance import (
    Accounting,
    Aggregation,
    Finding,
    FixedSize,
    Masked,
    Poisson,
    Release,
    Report,
    Served,
    Training,
    aggregation_of,
    assert_conforms,
    check,
    contribution,
    mask_source_of,
    masking_of,
    sampling,
    sampling_of,
    serve,
    step_of,
)
from fedjax_dp.audit.conformance.accounting import epsilon_bounds
from fedjax_dp.privacy import make_adaptive_clipping
from fedjax_dp.privacy.reports.auditing import gaussian_epsilon
from fedjax_dp.server import secure

DEFECTS = list(planted.planted())
# One for each group of checks, which the quick suite tries.
QUICK = {
    "NaN poisons": "contribution",
    "half the noise": "noise",
    "shuffled as fixed": "sampling",
    "replaced as removed": "accounting",
    "masks of 28 bits": "masks",
}


def failed(report):
    return [finding.check for finding in report.findings if finding.verdict == "failed"]


def test_a_correct_subject_passes():
    report = check(aggregation(), checks=["contribution", "noise"], draws=64)
    assert {f.verdict for f in report.findings} == {"passed"} and not report.is_failed


@telling
def test_an_attack_without_power_is_open():
    report = check(aggregation(), draws=64)
    assert not failed(report) and not report.is_failed
    assert {f.verdict for f in report.findings} == {"passed", "open"}
    (open_one,) = [f for f in report.findings if f.verdict == "open"]
    assert open_one.check == "attack: lower bound" and "more runs" in open_one.sentence


@pytest.mark.parametrize(
    ("subject", "expected"),
    [d for d in DEFECTS if d[0].name in QUICK],
    ids=lambda x: getattr(x, "name", ""),
)
def test_defects_are_found_soon(subject, expected):
    report = check(subject, checks=[QUICK[subject.name]], draws=64)
    assert expected in failed(report)
    found = next(f for f in report.findings if f.check == expected)
    assert found.sentence and not 0 <= found.measured - found.allowed <= 1e-9


@pytest.mark.parametrize(
    ("subject", "expected"),
    later(DEFECTS, soon=DEFECTS[:60:4]),
    ids=lambda x: getattr(x, "name", ""),
)
def test_defects_are_found_by_their_check(subject, expected):
    assert expected in failed(check(subject))


@slow
@pytest.mark.parametrize("subject", list(planted.correct()), ids=lambda x: x.name)
def test_correct_subjects_pass(subject):
    report = check(subject)
    assert not failed(report), report.to_text()
    is_open = [f.check for f in report.findings if f.verdict == "open"]
    assert not is_open or (subject.name, is_open) == (
        "one entry",
        ["noise: independence of entries"],
    )


def alarms(subject, seeds, confidence):
    reports = (check(subject, seed=s, draws=64, confidence=confidence) for s in range(seeds))
    return sum(report.is_failed for report in reports)


@slow
@pytest.mark.parametrize("name", ["correct", "poisson", "correct masks"])
def test_false_alarms_are_no_more_than_stated(name):
    (subject,) = [s for s in planted.correct() if s.name == name]
    # More are as unlikely as 1 in 10,000 at a rate of 0.2.
    assert alarms(subject, 40, confidence=0.8) <= stats.binom.isf(1e-4, 40, 0.2)
    # The tests are no formality: at no confidence, they alarm.
    assert alarms(subject, 20, confidence=1e-9) > 0


def test_pairs_of_a_sparse_draw_are_no_false_alarm():
    """One round in a hundred has a pair, so that no normal law describes how many."""
    rng = np.random.default_rng(0)
    p_values = np.array(
        [
            sampling._preferred((rng.random((256, 200)) < 8e-4).astype(float), rng, 0.01).p_value
            for _ in range(200)
        ]
    )
    assert np.sum(p_values <= 0.1) <= stats.binom.isf(1e-4, 200, 0.1)
    drawn = np.repeat(rng.random((256, 100)) < 0.02, 2, axis=1).astype(float)
    assert sampling._preferred(drawn, rng, 0.01).p_value < 0.01


SHAPES = [(3, 2), (0,), (1,) * 12 + (2,), ()]
NUMBERS = clients.LocalConfig(batch_size=8.0, clip_norm=0.5, noise_multiplier=2.0)


def adapting():
    rule = make_adaptive_clipping(8.0, initial_clip_norm=0.5, count_stddev=3.0)
    return server.adaptive_gaussian_mean(rule, 2.0)


OURS = {
    "gaussian_mean": lambda n: aggregation_of(n, server.gaussian_mean(0.5, 2.0, 8.0), SHAPES),
    "by layers": lambda n: aggregation_of(
        n, server.gaussian_mean(0.5, 2.0, 8.0, per_layer=True), SHAPES
    ),
    "laplace_mean": lambda n: aggregation_of(n, server.laplace_mean(0.5, 2.0, 8.0), SHAPES),
    "adaptive": lambda n: aggregation_of(n, adapting(), SHAPES),
    "dp-sgd": lambda n: step_of(n, clients.clipped, NUMBERS, SHAPES),
    "dp-sgd by layers": lambda n: step_of(
        n, partial(clients.clipped, per_layer=True), NUMBERS, SHAPES
    ),
    "poisson": lambda n: sampling_of(n, data.poisson(), 40, 8.0),
    "fixed size": lambda n: sampling_of(n, data.fixed_size(), 40, 8),
    "shuffled": lambda n: sampling_of(n, data.shuffled(), 40, 8),
    "everyone": lambda n: sampling_of(n, data.full_participation(), 40, 40),
    "masks": lambda n: masking_of(n, secure.all_pairs(5, dropouts=2)),
    "masks by agreed keys": lambda n: masking_of(
        n, secure.random_neighbors(60, dropouts=1, num_neighbors=12), keys=secure.agreed_keys(60)
    ),
    "masks of pairs": lambda n: mask_source_of(n, secure.agreed_keys),
}


@slow
@pytest.mark.parametrize("name", OURS)
def test_our_parts_pass_and_their_attacks_have_power(name):
    report = check(OURS[name](name))
    assert {f.verdict for f in report.findings} == {"passed"}, report.to_text()


@telling
def test_the_noise_of_our_mean_is_as_claimed_and_half_of_it_is_found():
    right, half = (server.gaussian_mean(0.5, z, 8.0) for z in (2.0, 1.0))
    event = right.claim.event(right.numbers)
    wrong = half._replace(claim=half.claim._replace(event=lambda numbers: event))
    found = {
        name: failed(check(aggregation_of(name, mean, [(3,)]), checks=["noise"]))
        for name, mean in (("right", right), ("half", wrong))
    }
    assert found == {"right": [], "half": ["noise: standard deviation", "noise: whoever replies"]}


@telling
def test_masks_used_twice_and_short_seeds_are_found_in_ours():
    keys, first = secure.simulated_keys(), jax.random.key(0)
    again = keys._replace(
        of_pair=lambda key, i, j: keys.of_pair(first, i, j),
        of_client=lambda key, i: keys.of_client(first, i),
    )
    found = failed(check(masking_of("again", secure.all_pairs(3), keys=again), draws=64))
    assert "masks: unrelated" in found and "masks: sum" not in found
    bits = jnp.uint32([2**20 - 1, 0])
    short = keys._replace(of_pair=lambda key, i, j: keys.of_pair(key, i, j) & bits)
    assert failed(check(mask_source_of("short", lambda n: short))) == ["masks: repeated"]


def test_masks_that_are_equal_by_chance_show_nothing_about_their_seeds():
    def fair(count, seed):
        return np.random.default_rng(seed).integers(0, 16, (count, 1))

    source = conformance.MaskSource("few bits", fair, conformance.MaskLaw(16, 2**12, 1))
    found = {f.check: f.verdict for f in check(source).findings}
    assert found == {"masks: uniform": "passed", "masks: repeated": "open"}


@pytest.mark.parametrize("times", [1.0, 40.0])
def test_an_attack_where_there_is_hardly_any_noise_ends(times):
    claim = planted.replaced(noise_stddev=0.05)
    subject = aggregation(
        "little noise", claim, noise=lambda s, r: planted.gaussian(s, r, stddev=times * 0.05)
    )
    report = check(subject, checks=["attack"], draws=64)
    assert [f.verdict for f in report.findings] == ["passed", "open"]
    assert "would be found in 9 of 10 reports" in report.findings[0].sentence


def test_an_error_of_a_check_loses_no_finding(monkeypatch):
    def ends(name, view, draws, significance):
        yield Finding(name, "noise: law", "passed", "before")
        raise ArithmeticError("no root")

    monkeypatch.setattr(sys.modules[check.__module__], "check_noise", ends)
    report = check(aggregation(), checks=["noise", "contribution"], draws=64)
    checks = [(f.check, f.verdict) for f in report.findings]
    assert checks[-2:] == [("noise: law", "passed"), ("noise", "open")] and len(checks) > 4
    assert "the check itself raises ArithmeticError: no root" in report.findings[-1].sentence


@telling
@pytest.mark.parametrize("name", ["numbers drawn for each row", "adaptive, no seed"])
def test_noise_that_differs_for_neighbours_is_no_false_alarm(name):
    """A generator that rows use too; its noise cancels for rows of zeros, and not for others."""
    (subject,) = [s for s in planted.correct() if s.name == name]
    for seed in range(3):
        assert not failed(check(subject, checks=["contribution"], draws=64, seed=seed))


def test_an_example_is_a_failing_input_as_code():
    """What is printed fails again, and has nothing left to leave out."""
    _, defect = next((c, s) for s, c in DEFECTS if s.name == "layers clipped one by one")
    report = check(defect, checks=["contribution"])
    (finding,) = [f for f in report.findings if f.check == "contribution: layers"]
    names = {"np": np}
    exec(finding.example, names)
    rows, neighbour = names["rows"], names["neighbour"]
    distance = np.linalg.norm(defect.aggregate(rows, 3) - defect.aggregate(neighbour, 3))
    assert distance == pytest.approx(finding.measured) and distance > finding.allowed
    # One row, with an entry in each of two layers.
    assert rows.shape == (1, SIZE) and np.count_nonzero(rows) == 2
    assert np.count_nonzero(rows[:, :5]) == 1


@pytest.mark.parametrize(
    ("rounds", "relation"), later([(1, "add_remove"), (7, "replace_one")], but=[(7, "replace_one")])
)
def test_bounds_on_epsilon_are_those_of_a_closed_form(rounds, relation):
    release = Release(1.0, 2.0, 5.0, relation=relation)
    lower, upper = epsilon_bounds(Training(release, FixedSize(5, 5), rounds), rounds, 1e-5)
    exact = gaussian_epsilon(math.sqrt(rounds) * release.sensitivity / 2.0, 1e-5)
    assert lower <= exact <= upper and upper - lower < 0.01 * exact


def test_an_epsilon_without_an_analysis_is_left_open():
    """Amplification of shuffled batches is not known; what is proven without it passes."""
    release = Release(1.0, 1.0, 8, relation="zero_out")
    claim = Training(release, conformance.Shuffled(80, 8), 20)
    proven = epsilon_bounds(claim, 20, 1e-5).upper
    for stated, verdict in ((proven / 3, "open"), (proven * 40, "passed")):
        report = check(Accounting("ε", lambda rounds, delta, s=stated: s, claim))
        assert report.findings[0].verdict == verdict
    assert "loose by a factor of 40" in report.findings[0].sentence


@telling
@pytest.mark.parametrize(("multiplier", "rate", "rounds"), [(1e-3, 0.5, 10**5), (1e-3, 1e-6, 1)])
def test_bounds_where_there_is_hardly_any_noise_take_seconds(multiplier, rate, rounds):
    claim = Training(Release(1.0, multiplier, 1.0), Poisson(10, rate), rounds)
    start = time.process_time()
    lower, upper = epsilon_bounds(claim, rounds, 1e-5)
    assert time.process_time() - start < 30 and 0 <= lower <= upper


FUNCTIONS = """
import os, sys, time
import numpy as np
print("what a library prints")

def reads():
    return len(sys.stdin.read())

def mean(rows, seed):
    return rows.sum(axis=0) / 4 + np.random.default_rng(seed).normal(0, 1, 3)

def several(values, flags):
    return values, [1.0, 2.0], flags.sum()

def error(*_):
    raise KeyError("no such layer")

def dies(*_):
    os._exit(7)

def sleeps(*_):
    time.sleep(60)
"""


def test_functions_of_another_process(tmp_path):
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS, "utf-8")
    served = Served(file, timeout=20.0)
    rows = np.ones((2, 3), np.float32)
    one = served.function("mean")(rows, 5)
    assert np.array_equal(one, np.random.default_rng(5).normal(0, 1, 3) + 0.5)
    values, floats, count = served.function("several")(np.arange(3), np.array([True, False]))
    assert values.tolist() == [0, 1, 2] and floats.tolist() == [1, 2] and count == 1
    with pytest.raises(RuntimeError, match="KeyError: 'no such layer'"):
        served.function("error")(rows)
    with pytest.raises(RuntimeError, match="KeyError: 'nothing'"):
        served.function("nothing")(rows)
    assert served.function("reads")() == 0, "its input has no messages"
    served.close()


def test_a_process_says_what_its_import_prints_and_no_call(tmp_path, capfd):
    file = tmp_path / "functions.py"
    file.write_text("print('imported')\ndef one(): print('called'); return 1", "utf-8")
    served = Served(file)
    assert served.function("one")() == served.function("one")() == 1
    served.close()
    assert capfd.readouterr().err == "imported\n"


def test_a_subject_file_finds_what_is_beside_it(tmp_path, monkeypatch):
    """Modules and served functions alike, wherever the kit runs."""
    (tmp_path / "beside_it.py").write_text("def mean(rows, seed): return rows.sum(axis=0)", "utf-8")
    (tmp_path / "subject.py").write_text(
        "from beside_it import *\n"
        "from fedjax_dp.audit.conformance import *\n"
        "claim = Release(1.0, 1.0, 1.0)\n"
        "served = Served('beside_it.py').function('mean')\n"
        "subjects = a, b = Step('a', mean, claim), Step('b', served, claim)\n",
        "utf-8",
    )
    monkeypatch.setattr("sys.path", list(sys.path))
    one, other = conformance.subjects_of(str(tmp_path / "subject.py"))
    rows = np.ones((2, 8), np.float32)
    assert one.step(rows, 0).tolist() == other.step(rows, 0).tolist() == [2.0] * 8


def test_a_process_that_cannot_start_is_no_finding(tmp_path):
    (tmp_path / "functions.py").touch()
    step = Served(tmp_path / "functions.py", "/no/python").function("step")
    with pytest.raises(ValueError, match=r"python must run the file .*/no/python"):
        check(conformance.Step("served", step, CLAIM), checks=["noise"])


@telling
def test_a_file_that_cannot_be_imported_is_no_finding(tmp_path):
    file = tmp_path / "functions.py"
    for text, said in (("import nowhere", "No module named 'nowhere'"), ("exit(0)", "SystemExit")):
        file.write_text(text, "utf-8")
        with pytest.raises(ValueError, match=f"file must be one that .*{said}"):
            Served(file).function("step")(np.ones((2, 3)), 5)


def test_an_example_of_slow_calls_is_not_searched_for(monkeypatch):
    calls = []

    def aggregate(rows, seed):
        calls.append(len(rows))
        if np.isnan(rows).any():
            raise TimeoutError("no answer within 60 s")
        return np.zeros(SIZE)

    subject = Aggregation("slow", aggregate, dataclasses.replace(CLAIM, noise_stddev=0.0))
    counts = []
    for seconds in (20.0, 0.0):
        monkeypatch.setattr(contribution, "_SHRINK_SECONDS", seconds)
        calls.clear()
        assert "contribution: not finite" in failed(check(subject, checks=["contribution"]))
        counts.append(len(calls))
    assert counts[1] < counts[0] - 10


@telling
def test_a_process_that_dies_or_sleeps_is_started_again(tmp_path):
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS, "utf-8")
    served, rows = Served(file, timeout=20.0), np.ones((2, 3), np.float32)
    one = served.function("mean")(rows, 5)
    with pytest.raises(RuntimeError, match=r"it ended, exit status 7"):
        served.function("dies")(rows)
    assert np.array_equal(served.function("mean")(rows, 5), one)
    served._timeout, start = 0.2, time.monotonic()
    with pytest.raises(RuntimeError, match=r"no answer within 0\.2 s"):
        served.function("sleeps")(rows)
    assert time.monotonic() - start < 10
    served.close()


@slow
def test_imports_do_not_count_as_a_call(tmp_path):
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS + "time.sleep(6)\n", "utf-8")
    served = Served(file, timeout=5.0)
    assert np.array_equal(served.function("several")([1], np.array([True]))[0], [1])
    served.close()


def test_the_server_needs_numpy_alone():
    assert "fedjax_dp" not in pathlib.Path(serve.__file__).read_text("utf-8")


class Unreadable:
    def __array__(self, *options, **named):
        raise RuntimeError("needs a gradient")


def broken(value):
    def aggregate(rows, seed):
        if isinstance(value, BaseException):
            raise value
        return value

    return Aggregation("broken", aggregate, CLAIM)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.zeros(3), r"returns an array of shape \(3,\), not \(8,\)"),
        ("text", "returns an array of <U4, not of real numbers"),
        (None, "returns NoneType, not an array of numbers"),
        (
            Unreadable(),
            "returns Unreadable, not an array of numbers: RuntimeError: needs a gradient",
        ),
        ([10**400] * 8, "returns list, not an array of numbers"),
        ([[1], [1, 2]], "returns list, not an array of numbers"),
        (["1"] * 8, "returns an array of <U1, not of real numbers"),
        (np.full(8, 1j), "returns an array of complex128, not of real numbers"),
        (SystemExit(3), "raises SystemExit: 3"),
        (BaseException(), "raises BaseException on 8 rows"),
        (RuntimeError("a\nb"), "raises RuntimeError: a b"),
    ],
)
def test_what_is_no_aggregate_fails_every_check(value, said):
    report = check(broken(value))
    assert {f.verdict for f in report.findings} == {"failed"} and len(report.findings) == 3
    with pytest.raises(AssertionError, match=said):
        assert_conforms(broken(value))


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda rounds, seed: itertools.repeat([0]), "returns more rounds than 4"),
        (lambda rounds, seed: (1 / 0 for _ in range(rounds)), "raises ZeroDivisionError"),
        (lambda rounds, seed: [[1, [2, 3]]] * rounds, "returns list, not an array of numbers"),
        (lambda rounds, seed: 3, "returns int, not a list of rounds"),
        (lambda rounds, seed: [np.ones(10, bool)] * rounds, "draws booleans, not indices"),
    ],
)
def test_what_draws_no_rounds_fails(draw, said):
    (finding,) = check(conformance.Sampling("broken", draw, Poisson(10, 0.5))).findings
    assert finding.verdict == "failed" and said in finding.sentence


def test_noise_on_a_lattice_is_not_of_few_bits():
    step = 2.0**-8

    def noise(seed, rows):
        return np.round(planted.gaussian(seed, rows) / step) * step

    assert not failed(check(aggregation(noise=noise), checks=["noise"], draws=64))


def test_subjects_get_copies():
    def aggregate(rows, seed):
        rows[:] = 7
        return np.zeros(SIZE)

    claim = dataclasses.replace(CLAIM, noise_stddev=0.0)
    report = check(Aggregation("writes", aggregate, claim), checks=["noise"])
    assert [f.verdict for f in report.findings] == ["passed", "open"]


def test_a_report_is_text_markdown_and_junit():
    name = "a | <b>\x1b[1m"
    findings = (
        Finding(name, "noise: law", "failed", "too far", 0.5, 0.1, 0.99, "rows = 1\nseed = 2"),
        Finding(name, "noise: standard deviation", "passed", "as claimed"),
        Finding(name, "attack: lower bound", "open", "no power"),
    )
    report = Report(findings, 0.99, 1.5)
    assert report.is_failed and not report._replace(findings=findings[1:]).is_failed
    assert "noise: law: too far\n    rows = 1\n    seed = 2" in report.to_text()
    page = report.to_markdown()
    assert page.startswith("# Conformance: failed") and "\x1b" not in page
    (row,) = [line for line in page.splitlines() if line.startswith("| a")][:1]
    assert r"a \| \<b\>" in row and " failed | too far |" in row
    suite = ElementTree.fromstring(report.to_junit())
    assert {name: suite.get(name) for name in ("tests", "failures", "skipped")} == {
        "tests": "3",
        "failures": "1",
        "skipped": "1",
    }
    (failure,) = suite.findall("testcase/failure")
    assert failure.get("message") == "too far" and failure.text == "rows = 1\nseed = 2"
    assert report.to_dict()["findings"][0]["check"] == "noise: law"


def test_time_that_is_used_up_leaves_checks_open():
    report = check(planted.masking(), planted.masking("second"), draws=64, budget=1e-9)
    assert report.findings[-1].verdict == "open" and report.findings[-1].subject == "second"
    assert "not begun within 1e-09 s" in report.findings[-1].sentence


def mean_with(**claimed):
    mean = server.gaussian_mean(0.5, 1.0, 8.0)
    return aggregation_of("a", mean._replace(claim=mean.claim._replace(**claimed)), [(3,)])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: check(), "subjects must be at least one"),
        (lambda: check(aggregation(), aggregation()), "subjects must have different names"),
        (lambda: check(aggregation(), checks=["sums"]), "checks must be one of"),
        (lambda: check(aggregation(), checks=["masks"]), "checks must concern a subject"),
        (lambda: check(aggregation(), checks=[]), "checks must name some of"),
        (lambda: check(aggregation(), draws=10), "draws must be an integer of at least 64"),
        (lambda: Release(1.0, 1.0, 8, layers=(0,)), "layers must have 1 to 4096 entries"),
        (lambda: Release(1.0, 1.0, 8, layers=(3, -1)), "layers must be a tuple, each entry an"),
        (lambda: Release(1.0, 1.0, 8, rows=2), "rows must be an integer of at least 3"),
        (lambda: Release(1.0, 1.0, 0), "divisor must be above 0"),
        (lambda: Release(1.0, math.nan, 8), "noise_stddev must be"),
        (lambda: Release(1.0, 1.0, 8, relation="swap"), "relation must be"),
        (lambda: Release(1.0, 1.0, None), "divisor must be a public constant"),
        (
            lambda: Release(1.0, 1.0, 8, law="laplace"),
            "norm must be 'l1' for law='laplace': an L2 norm C is an L1 norm of at most 2.828 C",
        ),
        (lambda: FixedSize(3, 4), "size must be at most num_units=3"),
        (lambda: Poisson(3, 0.0), r"rate must be in \(0, 1\]"),
        (lambda: Masked(8, 3), r"modulus must be an integer in \[16, 2\.3"),
        (lambda: Masked(2**62, 3), r"modulus must be an integer in \[16, 2\.3"),
        (lambda: Masked(16, 3, dropped=2), "dropped must leave two of clients=3"),
        (lambda: Aggregation(" ", len, CLAIM), "name must be a name"),
        (lambda: Aggregation("a", 3, CLAIM), "aggregate must be"),
        (
            lambda: aggregation_of("a", server.uniform_mean(), [(3,)]),
            "aggregator must claim privacy",
        ),
        (lambda: mean_with(min_participants=2), "noise that the server draws afresh"),
        (lambda: mean_with(min_separation=2), "noise that the server draws afresh"),
        (lambda: mean_with(event=lambda n: NoOpDpEvent()), "event must state Gaussian"),
        (lambda: step_of("a", clients.plain, NUMBERS, [(3,)]), "rule must state a bound"),
        (lambda: Served("no_such.py"), "file must be an existing file"),
    ],
)
def test_what_no_check_can_use_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_a_number_of_rows_that_is_refused_tells_nothing_of_a_unit():
    """Of both neighbours, where the number is public; a unit's own values must not be refused."""
    claim = dataclasses.replace(CLAIM, relation="zero_out")

    def picky(rows, seed, bound=math.inf):
        if len(rows) != claim.rows or np.abs(rows).max() > bound:
            raise ValueError("refused")
        return planted.aggregation().aggregate(rows, seed)

    options = {"checks": ["contribution"], "draws": 64}
    assert not failed(check(Aggregation("picky", picky, claim), **options))
    too_picky = Aggregation("too picky", partial(picky, bound=1e3), claim)
    assert "contribution: size of a row" in failed(check(too_picky, **options))
