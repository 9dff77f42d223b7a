"""The LaTeX table and the picture of a sweep."""

import re

import numpy as np
import pytest
import scipy.stats
from marks import slow

from fedjax_dp.experiment.studies import paper
from fedjax_dp.experiment.studies.sweep import Study, average_over_seeds
from fedjax_dp.io import plots

NAME, RATE, BUDGET = "algorithm.name", "training.learning_rate", "privacy.record.epsilon"


def study_of(*axes):
    """A study of such axes; values matter to nothing that is tested here."""
    metrics = {"test_accuracy": 1.0, "worst_client_accuracy": 1.0, "epsilon": 1.0}
    each = {axis: {} for axis in (*axes, "seed")}
    return Study(name="fashion_mnist", file=None, axes=each, rows="", columns="", metrics=metrics)


def rows_of(points, **more):
    """Summaries of points, `{values of axes: accuracies by seed}`, of the axes of `more`."""
    axes = more.pop("axes")
    return [
        {**dict(zip(axes, values, strict=True)), "seed": str(i), "test_accuracy": accuracy, **more}
        for values, accuracies in points.items()
        for i, accuracy in enumerate(accuracies)
    ]


def cells_of(latex):
    lines = [line for line in latex.splitlines() if line.endswith(r" \\")]
    return [line.removesuffix(r" \\").split(" & ") for line in lines]


def caption_of(latex):
    return re.search(r"\\caption\{(.*)\}$", latex, re.MULTILINE)[1]


def test_the_best_is_apart_where_the_interval_of_the_difference_by_welch_is():
    """SciPy's interval of a pair of samples, at the level of one, and of one of three pairs."""
    rng, apart = np.random.default_rng(0), []
    for _ in range(60):
        samples = [rng.normal(0, 1, 4), *(rng.normal(gap, s, 5) for gap, s in ((-2, 0.5), (-3, 2)))]
        if max(samples, key=np.mean) is not samples[0]:
            continue
        for count in (1, 2):
            others = samples[1 : 1 + count]
            tests = [scipy.stats.ttest_ind(samples[0], o, equal_var=False) for o in others]
            level = 1 - 0.05 / count
            expected = all(t.confidence_interval(level).low > 0 for t in tests)
            found = paper.clear_best([samples[0].tolist(), *(o.tolist() for o in others)])
            assert (found == 0) == expected
            apart.append(expected)
        low = paper.clear_best([[-x for x in each] for each in samples], larger_is_better=False)
        assert (low == 0) == expected
    assert 10 < sum(apart) < len(apart) - 10
    assert paper.clear_best([[0.9], [0.1]]) is None and paper.clear_best([[0.9, 0.8]]) is None
    assert paper.clear_best([[0.9, 0.9], [0.9, 0.9]]) is None


def test_a_table_has_errors_of_means_and_the_epsilon_of_each_point():
    points = {
        ("dp_sgd", "2"): [0.5, 0.52],
        ("a_b & 5%", "2"): [0.8, 0.82],
        ("dp_sgd", "8"): [0.7, 0.9],
        ("a_b & 5%", "8"): [0.71, 0.91],
    }
    rows = rows_of(points, axes=(NAME, BUDGET), dp_delta=1e-5)
    for row in rows:
        # Rounded up, and the larger one of two seeds.
        row["epsilon_record"] = float(row[BUDGET]) - 0.00021 + 0.0001 * int(row["seed"])
    latex = paper.as_latex(study_of(NAME, BUDGET), rows)
    head, *lines = cells_of(latex)
    assert head == ["name", r"$\varepsilon$", r"test accuracy (\%)"]
    assert [line[1] for line in lines] == ["$2$", "$2$", "$8$", "$8$"]
    # The deviation of two numbers over the root of two is half their difference.
    assert [line[2] for line in lines] == [
        r"$51.00 \pm 1.00$",
        r"$\mathbf{81.00} \pm 1.00$",
        r"$80.00 \pm 10.00$",
        r"$81.00 \pm 10.00$",
    ]
    assert [line[0] for line in lines] == ["DP-SGD", r"a\_b \& 5\%"] * 2
    words = caption_of(latex)
    assert words.startswith(
        r"Fashion-MNIST: test accuracy: mean $\pm$ standard error over 2 seeds."
    )
    assert r"for one record: $\varepsilon$ at $\delta = 10^{-5}$, of a single run." in words
    assert r"of the same $\varepsilon$" in words and "is not covered" in words
    assert r"\begin{tabular}{lrr}" in latex and latex.count(r"\toprule") == 1


def test_what_all_points_share_is_in_the_caption_alone():
    points = {("fedavg", "0.1"): [0.5], ("fedavg", "1e-3"): [0.6]}
    rows = rows_of(points, axes=(NAME, RATE), dp_delta=2.5e-6, epsilon_client=3.0004)
    latex = paper.as_latex(study_of(NAME, RATE), rows)
    head, *lines = cells_of(latex)
    assert head == ["learning rate", r"test accuracy (\%)"]
    assert lines == [["$0.1$", "$50.00$"], ["$10^{-3}$", "$60.00$"]]
    words = caption_of(latex)
    assert r"one client: $\varepsilon = 3.001$ at $\delta = 2.5 \cdot 10^{-6}$" in words
    assert "one seed" in words and "Bold" not in words and "standard error" not in words


