"""Facts of the data that a statement rests on: how features were scaled, who shares a record."""

import tomllib

import numpy as np
import pytest
from marks import telling
from run_folders import execute, read_json

from fedjax_dp.data import datasets
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.assembly.assemble import assemble, population_of
from fedjax_dp.experiment.components import numbers_by_client
from fedjax_dp.experiment.reading import validate as validation
from fedjax_dp.experiment.running.results import facts_of, partition_text
from fedjax_dp.io import plots

UNITS = {
    "record": ("--privacy.unit=record",),
    "client": ("--privacy.unit=client", "--algorithm.name=dp_fedavg"),
    "both": ("--privacy.unit=both", "--algorithm.name=dp_fedavg"),
    "none": ("--privacy.unit=none", "--algorithm.name=fedavg"),
}
TABLES = ("adult", "heart_disease", "kddcup99")


def checked(unit, name, *words):
    validation.validate(load_config(None, (*UNITS[unit], f"--data.name={name}", *words)))


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("unit", ["record", "client", "both"])
def test_exact_scaling_under_privacy_is_asked_for_by_its_name_or_refused(unit, name):
    with pytest.raises(ValueError, match=r"data\.options\.scaling must be given.*'range' scales"):
        checked(unit, name)
    for scaling in ("range", "standard"):
        checked(unit, name, f"--data.options.scaling={scaling}")


@pytest.mark.parametrize("name", TABLES)
def test_where_nothing_is_protected_tables_are_scaled_as_ever(name):
    checked("none", name)


def test_data_without_exact_scaling_are_not_asked():
    checked("record", "digits")


HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
# Not in the order of the clients, which is the alphabet.
BUDGETS = {"va": 8.0, "cleveland": 1.0, "switzerland": 4.0, "hungarian": 2.0}
NUMBERS = (
    "client, privacy.record.epsilon, training.batch_size",
    *(f"{name}, {epsilon}, {4 + i}" for i, (name, epsilon) in enumerate(BUDGETS.items())),
)


def heart(folder, *words):
    """Four hospitals of a few patients each; a run of seconds."""
    return (
        *("--data.name=heart_disease", f"--data.data_dir={folder}"),
        *("--data.options.scaling=range", "--run.rounds=1"),
        *("--execution.clients_per_chunk=1", "--execution.devices=1", *words),
    )


@pytest.fixture(scope="module")
def data_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "heart_disease").mkdir()
    rng = np.random.default_rng(0)
    for hospital in HOSPITALS:
        rows = [
            f"{rng.integers(30, 80)},1,{1 + j % 4},130,250,0,0,150,0,1.5,2,0,3,{j % 2}"
            for j in range(24)
        ]
        path = folder / "heart_disease" / f"processed.{hospital}.data"
        path.write_text("\n".join(rows) + "\n")
    (folder / "numbers.csv").write_text("\n".join(NUMBERS) + "\n")
    return folder


@pytest.fixture(scope="module")
def run_folder(data_files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("named") / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plots, "save", lambda figure, path: None)
        words = heart(data_files, f"--data.client_numbers={data_files / 'numbers.csv'}")
        assert execute(folder, *words)[0] == 0
    return folder


def table(text):
    lines = [line for line in text.partition("## Files")[0].splitlines() if line[:2] == "| "]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@telling
def test_names_stand_in_statement_partition_and_configuration(run_folder):
    claim = read_json(run_folder, "privacy.json")["claims"][0]
    assert tuple(claim["client_names"]) == HOSPITALS
    header, *rows = table((run_folder / "privacy.md").read_text("utf-8"))
    assert header[0] == "client" and tuple(row[0] for row in rows) == HOSPITALS
    spent = {row[0]: float(row[1]) for row in rows}
    for name, budget in BUDGETS.items():
        assert 0.5 * budget < spent[name] <= budget
    written = tomllib.loads((run_folder / "config.toml").read_text("utf-8"))
    assert written["privacy"]["record"]["epsilon"] == BUDGETS
    assert written["training"]["batch_size"] == dict(zip(BUDGETS, (4, 5, 6, 7), strict=True))
    assert "client_numbers" not in written["data"]
    lines = (run_folder / "partition.txt").read_text("utf-8").splitlines()
    assert [line.partition(":")[0] for line in lines[-4:]] == list(HOSPITALS)


@pytest.mark.slow
def test_a_run_with_names_is_resumed_from_what_its_folder_holds(run_folder, monkeypatch):
    before = read_json(run_folder, "summary.json")
    monkeypatch.setattr(plots, "save", lambda figure, path: None)
    assert execute(run_folder, resume=True)[0] == 0
    assert read_json(run_folder, "summary.json")["epsilon"] == before["epsilon"]


