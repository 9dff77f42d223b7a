"""Methods at their own learning rates: models side by side, and how rates are chosen."""

import contextlib
import itertools
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from marks import slow

from experiments.heterogeneous_dp import rates, side_by_side, sweep
from experiments.sweep import each_of
from fedjax_dp.experiment import Cluster, assemble, grid_points, load_config
from fedjax_dp.experiment.studies.point_settings import with_settings

# Clients' batches differ, and so do their noise and budgets.
CLIENTS = (
    *("--data.partition=iid", "--data.num_clients=20", "--data.client_test_share=0.2"),
    *("--training.batch_size=heterogeneous", "--privacy.record.clip_norm=3", "--run.rounds=3"),
    "--execution.clients_per_chunk=1",
)
PRIVACY = ("--privacy.record.epsilon=Dist6", "--privacy.record.dp_delta=1e-4")
NOISE = f"--privacy.record.noise_multiplier={[0.5, 1.0] * 10}"
SEED = 3


@slow
def test_models_side_by_side_end_where_each_alone_does():
    """Every method, one of them at two rates, against a simulation of its own."""
    words = [*CLIENTS, f"--run.seed={SEED}"]
    own = {**sweep.ALGORITHMS, "PFA x10": sweep.falsified()["PFA x10"]}
    # The method that calibrates the noise itself takes no other.
    of_method = {
        name: [*words, *PRIVACY, *more, *([] if name == "minimum_epsilon" else [NOISE])]
        for name, more in own.items()
    }
    data = side_by_side.population(None, words)
    methods = side_by_side.methods_of(None, of_method, data)
    rates_of = dict.fromkeys(own, (0.3,)) | {"Robust-HDP": (0.05, 0.3)}
    lanes = [side_by_side.Lane(name, rate) for name in own for rate in rates_of[name]]
    found = {}

    def note(number, params, score):
        found[number] = params, score(data.test).mean(axis=1)

    side_by_side.train(None, words, methods, lanes, data, SEED, 3, note)
    params, accuracy = found[3]
    for i, lane in enumerate(lanes):
        config = load_config(
            None, [*of_method[lane.method], f"--training.learning_rate={lane.rate}"]
        )
        experiment = assemble(config, data)
        sim, key = experiment.simulation, jax.random.key(SEED)
        state, *_ = sim.run(sim.init(key), key, 3)
        alone = jax.tree.leaves(state.server.params)
        together = [leaf[i] for leaf in jax.tree.leaves(params)]
        for one, other in zip(alone, together, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5, err_msg=str(lane))
        outputs, _ = experiment.model.apply(state.server.params, data.test.examples["x"])
        right = np.mean(np.argmax(outputs, axis=-1) == data.test.examples["y"])
        assert accuracy[i] == pytest.approx(right, abs=0.006)


def row(method, rate, accuracy, seed=0, data="held out", distribution="Dist5"):
    values = distribution, "20", method, str(rate), str(seed), "20", data, str(accuracy)
    return dict(zip(rates.COLUMNS, values, strict=True))


ROWS = [
    *(row("WeiAvg x1", 0.05, 80.0), row("WeiAvg x1", 0.1, 80.0), row("WeiAvg x1", 0.2, 79.9)),
    *(row("Robust-HDP", 0.05, 70.0), row("Robust-HDP", 0.4, 70.1)),
    # What must not choose: the test part, another seed, another cell.
    *(row("Robust-HDP", 0.05, 99.0, data="test"), row("Robust-HDP", 0.05, 99.0, seed=1)),
    row("Robust-HDP", 0.05, 99.0, distribution="Dist2"),
]


def test_rates_are_chosen_on_held_out_examples_of_the_first_seed():
    assert rates.chosen(ROWS, ("Dist5", 20)) == {"WeiAvg x1": 0.05, "Robust-HDP": 0.4}


def test_a_false_claim_has_the_rate_of_honest_clients_and_chooses_none():
    methods = {name: sweep.falsified()[name] for name in ("Robust-HDP", "WeiAvg x1", "WeiAvg x10")}
    study = rates.Study("mnist.toml", methods, (("Dist5", 20),))
    tuned = rates.lanes_of(study, [], ("Dist5", 20), rates.TUNED_ON)
    assert {lane.method for lane in tuned} == {"Robust-HDP", "WeiAvg x1"}
    assert len(tuned) == 2 * len(rates.RATES)
    shown = rates.lanes_of(study, ROWS, ("Dist5", 20), 1)
    assert shown == [("Robust-HDP", 0.4), ("WeiAvg x1", 0.05), ("WeiAvg x10", 0.05)]


