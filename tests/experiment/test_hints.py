"""Hints of a private run: each by figures that call for it and by others, and by whole runs."""

import functools

import numpy as np
import pytest
from marks import telling
from run_folders import NOT_PRIVATE, SMALL, execute, read_json

from fedjax_dp.data.federated import FederatedData
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.assembly.assemble import assemble
from fedjax_dp.experiment.running import hints
from fedjax_dp.experiment.running.hints import HINTS, Hint, Ran, hints_of

pytestmark = pytest.mark.usefixtures("no_pictures")

CLIENTS = ("--privacy.unit=client", "--algorithm.name=dp_fedavg")
DRAWN = ("--participation.sampler=poisson", "--participation.cohort_size=0.3")
EXACT = " (exact, not private)"


@functools.cache
def experiment(*words):
    return assemble(load_config(None, (*SMALL, "--execution.clients_per_chunk=1", *words)))


def ran(*words, rows=(), epsilon=None, figures=(), **population):
    made = experiment(*words)
    made = made._replace(population=made.population._replace(**population))
    units = made.config.privacy.units
    full = {u: np.broadcast_to(made.budget[u], 3 if u == "record" else 1) for u in made.budget}
    spent = {unit: np.asarray(epsilon) if epsilon else full[unit] for unit in units}
    return Ran(made, made.simulation.hyper, rows, spent, dict(figures))


def of_records(*shares):
    return [{"clipped_example_share": share, "num_examples": 9.0} for share in shares]


def of_clients(*shares):
    return [{"clipped_client_share": share, "num_participants": 3} for share in shares]


ADAPTIVE = "--privacy.client.adaptive_clipping=true"


@pytest.mark.parametrize(
    ("words", "rows", "nothing", "everything"),
    [
        ((), of_records(0.0, 0.0), "privacy.record.clip_norm: no gradient of a record was", None),
        ((), of_records(0.0, 0.1), None, None),
        (
            (),
            of_records(0.99, 1.0),
            None,
            "nearly every gradient of a record was clipped in 2 rounds",
        ),
        ((), of_records(0.98, 1.0), None, None),
        ((), [], None, None),
        # Rounds without a contribution say nothing.
        ((), [{"clipped_example_share": 0.0, "num_examples": 0.0}], None, None),
        (CLIENTS, of_clients(0.0), "privacy.client.clip_norm: no update of a client was", None),
        (CLIENTS, of_clients(1.0), None, "nearly every update of a client was clipped in 1 round;"),
        # Under privacy of clients, gradients have no bound.
        (CLIENTS, of_records(0.0), None, None),
        ((*CLIENTS, ADAPTIVE), of_clients(0.0), None, None),
    ],
)
def test_bounds_that_nothing_or_everything_reaches(words, rows, nothing, everything):
    made = ran(*words, rows=rows)
    found, wanted = [hint.text for hint in hints.clip_norms(made)], nothing or everything
    assert len(found) == (wanted is not None)
    assert all(wanted in text and text.endswith(EXACT) for text in found)


def row_of_noise(stddev, median):
    return {"noise_stddev": stddev, "update_norm_quantiles": [0.0, 0.0, median, 9.0, 9.0]}


@pytest.mark.parametrize(
    ("rows", "ratio"),
    [
        # The median update is within the bound of 1, and beyond it.
        ([row_of_noise(0.1, 0.5)], 0.1 * 650**0.5 / 0.5),
        ([row_of_noise(0.1, 4.0)] * 2, 0.1 * 650**0.5),
        ([row_of_noise(0.01, 0.5)], None),
        ([{"noise_stddev": None, "update_norm_quantiles": [None] * 5}], None),
        ([], None),
    ],
)
def test_noise_that_is_longer_than_an_update(rows, ratio):
    made = ran(*CLIENTS, rows=rows)
    assert made.experiment.num_parameters == 650
    found = [hint.text for hint in hints.noise_of_clients(made)]
    said = [] if ratio is None else [f"noise of a round is {ratio:.3g} times as long as the median"]
    assert [said[0] in text and text.endswith(EXACT) for text in found] == [True] * len(said)
    assert not list(hints.noise_of_clients(ran(rows=rows)))