def test_the_text_of_a_partition_names_its_clients(data_files):
    config = load_config(None, heart(data_files))
    text = partition_text(population_of(config))
    assert [line.partition(":")[0] for line in text.splitlines()[-4:]] == list(HOSPITALS)


def test_records_that_clusters_share_are_counted_and_stated():
    """A partition of 3 clients, each of which draws 100 of the pool's 1,437 digits."""
    words = (
        "--data.partition=shifted_clusters",
        "--data.partition_options={cluster_sizes=[2, 1], samples_per_client=100}",
        "--data.options={}",
        "--privacy.record.noise_multiplier=1",
        "--privacy.record.epsilon=none",
    )
    population = population_of(load_config(None, words))
    pool = datasets.load("digits").train["x"].reshape(1437, -1)
    place = {row.tobytes(): i for i, row in enumerate(pool)}
    assert len(place) == len(pool)
    copies = population.train.examples["x"].reshape(300, -1)
    # The first cluster is not turned, the second by a quarter.
    turned = np.rot90(population.train.client(2)["x"], -1, axes=(1, 2)).reshape(100, -1)
    held = [place[row.tobytes()] for row in (*copies[:200], *np.ascontiguousarray(turned))]
    counts = np.bincount(held)
    assert population.sharing == (np.sum(counts > 1), counts.max())
    assert population.sharing.num_shared > 5
    assert population.statistics().num_shared == population.sharing.num_shared
    disjoint = population_of(load_config(None, ("--data.partition=iid",)))
    assert disjoint.sharing == (0, 1)


def test_clients_draw_from_a_common_pool_and_are_tested_on_the_test_part():
    """3 clients of 1,437 digits, whose inputs are scaled to norm 1 by the configuration."""
    words = (
        *("--data.partition=common_pool", "--data.num_clients=3", "--data.options={}"),
        *("--data.partition_options={samples_per_client=600}", "--data.input_norm=1"),
    )
    population = population_of(load_config(None, words))
    digits = datasets.load("digits")
    pool = digits.train["x"].reshape(1437, -1).astype(np.float64)
    pool /= np.maximum(1, np.linalg.norm(pool, axis=1))[:, None]
    copies = population.train.examples["x"].reshape(3, 600, -1).astype(np.float64)
    # The nearest row of the pool, by |a - b|² = |a|² - 2 (ab - |b|²/2).
    held = np.argmax(copies @ pool.T - np.sum(pool**2, axis=1) / 2, axis=2)
    assert np.linalg.norm(copies - pool[held], axis=2).max() < 1e-5
    # Without replacement, in random order, each client by itself: 600/1,437 of another's rows.
    assert all(len(set(rows.tolist())) == 600 for rows in held)
    assert np.abs(np.corrcoef(np.arange(600), held[0])[0, 1]) < 0.2
    both = len(set(held[0].tolist()) & set(held[1].tolist()))
    assert abs(both - 600 * 600 / 1437) < 5 * np.sqrt(600 * 0.42 * 0.58)
    np.testing.assert_array_equal(population.train.examples["y"], digits.train["y"][held.ravel()])
    counts = np.bincount(held.ravel())
    assert population.sharing == (np.sum(counts > 1), counts.max())
    assert population.client_test is None and population.test.sizes.tolist() == [360]
    more = load_config(None, (*words[:-2], "--data.partition_options={samples_per_client=2000}"))
    with pytest.raises(ValueError, match="samples_per_client must be at most 1437"):
        population_of(more)


def test_a_statement_names_what_was_read_exactly_off_the_data(data_files):
    """Whatever of it enters a run, each named in the list of what no ε covers."""
    words = heart(data_files, "--data.options.scaling=standard", "--run.secret=true")
    noise = ("--privacy.record.noise_multiplier=1", "--privacy.record.epsilon=none")
    experiment = assemble(load_config(None, (*words, *noise)))
    sharing = experiment.population.sharing._replace(num_shared=3, most_holders=2)
    experiment = experiment._replace(population=experiment.population._replace(sharing=sharing))
    facts = facts_of(experiment, experiment.simulation.hyper, ["when it ended"])["record"]
    said = " ".join(facts["also_not_private"])
    assert "exact means and standard deviations" in said and "when it ended" in said
    assert (facts["num_shared"], facts["most_holders"]) == (3, 2)
    ranged = assemble(load_config(None, (*heart(data_files), *noise)))
    facts = facts_of(ranged, ranged.simulation.hyper, [])["record"]
    assert "means" not in " ".join(facts["also_not_private"])