def test_each_unit_has_the_delta_of_the_lines_that_protect_it():
    accuracies = {("dp_sgd",): [0.5, 0.6], ("dp_fedavg",): [0.7, 0.8], ("fedavg",): [0.8, 0.9]}
    rows = rows_of(accuracies, axes=(NAME,))
    units = {"dp_sgd": ("record", 4.0, 1e-5), "dp_fedavg": ("client", 8.0, 1e-3)}
    for row in rows:
        if row[NAME] in units:
            unit, epsilon, delta = units[row[NAME]]
            row |= {"epsilon": epsilon, f"epsilon_{unit}": epsilon}
            row |= {"dp_delta": delta, f"dp_delta_{unit}": delta}
    study = study_of(NAME)
    words = caption_of(paper.as_latex(study, rows))
    assert r"for one record: $\varepsilon$ at $\delta = 10^{-5}$," in words
    assert r"for one client: $\varepsilon$ at $\delta = 0.001$," in words
    # No two lines have one ε, of which one could be the best.
    assert "Bold" not in words
    _, *lines = cells_of(paper.as_latex(study, rows))
    assert [line[1:3] for line in lines] == [["$4$", "--"], ["--", "$8$"], ["none", "none"]]
    rows[0]["dp_delta_record"] = 1e-6
    assert r"for one record: $\varepsilon$ at $\delta \leq 10^{-5}$," in caption_of(
        paper.as_latex(study, rows)
    )


def test_a_metric_is_a_column_bold_if_its_better_direction_is_known():
    rows = rows_of({("a",): [0.5, 0.6], ("b",): [0.7, 0.8]}, axes=(NAME,), epsilon_record=1.0)
    for row in rows:
        is_b = row[NAME] == "b"
        row |= {"test_mine": 5.0 + is_b + 1e-3 * int(row["seed"]), "test_confusion": [[1, 0]]}
        row |= {"test_f1": 0.5 + 0.3 * is_b + 1e-3 * int(row["seed"])}
    metrics = {"test_mine": 1.0, "test_f1": 1.0, "test_confusion": 1.0}
    latex = paper.as_latex(study_of(NAME)._replace(metrics=metrics), rows)
    head, one, other = cells_of(latex)
    assert len(head) == 3 and "confusion" not in latex
    assert "mathbf" not in one[1] + other[1] + one[2] and "mathbf" in other[2]
    entries = average_over_seeds(study_of(NAME)._replace(metrics=metrics), rows)
    assert {entry["metric"] for entry in entries} == {"test_mine", "test_f1"}


@pytest.mark.parametrize("epsilon", [None, "inf"])
def test_a_run_without_privacy_claims_none(epsilon):
    rows = rows_of({("0.1",): [0.5, 0.6], ("0.2",): [0.5]}, axes=(RATE,))
    if epsilon is None:
        latex = paper.as_latex(study_of(RATE), rows)
        assert "No differential privacy is claimed." in caption_of(latex)
    else:
        latex = paper.as_latex(study_of(RATE), [row | {"epsilon": epsilon} for row in rows])
        assert r"$\varepsilon = \infty$" in caption_of(latex)
    assert [line[1] for line in cells_of(latex)] == ["seeds", "2", "1"]
    assert "over 1 to 2 seeds" in caption_of(latex)


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws the points of a grid, and gives the axes."""
    found = []
    monkeypatch.setattr(plots, "save", lambda figure, file: found.append(figure.axes[0]))

    def draw(points, axes, **more):
        study = study_of(*axes)
        rows = rows_of(points, axes=axes, **more)
        for row in rows:
            row.setdefault("epsilon", float(row.get(BUDGET, 4)))
        paper.draw(study, average_over_seeds(study, rows), tmp_path / "accuracy.png")
        return found.pop()

    return draw


def labels_of(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


@slow
def test_labels_have_what_differs_between_curves_and_no_keys(drawn):
    names = ("fedavg", "dp_fedavg")
    grid = {(n, r, b, "3"): [0.5] for n in names for r in ("0.1", "0.5") for b in ("2", "8")}
    axes = drawn(grid, (NAME, RATE, BUDGET, "data.num_clients"))
    assert axes.get_xlabel() == "ε" and axes.get_title() == "Fashion-MNIST"
    named = [f"{n}, learning rate {r}" for n in ("FedAvg", "DP-FedAvg") for r in ("0.1", "0.5")]
    assert labels_of(axes) == named
    assert [line.get_xdata().tolist() for line in axes.get_lines()] == [[2, 8]] * 4


@slow
def test_without_budgets_accuracies_are_by_a_number_of_the_grid_or_by_name(drawn):
    grid = {(n, r): [0.5, 0.7] for n in ("fedavg", "scaffold") for r in ("0.5", "0.1", "1.0")}
    axes = drawn(grid, (NAME, RATE))
    assert axes.get_xlabel().startswith("learning rate\nband: ± 1 standard deviation")
    assert labels_of(axes) == ["FedAvg", "SCAFFOLD"]
    assert axes.get_lines()[0].get_xdata().tolist() == [0.1, 0.5, 1.0]
    alone = drawn({("0.5",): [0.5], ("0.1",): [0.6]}, (RATE,))
    assert alone.get_legend() is None
    axes = drawn({("fedavg",): [0.5], ("scaffold",): [0.7]}, (NAME,))
    assert [text.get_text() for text in axes.get_yticklabels()] == ["FedAvg", "SCAFFOLD"]
    assert axes.get_lines()[0].get_xdata().tolist() == [0.5, 0.7]


@slow
def test_keys_that_end_alike_are_told_apart_by_their_section(drawn):
    keys = ("privacy.client.clip_norm", "privacy.record.clip_norm", "model.name")
    grid = {(a, b, "x"): [0.5] for a in ("1", "2") for b in ("3", "4", "5")}
    axes = drawn(grid, keys)
    assert axes.get_xlabel() == "record clip norm"
    assert labels_of(axes) == ["client clip norm 1", "client clip norm 2"]