def test_noise_is_compared_with_updates_within_the_clip_norm_of_their_round():
    curve = "--schedules.privacy.client.clip_norm={curve='list', factors=[1, 0.5, 0.25]}"
    made = ran(*CLIENTS, curve, rows=[row_of_noise(0.1, 4.0)] * 3)
    (hint,) = hints.noise_of_clients(made)
    # The bound of 1 is halved in the second round, whose ratio is the median of three.
    assert f"noise of a round is {0.1 * 650**0.5 / 0.5:.3g} times as long" in hint.text


def test_the_noise_of_an_update_of_two_parts_is_that_of_both():
    words = "--privacy.unit=client", "--algorithm.name=scaffold"
    (hint,) = hints.noise_of_clients(ran(*words, rows=[row_of_noise(0.1, 0.5)]))
    assert f"noise of a round is {0.1 * 1300**0.5 / 0.5:.3g} times" in hint.text


@pytest.mark.parametrize("noise", [50.0, 1.0])
def test_noise_that_is_longer_than_what_gradients_add_up_to(noise):
    words = (f"--privacy.record.noise_multiplier={noise}", "--privacy.record.epsilon=none")
    made = ran(*words, epsilon=[1.0, 1.0, 1.0])
    steps = np.ceil(made.sizes / 64)
    # Noise of S steps adds up like its root, bounded gradients like S; three models are averaged.
    each = np.sqrt(650 * steps / 3) * noise / 64 / steps
    found = list(hints.noise_of_records(made))
    if noise > 10:
        (hint,) = found
        assert f"at least {np.median(each):.3g} times as long" in hint.text and not hint.is_exact
    else:
        assert not found and np.median(each) < 1


def test_deltas_that_are_large():
    (hint,) = hints.large_delta(ran("--privacy.record.dp_delta=0.1"))
    assert (
        hint.text.startswith("privacy.record.dp_delta: δ = 0.1 is too large") and not hint.is_exact
    )
    assert not list(hints.large_delta(ran()))


PLANNED = "--privacy.record.planned_participations=1"
FALLING = "--schedules.privacy.record.noise_multiplier=linear"
OFTEN = (DRAWN[0], "--participation.cohort_size=1.5")


@pytest.mark.parametrize(
    ("words", "spent", "said"),
    [
        ((), [8.0, 8.0, 7.0], None),
        ((), [4.0, 2.0, 8.0], "privacy.record.epsilon: 25 % to 100 % of the budget was used"),
        (DRAWN, [4.0, 4.0, 4.0], "50 % of the budget was used; privacy.record.planned_participa"),
        # Nothing is advised that is refused, or that changes nothing.
        ((*DRAWN, FALLING), [4.0, 4.0, 4.0], "privacy.record.epsilon: 50 % of the budget was used"),
        (OFTEN, [4.0, 4.0, 4.0], "privacy.record.epsilon: 50 % of the budget was used"),
        ((*DRAWN, PLANNED), [4.0, 4.0, 4.0], "privacy.record.epsilon: 50 % of the budget was used"),
        (CLIENTS, [2.0], "privacy.client.epsilon: 25 % of the budget was used"),
        ((), [np.inf, np.inf, np.inf], None),
    ],
)
def test_budgets_of_which_a_part_is_left(words, spent, said):
    found = [hint.text for hint in hints.budget_in_part(ran(*words, epsilon=spent))]
    assert len(found) == (said is not None)
    is_planned = "planned_participations" in (said or "") or words == DRAWN
    for text in found:
        assert said in text and EXACT not in text
        assert ("planned_participations" in text) == is_planned