def test_tables_lists_and_files_of_numbers_by_client_are_one(data_files):
    inline = "{" + ",".join(f"{name}={value}" for name, value in BUDGETS.items()) + "}"
    positions = [BUDGETS[name] for name in HOSPITALS]
    found = [
        assemble(load_config(None, heart(data_files, word)))
        for word in (f"--privacy.record.epsilon={inline}", f"--privacy.record.epsilon={positions}")
    ]
    for experiment in found:
        assert experiment.config.privacy.record.epsilon == positions
        assert experiment.written.privacy.record.epsilon == BUDGETS
    noise = [e.simulation.hyper.local.noise_multiplier for e in found]
    np.testing.assert_array_equal(*noise)


def test_clients_without_names_are_numbered():
    words = ("--data.num_clients=3", "--privacy.record.epsilon={2=1,0=2,1=3}")
    config = load_config(None, words)
    data = type("Data", (), {"client_names": (), "num_clients": 3})
    lists = numbers_by_client.listed(config, numbers_by_client.names_of(data))
    assert lists.privacy.record.epsilon == [2.0, 3.0, 1.0]
    assert numbers_by_client.named(lists, data) == lists
    with pytest.raises(ValueError, match=r"epsilon must be one number or have one for each of the"):
        validation.validate(numbers_by_client.listed(load_config(None, words[1:]), None))


@pytest.mark.parametrize(
    "value, message",
    [
        ("{va=1,cleveland=1,switzerland=1}", r"each of the 4 clients, got .3 names, without 'hung"),
        ("{va=1,cleveland=1,switzerland=1,hungary=1}", r"such as 'hungarian', got 'hungary'"),
    ],
)
def test_a_table_names_every_client_and_no_other(value, message):
    config = load_config(None, [f"--privacy.record.epsilon={value}"])
    with pytest.raises(ValueError, match=rf"privacy\.record\.epsilon must name .*{message}"):
        numbers_by_client.listed(config, HOSPITALS)


def test_a_table_holds_numbers_in_their_range():
    with pytest.raises(ValueError, match=r"epsilon must be .*a table of these by name"):
        load_config(None, ["--privacy.record.epsilon={va=0}"])


@pytest.mark.parametrize(
    "lines, words, message",
    [
        (("name,training.batch_size", "a,1"), (), r"line 1 must begin with the column 'client'"),
        (("client,training.batchsize", "a,1"), (), r"line 1.*training\.batch_size"),
        (("client,training.batch_size", "a,1", "a,2"), (), r"line 3 must name each client once"),
        (("client,training.batch_size", "a,x"), (), r"line 2, column training.batch_size must hol"),
        (("client,training.batch_size", "a"), (), r"line 2 must have 2 cells, got 1"),
        (("client", "a", "b"), (), r"line 1 must name a key besides 'client', .*got \['client'\]"),
        (("client,training.batch_size", "a,1\rb,2"), (), "line 2 must be a line of a CSV file"),
        (
            ("client,training.batch_size", "a,1", "b,0"),
            (),
            r"numbers\.csv, line 3: training\.batch_size must be .*got \{'b': 0\.0\}$",
        ),
        (
            ("client,training.batch_size", "a,1", "", "b,nan"),
            (),
            r"csv, line 4, column training\.batch_size must hold a finite number, got 'nan'",
        ),
        (
            ("client,training.batch_size", "a,1_0"),
            (),
            "line 2, .* must hold a finite number, got '1_0'",
        ),
        (
            ("client,training.learning_rate", "a,1", "b,1e39"),
            (),
            r"csv, line 3: training\.learning_rate must be 0 or of a size .*got 1e\+39",
        ),
        (("client,training.batch_size",), (), r"must hold a line of column names and one for each"),
    ],
)
def test_a_file_of_numbers_is_refused_by_line_column_and_rule(tmp_path, lines, words, message):
    file = tmp_path / "numbers.csv"
    file.write_text("\n".join(lines) + "\n")
    config = load_config(None, (f"--data.client_numbers={file}", *words))
    with pytest.raises(ValueError, match=message):
        numbers_by_client.with_client_numbers(config)


@pytest.mark.parametrize(
    "lines, message",
    [
        (("a,1", "b,2", "hungary,3"), r"csv, line 4 must name a client of the data, such as"),
        (("a,1", "b,2"), r"csv, column training\.batch_size, must name each .*got .*without 'c'"),
    ],
)
def test_a_client_that_is_not_among_the_data_is_named_with_its_line(tmp_path, lines, message):
    file = tmp_path / "numbers.csv"
    file.write_text("\n".join(["client,training.batch_size", *lines]) + "\n")
    read = numbers_by_client.with_client_numbers(
        load_config(None, [f"--data.client_numbers={file}"])
    )
    with pytest.raises(ValueError, match=message):
        numbers_by_client.listed(read, ["a", "b", "c"])
    again = load_config(None, ["--training.batch_size={a=1, b=2, c=3}"])
    assert numbers_by_client.listed(again, ["c", "a", "b"]).training.batch_size == [3, 1, 2]