def test_a_study_continues_with_what_has_no_result():
    methods = {name: sweep.falsified()[name] for name in ("Robust-HDP", "WeiAvg x1", "WeiAvg x10")}
    study = rates.Study("mnist.toml", methods, (("Dist5", 20),))
    tuned = rates.missing(study, ROWS, ("Dist5", 20), rates.TUNED_ON)
    assert ("WeiAvg x1", 0.05) not in tuned and ("WeiAvg x1", 0.3) in tuned
    assert len(tuned) == 2 * len(rates.RATES) - 5
    # The run at another rate than the chosen one does not count.
    assert len(rates.missing(study, ROWS, ("Dist5", 20), 1)) == 3


def test_the_seed_that_chooses_rates_compares_none(capsys):
    with pytest.raises(SystemExit):
        rates.main(["mnist", "--seeds", "0", "1"])
    assert "--seeds must be above 0, which chooses the rates: [0, 1]" in capsys.readouterr().err


def test_chosen_rates_are_settings_of_the_sweep_of_the_same_runs(tmp_path):
    study = rates.STUDIES["falsified"]
    tuned = [row(m, 0.3 if "PFA" in m else 0.1, 70.0) for m in study.methods]
    rates.write_chosen(tmp_path / "chosen.csv", study, tuned)
    only = {"seed": ["1"], "algorithm": list(study.methods)}
    grid = grid_points(sweep.STUDIES["reduced_falsified"], only)
    points, keys = with_settings(grid, tmp_path / "chosen.csv")
    assert keys == ["training.learning_rate"] and len(points) == len(study.methods)
    for point in points:
        rate = 0.3 if "PFA" in point.values["algorithm"] else 0.1
        config = load_config(sweep.HERE / study.file, point.words)
        assert config.training.learning_rate == rate and config.run.rounds == rates.ROUNDS


@pytest.mark.parametrize("name", rates.STUDIES)
def test_studies_name_methods_and_cells_of_the_sweeps(name):
    study = rates.STUDIES[name]
    assert (sweep.HERE / study.file).is_file()
    assert len(set(study.cells)) == len(study.cells) and rates.TUNED_ON not in rates.SEEDS
    for distribution, clients in study.cells:
        assert distribution in sweep.BUDGETS and clients in (20, 40, 60)
    assert all(rates.tuned_as(method) in study.methods for method in study.methods)


def test_workers_find_what_one_process_finds(tmp_path, monkeypatch):
    """Rates are chosen before other seeds run, and a call continues where one stopped."""
    methods = {"WeiAvg": (), "PFA": ()}
    study = rates.Study("mnist.toml", methods, (("Dist5", 20), ("Dist6", 20)))
    monkeypatch.setattr(rates, "STUDIES", {"mnist": study})
    taken = []

    def results(study, lanes, cell, seed):
        taken.append((cell, seed, [*lanes]))
        data = "held out" if seed == rates.TUNED_ON else "test"
        accuracy = {0.1: 90.0, 0.2: 80.0}
        return [
            row(lane.method, lane.rate, accuracy.get(lane.rate, 50.0), seed, data, cell[0])
            for lane in lanes
        ]

    monkeypatch.setattr(rates, "results", results)
    rates.main(["mnist", "--output", str(tmp_path / "one")])
    alone, taken[:] = [*taken], []
    assert len(alone) == 2 * 2 + 2 * len(rates.SEEDS)
    assert all(lane.rate == 0.1 for _, seed, lanes in alone[4:] for lane in lanes if seed)
    words = ["mnist", "--output", str(tmp_path / "two"), "--on", "local"]
    with ThreadPoolExecutor(2) as pool:
        opened = contextlib.nullcontext(Cluster(pool, 2))
        monkeypatch.setattr(rates, "workers", lambda known, folder: opened)
        rates.main([*words, "--seconds", "-1"])
        assert not taken
        rates.main(words)
        assert sorted(taken) == sorted(alone)
        taken.clear()
        rates.main(words)
        assert not taken
    one, two = (rates.read(tmp_path / name / "mnist.csv") for name in ("one", "two"))
    assert sorted(map(str, one)) == sorted(map(str, two))
    one, two = ((tmp_path / name / "chosen" / "mnist.csv").read_text() for name in ("one", "two"))
    assert one == two


def test_the_error_of_a_worker_ends_the_others():
    def part(number):
        if number == 1:
            raise ValueError("one failed")
        return 10 * number

    with ThreadPoolExecutor(2) as pool:
        cluster = Cluster(pool, 2)
        found = each_of(part, ((number,) for number in range(5, 9)), cluster)
        assert sorted(found) == [((n,), 10 * n) for n in range(5, 9)]
        items = ((number,) for number in itertools.count())
        with pytest.raises(ValueError, match="one failed"):
            [*each_of(part, items, cluster)]
        assert next(items) <= (4,), "no more than were begun"