def test_columns_of_many_categories():
    names = ("age", *(f"city={i}" for i in range(100)), *(f"sex={i}" for i in range(99)))
    (hint,) = hints.many_categories(ran(feature_names=names))
    assert "the column 'city' has 100 categories" in hint.text and not hint.is_exact
    assert not list(hints.many_categories(ran(feature_names=names[:100])))
    for column, is_exact in (("city", True), ("sex", False)):
        occur = (f"which values occur in {column!r}, since no categories were declared",)
        (hint,) = hints.many_categories(ran(feature_names=names, exact_statistics=occur))
        assert hint.is_exact == is_exact


@pytest.mark.parametrize("name", ["test", "client_test"])
def test_a_model_that_is_no_better_than_the_largest_class(name):
    labels = np.array([0, 2, 2, 2, 1, 2, 0])
    records = FederatedData.from_clients([{"x": np.zeros((7, 64)), "y": labels}])

    def said(correct, of="test", **more):
        made = ran(figures={f"{of}_accuracy": float(np.float32(correct / 7))}, **more)
        whole = made.experiment.evaluator.whole if name == "test" else None
        own = made.experiment.evaluator._replace(whole=whole, is_personal=of != "test")
        made = made._replace(experiment=made.experiment._replace(evaluator=own))
        return [hint.text for hint in hints.largest_class(made)]

    for of in ("test", "shared_test"):
        assert not said(5, of, **{name: records}) and not said(np.nan, of, **{name: records})
        (hint,) = said(4, of, **{name: records})
        assert hint == (
            "accuracy: the shared model's, 0.5714, is not above the share of the largest "
            f"class of the test records, 0.5714{EXACT}"
        )
    assert said(3, **{name: records})
    # Numbers have no classes, and other models are not the shared one.
    assert not said(3, has_class_labels=False, **{name: records})
    assert not said(3, "client_test", **{name: records})


def test_clients_without_a_step():
    (hint,) = hints.without_a_step(ran("--training.num_steps=[0,2,0]"))
    assert hint.text.startswith("training: 2 of 3 clients take no step in a round")
    assert not list(hints.without_a_step(ran()))


def test_a_hint_that_reads_exact_figures_says_so():
    assert Hint("a", is_exact=True).text == f"a{EXACT}" and Hint("a", is_exact=False).text == "a"


def test_a_run_that_claims_nothing_has_no_hint():
    assert not hints_of(ran(*NOT_PRIVATE, rows=of_records(0.0)))
    assert hints_of(ran(rows=of_records(0.0)))
    functions = [f for f in vars(hints).values() if getattr(f, "__module__", "") == hints.__name__]
    public = {f.__name__ for f in functions if callable(f) and not f.__name__.startswith("_")}
    assert public - {"Hint", "Ran", "hints_of"} == {f.__name__ for f in HINTS}


@telling
def test_hints_are_printed_kept_and_left_out_of_a_release(tmp_path):
    folder = tmp_path / "run"
    words = ("--privacy.record.clip_norm=1e6", "--run.secret=true", "--run.release=private")
    status, text = execute(folder, *SMALL, "--execution.clients_per_chunk=1", *words)
    assert status == 0
    summary = read_json(folder, "summary.json")
    (hint,) = [one for one in summary["hints"] if "clip_norm" in one]
    assert hint == (
        "privacy.record.clip_norm: no gradient of a record was clipped in 2 rounds; a smaller clip "
        f"norm would mean less noise{EXACT}"
    )
    assert f"hint: {hint}" in text and "hints" in summary["not_private"]
    assert "hints" not in read_json(folder / "release", "summary.json")


@telling
def test_a_run_of_which_nothing_is_to_be_said(tmp_path):
    status, text = execute(tmp_path / "run", *SMALL, "--execution.clients_per_chunk=1")
    assert status == 0 and "hint" not in text
    assert read_json(tmp_path / "run", "summary.json")["hints"] == []
