"""First rounds alone: what of their updates is kept, fitted and drawn."""

import jax
import numpy as np
import pytest
from marks import telling

from experiments.clustered_dp import first_round as clustered
from experiments.clustered_dp import number_of_clusters
from experiments.clustered_dp.grid import true_clusters
from experiments.heterogeneous_dp import first_round as unequal
from experiments.heterogeneous_dp import noise
from fedjax_dp.experiment import assemble, load_config
from fedjax_dp.experiment.running.starting import new_root
from fedjax_dp.privacy.accounting import budgets
from fedjax_dp.server.clustering import Similarity

TRUE = np.repeat(np.arange(4), (3, 6, 6, 6))


def similarity_of(updates):
    """Inner products of centred updates, in float64."""
    centred = updates - updates.mean(axis=0)
    return Similarity(centred @ centred.T, centred @ centred.T, np.ones(len(updates), bool))


def updates_of(spread, seed=0):
    rng = np.random.default_rng(seed)
    return 10 * np.eye(4, 30)[TRUE] + spread * rng.normal(size=(21, 30))


def test_distances_are_those_of_the_mean_updates():
    updates = updates_of(3.0)
    means = np.stack([updates[c == TRUE].mean(axis=0) for c in range(4)])
    found = {
        row["pair"]: row["distance"] for row in clustered.distances(similarity_of(updates), TRUE)
    }
    assert list(found) == ["0-1", "0-2", "0-3", "1-2", "1-3", "2-3"]
    for pair, distance in found.items():
        a, b = map(int, pair.split("-"))
        assert distance == pytest.approx(np.linalg.norm(means[a] - means[b]), rel=1e-9)


def test_a_mixture_of_each_size_is_compared_with_the_true_clusters():
    clear = {
        row["models"]: row for row in clustered.mixtures(similarity_of(updates_of(0.3)), TRUE, 0)
    }
    assert list(clear) == list(range(2, 11))
    assert [m for m, row in clear.items() if row["found"]] == [4]
    assert clear[4]["separation"] == max(clear[m]["separation"] for m in (2, 3, 4, 5)) > 3
    vague = {
        row["models"]: row for row in clustered.mixtures(similarity_of(updates_of(30.0)), TRUE, 0)
    }
    assert not vague[4]["found"] and vague[4]["separation"] < 2 < clear[4]["separation"]


def test_points_change_one_thing_at_a_time_and_are_valid():
    points = clustered.points()
    assert len(set(points)) == len(points)
    base = clustered.Point()
    for point in points:
        differing = [name for name in base._fields if getattr(point, name) != getattr(base, name)]
        whole = point.first == point.num_examples
        assert (whole or differing == ["first"]) and (point.components == 2 or whole)
    config = clustered.setting(300, 2)
    assert config.algorithm.options == {"num_models": 4, "first_batch_size": 300}
    assert (config.run.seed, config.data.partition_options["samples_per_client"]) == (2, 300)


def test_curves_are_means_with_deviations_of_the_rows_they_name():
    shown = {"num_examples": 600, "first": 600, "later": 32, "epsilon": 10.0, "components": 2}
    shown["models"] = 4
    rows = [
        {
            **shown,
            **changes,
            "seed": seed,
            "separation": value + seed,
            "steps": 2 * value,
            "found": 1,
        }
        for seed in (0, 1)
        for value, changes in [
            (5.0, {}),
            (4.0, {"later": 64}),
            (3.0, {"first": 32}),
            (2.0, {"models": 5}),
            *((1.0, {"epsilon": e}) for e in clustered.EPSILONS if e != 10),
            *(
                (0.5, {"num_examples": n, "first": n, "later": later, "epsilon": e})
                for n in clustered.SIZES
                for later in (16, 32)
                for e in (3.0,)
                if (n, later) != (600, 32)
            ),
        ]
    ]
    apart = [{"first": b, "seed": 0, "pair": "0-1", "distance": 64 / b} for b in (32, 64)]
    figures = clustered.draw(rows, apart)

    def line(name, index=0):
        return figures[name].axes[0].get_lines()[index].get_xydata()

    np.testing.assert_allclose(line("steps"), [[32, 6], [600, 10]])
    np.testing.assert_allclose(line("separation_by_later"), [[32, 5.5], [64, 4.5]])
    ten = clustered.EPSILONS.index(10.0)
    np.testing.assert_allclose(line("separation_by_models,components=2", ten), [[4, 5.5], [5, 2.5]])
    np.testing.assert_allclose(line("separation_by_epsilon", 2), [[3, 1.0]])
    np.testing.assert_allclose(line("distances"), [[32, 2], [64, 1]])
    places, means, spread = clustered.curve(
        rows[:1] + rows[len(rows) // 2 :][:1], "later", "separation"
    )
    assert (places, means) == ([32], [5.5]) and spread[0] == pytest.approx(np.sqrt(0.5))


def test_an_interrupted_run_resumes_with_what_is_left(tmp_path, monkeypatch):
    drawn, calls = [], []
    monkeypatch.setattr(clustered.plots, "save", lambda figure, path: drawn.append(path.name))
    monkeypatch.setattr(clustered, "noise_multiplier", lambda point, config: hash(point))
    mixture = {"models": 4, "separation": 1.5, "steps": 3, "found": 1}
    monkeypatch.setattr(clustered, "mixtures", lambda *_: [mixture])

    def round_of(self, seed, first, z):
        calls.append((self.num_examples, seed, first, z))
        if len(calls) == 40:
            raise KeyboardInterrupt
        return similarity_of(updates_of(0.3, seed))

    monkeypatch.setattr(clustered.FirstRounds, "run", round_of)
    with pytest.raises(KeyboardInterrupt):
        clustered.run([0, 1], tmp_path)
    found, apart = clustered.run([0, 1], tmp_path)
    assert clustered.run([0, 1], tmp_path, seconds=0.0) == (found, apart)
    one = len(clustered.points())
    assert len(found) == 2 * one and len(apart) == 2 * 5 * 6
    assert len(calls) == 2 * (one + 5) + 1 and len(set(calls)) == 2 * (one + 5)
    assert set(clustered.draw(found, apart)) >= {"steps", "distances"}
    assert drawn == ["updates,first=32.png", "updates,first=600.png"]


SMALL = (
    *("--run.rounds=4", "--data.name=digits", "--data.partition=shifted_clusters"),
    "--data.partition_options.cluster_sizes=[1, 2]",
    "--data.partition_options.samples_per_client=40",
    "--data.partition_options.test_samples_per_client=10",
    *("--training.batch_size=20", "--training.learning_rate=0.5", "--privacy.unit=record"),
    *(
        "--privacy.record.clip_norm=0.5",
        "--privacy.record.epsilon=8",
        "--privacy.record.dp_delta=1e-4",
    ),
    *("--algorithm.name=r_dpcfl", "--algorithm.options={ num_models = 2, first_batch_size = 40 }"),
)


@telling
def test_a_whole_first_batch_without_noise_is_one_clipped_step(monkeypatch):
    """Logistic regression by hand: -η times the mean of clipped gradients (p - y) xᵀ."""
    config = load_config(None, SMALL)
    monkeypatch.setattr(clustered, "setting", lambda num_examples, seed: config)
    rounds = clustered.FirstRounds(40)
    found = rounds.run(0, 40, 0.0)
    built, true = assemble(config), true_clusters(config)
    models = built.simulation.init(new_root(config.run)).server.models
    weights, bias = (
        np.float64(leaf[0]) for leaf in sorted(jax.tree.leaves(models), key=np.ndim, reverse=True)
    )
    steps = []
    for client in range(3):
        examples = built.population.train.client(client)
        x = np.float64(examples["x"]).reshape(40, -1)
        scores = np.exp(x @ weights + bias)
        residual = scores / scores.sum(axis=1, keepdims=True) - np.eye(10)[examples["y"]]
        outer = np.einsum("np,nc->npc", x, residual).reshape(40, -1)
        gradient = np.concatenate([outer, residual], axis=1)
        norm = np.linalg.norm(gradient, axis=1, keepdims=True)
        steps.append(-0.5 * (gradient * np.minimum(1, 0.5 / norm)).mean(axis=0))
    expected = similarity_of(np.array(steps))
    np.testing.assert_allclose(found.scatter, expected.scatter, rtol=1e-3, atol=1e-7)
    [here], [there] = (list(clustered.distances(s, true)) for s in (found, expected))
    assert here["distance"] == pytest.approx(there["distance"], rel=1e-3)
    # The same program with smaller batches takes two steps, and with noise another way.
    assert rounds.run(0, 20, 0.0).scatter.trace() > 2 * found.scatter.trace()
    assert rounds.run(0, 40, 3.0).scatter.trace() > 2 * found.scatter.trace()


@telling
def test_a_first_step_is_that_of_the_round_and_its_noise_too(monkeypatch):
    """With z = 1,000 noise is all that a round has: (n - 1) p (z η C / N)² of it, within 4 %."""
    config = load_config(None, SMALL)
    monkeypatch.setattr(clustered, "setting", lambda num_examples, seed: config)
    step = number_of_clusters.first_step({8.0: config})
    rounds, centred = clustered.FirstRounds(40), step.updates - step.updates.mean(axis=0)
    found = rounds.run(0, 40, 0.0)
    np.testing.assert_allclose(found.scatter, centred @ centred.T, rtol=1e-3, atol=1e-7)
    size = step.updates.shape[1]
    np.testing.assert_allclose(step.noise, 0.5 * 0.5 / 40)
    expected = 2 * size * (1000 * step.noise[0]) ** 2
    assert rounds.run(0, 40, 1000.0).scatter.trace() == pytest.approx(expected, rel=0.15)
    # That of a run that is calibrated to the budget, with its private choices.
    z = assemble(config).simulation.hyper.local.noise_multiplier
    assert step.multipliers == {8.0: pytest.approx(float(np.max(z)))}
    np.testing.assert_array_equal(step.true, [0, 1, 1])


def test_more_noise_hides_the_clusters(monkeypatch):
    monkeypatch.setattr(number_of_clusters, "MODELS", range(2, 6))
    updates = updates_of(0.3)
    step = number_of_clusters.FirstStep(updates, np.full(21, 0.1), {8.0: 0.0, 1.0: 300.0}, TRUE)
    rows = list(number_of_clusters.rows_of(step, 0, 1))
    kinds = [(row["epsilon"], row["features"], row["components"]) for row in rows]
    assert kinds == [(e, *how) for e in (8.0, 1.0) for how in number_of_clusters.FEATURES]
    # Most of these coordinates are noise, which the published features scale up.
    clear, hidden = [row for row in rows[:3] if row["features"] == "centred"], rows[3:]
    assert [row["found"] for row in clear] == [1, 1] and not any(row["found"] for row in hidden)
    assert all(row["separation"] > 2 for row in clear)
    assert all(row["separation"] < 2 for row in hidden)
    assert rows[2]["plain"] == rows[2]["adjusted"] == 4


def test_cells_that_a_file_has_are_not_run_again(tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr(number_of_clusters, "first_step", lambda by_epsilon: by_epsilon)
    monkeypatch.setattr(
        number_of_clusters, "configs", lambda setting, seed: taken.append((setting, seed))
    )
    monkeypatch.setattr(
        number_of_clusters, "rows_of", lambda step, seed, draws: [{"seed": seed, "a": draws}]
    )
    path = tmp_path / "found.csv"
    first = number_of_clusters.run(["mnist"], [0], 1, path)
    assert first == [{"setting": "mnist", "seed": 0, "a": 1}]
    both = number_of_clusters.run(["mnist", "fashion_mnist"], [0, 1], 1, path)
    assert len(both) == 4 and both[0] == first[0]
    cells = [(setting, seed) for seed in (0, 1) for setting in ("mnist", "fashion_mnist")]
    assert taken == cells
    number_of_clusters.run(["mnist"], [2], 1, path, seconds=0.0)
    assert taken == cells


def test_weights_of_figure_e2_are_those_of_each_method():
    found = unequal.weights_of("Dist8", np.arange(20.0))
    epsilon = budgets.published_budgets("Dist8", 20)
    np.testing.assert_allclose(found["WeiAvg"], epsilon / epsilon.sum())
    batch = budgets.published_batch_sizes(20)
    inverse = batch**2 / np.ceil(2400 / batch) / noise.multipliers(epsilon, batch) ** 2
    np.testing.assert_allclose(found["oracle"], inverse / inverse.sum(), rtol=1e-9)
    np.testing.assert_array_equal(found["Robust-HDP"], np.arange(20.0))


@telling
def test_the_low_rank_part_leaves_the_noise_that_weights_are_made_of(monkeypatch):
    """‖M − L‖² of a client's row is its noise level, whose inverse is its weight."""
    words = (
        *("--data.partition=iid", "--data.num_clients=20", "--run.rounds=1"),
        *("--training.batch_size=heterogeneous", "--training.learning_rate=0.05"),
        *("--algorithm.name=robust_hdp", "--privacy.unit=record", "--privacy.record.epsilon=Dist3"),
        *("--privacy.record.dp_delta=1e-4", "--privacy.record.noise_multiplier=1"),
    )
    monkeypatch.setattr(unequal, "load_config", lambda file, more: load_config(None, words))
    metrics = {name: one for name, _, one in unequal.first_rounds([0])}
    assert set(metrics) == {"Dist3", "Dist8", "Dist9"}
    for one in metrics.values():
        rest = np.sum(np.square(np.float64(one["M"]) - one["L"]), axis=1)
        # Rows are in the order of slots.
        np.testing.assert_allclose(np.sort(rest), np.sort(one["noise_levels"]), rtol=2e-3)
        weights = np.sort(1 / rest / np.sum(1 / rest))
        np.testing.assert_allclose(np.sort(one["weights"]), weights, rtol=5e-3)
    # The same data and batches, with another noise.
    assert not np.allclose(metrics["Dist3"]["M"], metrics["Dist9"]["M"], rtol=0.1)


def test_figure_e1_shows_singular_values_over_the_largest_of_m():
    rows = [
        {"distribution": name, "seed": seed, "matrix": matrix, "rank": r, "value": v * (1 + seed)}
        for name in ("Dist3", "Dist9")
        for seed in (0, 1)
        for matrix, values in (("M", (4.0, 2.0)), ("L", (1.0, 0.5)))
        for r, v in enumerate(values, start=1)
    ]
    lines = unequal.draw_spectra(rows).axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["M, Dist3", "L, Dist3", "M, Dist9", "L, Dist9"]
    np.testing.assert_allclose(lines[0].get_xydata(), [[1, 1], [2, 0.5]])
    np.testing.assert_allclose(lines[1].get_xydata(), [[1, 0.25], [2, 0.125]])


def test_kept_tables_of_a_first_round_are_drawn_again(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(unequal.plots, "save", lambda f, path: drawn.__setitem__(path.name, f))
    values = [
        {"distribution": name, "seed": 4, "matrix": matrix, "rank": r, "value": 1 / r}
        for name in ("Dist3", "Dist9")
        for matrix in ("M", "L")
        for r in (1, 2)
    ]
    weights = [
        {"distribution": name, "seed": 4, "method": "oracle", "client": c, "weight": w}
        for name in ("Dist3", "Dist8")
        for c, w in ((0, 0.25), (1, 0.75))
    ]
    unequal.write(tmp_path / "singular_values.csv", values)
    unequal.write(tmp_path / "weights.csv", weights)
    assert unequal.read(tmp_path / "weights.csv") == weights
    unequal.main(["--draw", "--output", str(tmp_path)])
    [line] = drawn["weights.png"].axes[0].get_lines()
    np.testing.assert_allclose(line.get_ydata(), [0.75, 0.25])
    spectrum = drawn["singular_values.png"].axes[0].get_lines()[0]
    np.testing.assert_allclose(spectrum.get_xydata(), [[1, 1], [2, 0.5]])


@telling
def test_figures_h4_and_h5_have_the_weights_of_sixty_clients(tmp_path, monkeypatch):
    drawn, asked = {}, []
    monkeypatch.setattr(unequal.plots, "save", lambda f, path: drawn.__setitem__(path.name, f))
    monkeypatch.setattr(unequal, "simulation_of", lambda *words: (words, None))

    def round_of(words, key, z):
        asked.append((words, z))
        return {"weights": np.arange(60) / 1770}

    monkeypatch.setattr(unequal, "_round_of", round_of)
    unequal.main(["--skewed", "--seeds", "5", "--output", str(tmp_path)])
    rows = unequal.read(tmp_path / "skewed_weights.csv")
    epsilon = budgets.published_budgets("Dist1", 60)
    steps = {"equal": np.full(60, 7.0), "own": np.ceil(800 / budgets.published_batch_sizes(60))}
    batch = {"equal": np.full(60, 128.0), "own": budgets.published_batch_sizes(60)}
    for (words, z), kind in zip(asked, steps, strict=True):
        assert words[:2] == (5, "mnist_label_skew.toml")
        assert words[2].endswith("128" if kind == "equal" else "heterogeneous")
        inverse = batch[kind] ** 2 / steps[kind] / z**2
        found = [r for r in rows if (r["batch_sizes"], r["method"]) == (kind, "oracle")]
        assert [row["client"] for row in found] == list(range(60))
        np.testing.assert_allclose([r["weight"] for r in found], inverse / inverse.sum())
        np.testing.assert_allclose([r["epsilon"] for r in found], epsilon)
        # Clients stand in the order of their budgets.
        lines = drawn[f"skewed_weights_{kind}.png"].axes[0].get_lines()
        [line] = [line for line in lines if line.get_label() == "WeiAvg"]
        np.testing.assert_allclose(line.get_ydata(), np.sort(epsilon) / epsilon.sum())
