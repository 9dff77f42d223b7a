"""What a run folder and a release must not hold, and the runs of which nothing is released."""

import contextlib
import tomllib
from functools import partial

import jax
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from marks import slow
from run_folders import SMALL, assemble_once

from fedjax_dp.data.datasets import Dataset
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.data.partition import Splits
from fedjax_dp.data.statistics import Sharing
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.assembly import population
from fedjax_dp.experiment.components import numbers_by_client
from fedjax_dp.experiment.components.partitions import Facts, Partition, Spread
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.reading import validate as validation
from fedjax_dp.experiment.running import results
from fedjax_dp.experiment.running.described import public_tables
from fedjax_dp.experiment.running.environment import environment
from fedjax_dp.experiment.running.release import (
    marks_of,
    naming_files,
    partition_counts,
    public_config,
    public_facts,
    public_summary,
    require_publishable,
    without_model,
)
from fedjax_dp.experiment.running.starting import accounting_of, fresh, restored
from fedjax_dp.experiment.schema.config import DataSection
from fedjax_dp.io.logbook import write_json
from fedjax_dp.io.statement import write_statement
from fedjax_dp.privacy.reports.statement import statement

pytestmark = pytest.mark.xdist_group("resume")

SEED = 864208642
RELEASED = ("--run.secret=true", "--run.release=private")
NOISE = ("--privacy.record.noise_multiplier=1", "--privacy.record.epsilon=none")
STATED = ("privacy.json", "privacy.md")
HOSPITALS = ("north", "south", "west")


def built(*words):
    return assemble_once(load_config(None, (*SMALL, *NOISE, *words)))


def charged(experiment):
    """Ledgers as if some rounds had run."""
    accounting = accounting_of(experiment, experiment.simulation.hyper)
    accounting.ledgers["record"].charge(GaussianDpEvent(1.0))
    return accounting


def with_population(experiment, **changes):
    return experiment._replace(population=experiment.population._replace(**changes))


def named_clients(experiment):
    train = experiment.population.train
    named = FederatedData(train.examples, train.offsets, HOSPITALS)
    return with_population(experiment, train=named)


@pytest.mark.parametrize("is_secret", [False, True])
def test_no_file_marked_as_public_or_covered_holds_the_root_of_the_noise(tmp_path, is_secret):
    """Without a secret root the seed is that root, and the statement repeats it."""
    experiment = built(*(RELEASED[:1] if is_secret else ()))
    section = experiment.config.run.model_copy(update={"seed": SEED})
    config = experiment.config.model_copy(update={"run": section})
    experiment = experiment._replace(config=config)
    _, start = fresh(experiment, tmp_path / "run")
    start.lock.release()
    start.checkpoints.close()
    folder = start.folder
    write_json(folder / "environment.json", environment())
    facts = results.facts_of(experiment, start.hyper, ())
    marks = marks_of(folder, is_secret=is_secret)
    ledgers = charged(experiment).ledgers
    write_statement(folder, ledgers, experiment.dp_delta, "rdp", facts, marks)
    key = np.asarray(jax.random.key_data(start.key)).ravel().tolist()
    shapes = [str(word) for word in key if word] if is_secret else [str(SEED)]
    holding = {
        path.relative_to(folder).parts[0]
        for path in folder.rglob("*")
        if path.is_file() and any(shape.encode() in path.read_bytes() for shape in shapes)
    }
    assert holding == ({"checkpoint"} if is_secret else {"config.toml", *STATED})
    assert {marks[name] for name in holding} == {"secret"}
    # Also where the files are yet to be written.
    (tmp_path / "empty").mkdir()
    assert is_secret or marks_of(tmp_path / "empty", is_secret=False)["privacy.md"] == "secret"


@pytest.mark.parametrize(
    ("place", "kept"),
    [
        ("https://me:word@tracks.example", "https"),
        ("https://me:word@tracks.example/team/runs?key=word", "runs"),
        ("/home/me/data.csv", "data.csv"),
        ("plain", "plain"),
    ],
)
def test_public_tables_have_neither_folders_nor_servers(place, kept):
    given = {"run": {"callbacks": {"mlflow": {"tracking_uri": place}}}}
    assert public_tables(given) == {"run": {"callbacks": {"mlflow": {"tracking_uri": kept}}}}


def test_the_environment_of_a_run_names_no_folder(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_cuda_data_dir=/home/me/cuda --xla_dump_to=/home/me")
    assert environment()["compiler"]["XLA_FLAGS"] == ["--xla_gpu_cuda_data_dir=cuda"]


@pytest.mark.parametrize(
    "word", ["--privacy.record.epsilon={a=1,b=1}", "--privacy.record.epsilon=[1,1]"]
)
def test_a_file_of_numbers_never_replaces_what_the_configuration_sets(tmp_path, word):
    file = tmp_path / "numbers.csv"
    file.write_text("client,privacy.record.epsilon\na,50\nb,50\n")
    config = load_config(None, (f"--data.client_numbers={file}", word))
    message = r"privacy\.record\.epsilon must be left out, since a column of .* fills it, got"
    with pytest.raises(ValueError, match=message):
        numbers_by_client.with_client_numbers(config)
    filled = numbers_by_client.with_client_numbers(
        load_config(None, (f"--data.client_numbers={file}",))
    )
    assert filled.privacy.record.epsilon == {"a": 50.0, "b": 50.0}
    # A run folder no longer names the file, and is read again as it stands.
    saved = tmp_path / "config.toml"
    saved.write_text(config_files.to_toml(filled))
    again = numbers_by_client.with_client_numbers(load_config(saved))
    assert again.privacy.record.epsilon == {"a": 50.0, "b": 50.0}


def test_a_run_that_can_state_nothing_of_shared_records_releases_nothing():
    experiment = with_population(built(*RELEASED), sharing=Sharing(7, 3))
    require_publishable(experiment, {})
    pooled = built(*RELEASED, "--algorithm.name=centralized")
    require_publishable(pooled, {})
    # Records that were gathered are not protected from those who gathered them.
    facts = results.facts_of(pooled, pooled.simulation.hyper, [])["record"]
    assert statement(charged(pooled).ledgers["record"], 1e-5, **facts)["trusted"] == "pool"
    assert "trust" not in results.facts_of(experiment, experiment.simulation.hyper, [])["record"]
    message = r"run\.release must be left out: no ε can be stated for 7 records.*several clients"
    with pytest.raises(ValueError, match=message):
        require_publishable(with_population(pooled, sharing=Sharing(7, 2)), {})
    # As the statement has it.
    for each, holders, is_stated in ((experiment, 3, True), (pooled, 2, False)):
        ledger = charged(each).ledgers["record"]
        stated = statement(ledger, 1e-5, num_shared=7, most_holders=holders)["shared_records"]
        assert (stated["epsilon"] is not None) == is_stated


@pytest.mark.parametrize("shared", [3.5, "inf"])
def test_the_epsilon_of_a_release_is_that_of_a_record_as_a_whole(shared):
    summary = {"epsilon": 1.5, "dp_delta": 1e-5, "epsilon_record": 1.5, "test_accuracy": 0.25}
    of_all = {"epsilon_of_shared_record": shared, "dp_delta_of_shared_record": 3e-5}
    assert public_summary(summary | of_all) == {
        "epsilon": shared,
        "dp_delta": 3e-5,
        "epsilon_record": 1.5,
        **of_all,
        "not_private": [],
    }
    kept = public_summary(summary | {"epsilon": 9.0} | of_all | {"epsilon_of_shared_record": 3.5})
    assert (kept["epsilon"], kept["dp_delta"]) == (9.0, 3e-5)
    assert public_summary(summary)["epsilon"] == 1.5


def test_records_that_were_taken_for_public_inputs_are_in_no_release():
    ae_dpfl = ("--privacy.unit=client", "--algorithm.name=ae_dpfl", "--data.public_examples=5")
    config = load_config(None, (*SMALL, *ae_dpfl, *RELEASED))
    message = r"data\.public_examples must be 0 if run\.release is 'private': .* without noise"
    with pytest.raises(ValueError, match=message):
        validation.validate(config)
    experiment = built(*RELEASED)
    data = experiment.config.data.model_copy(update={"public_examples": 5})
    changed = experiment._replace(config=experiment.config.model_copy(update={"data": data}))
    with pytest.raises(ValueError, match=r"no ε covers 5 examples of the training part"):
        require_publishable(changed, {})
    facts = results.facts_of(changed, experiment.simulation.hyper, ())["record"]
    assert any("5 examples of the training part" in text for text in facts["also_not_private"])


@slow
def test_a_release_needs_noise_in_each_round_that_may_run(tmp_path):
    curve = "--schedules.privacy.record.noise_multiplier={curve='list', factors=[1, 0]}"
    for words, is_covered in (((curve,), False), ((curve, "--privacy.record.epsilon=8"), True)):
        kept, released = (built(*words, *some) for some in (RELEASED[:1], RELEASED))
        for i, begin in enumerate((fresh, partial(restored, warn=print))):
            folder = tmp_path / f"{len(words)}-{i}"
            if begin is not fresh:
                fresh(kept, folder)[1].lock.release()
            covers = contextlib.nullcontext()
            if not is_covered:
                rule = "run.release must be left out: no ε of a record follows from the noise"
                covers = pytest.raises(ValueError, match=rule)
            with covers:
                begin(released, folder)[1].lock.release()


def test_a_release_names_no_client_and_no_place_of_a_file(tmp_path):
    words = (*RELEASED, "--training.batch_size={0=4,1=5,2=6}")
    experiment = named_clients(built(*words))
    data = {
        "data_dir": "/home/someone/data",
        "unseen_clients": ["east"],
        "options": {
            "path": "/home/someone/north/hosp.csv",
            "separator": "/",
            "others": ["wards/south.csv", "age"],
        },
    }
    section = experiment.config.data.model_copy(update=data)
    model = {"name": "/home/someone/mine.py:net", "frozen": ["params/Dense_0/kernel"]}
    own = experiment.config.model.model_copy(update=model)
    cache = experiment.config.execution.model_copy(update={"compilation_cache": "../someone"})
    changes = {"data": section, "model": own, "execution": cache}
    experiment = experiment._replace(config=experiment.config.model_copy(update=changes))
    assert "north = 4" in config_files.to_toml(experiment.written)
    text = public_config(experiment)
    for secret in (*HOSPITALS[:1], "west", "east", "/home", "../", "wards/", "data_dir"):
        assert secret not in text
    for kept in ('path = "hosp.csv"', 'separator = "/"', '"mine.py:net"', "params/Dense_0/kernel"):
        assert kept in text
    assert 'release = "private"' in text and "4" in text
    facts = results.facts_of(experiment, experiment.simulation.hyper, ())
    assert facts["record"]["client_names"] == list(HOSPITALS)
    # Nor is a file of the run folder called publishable that has them.
    naming = {"config.toml", "privacy.json", "privacy.md"}
    tables = tomllib.loads(config_files.to_toml(experiment.written))
    assert set(naming_files(tables, HOSPITALS)) == naming
    assert naming_files(tomllib.loads(text), ()) == []
    assert naming_files({"data": {"unseen_clients": ["east"]}}, ()) == ["config.toml"]
    assert naming_files({"data": {"unseen_clients": []}}, ()) == []
    marks = marks_of(tmp_path, is_secret=True, naming=[*naming])
    assert {marks[name] for name in naming & marks.keys()} == {"named"}
    ledgers, delta = charged(experiment).ledgers, experiment.dp_delta
    write_statement(tmp_path, ledgers, delta, "rdp", public_facts(facts))
    said = "".join((tmp_path / name).read_text("utf-8") for name in STATED)
    assert not any(name in said for name in HOSPITALS)
    assert all(f"| {i} | " in said for i in range(3))


def test_the_statement_of_a_release_names_no_file_that_is_not_there(tmp_path):
    experiment = built(*RELEASED)
    run = tmp_path / "run"
    (run / "plots").mkdir(parents=True)
    (run / "partition.txt").touch()
    # Without plots, whether they were not asked for or could not be drawn.
    assert partition_counts(run).endswith(" by client in `partition.txt`")
    for kind in ("png", "pdf"):
        (run / "plots" / f"partition.{kind}").touch()
    counts = partition_counts(run)
    assert counts.endswith("in `partition.txt`, `plots/partition.png` and `plots/partition.pdf`")
    facts = results.facts_of(experiment, experiment.simulation.hyper, [counts, "when it ended"])
    assert counts in facts["record"]["also_not_private"]
    ledgers, delta = charged(experiment).ledgers, experiment.dp_delta
    write_statement(tmp_path, ledgers, delta, "rdp", public_facts(facts))
    said = "".join((tmp_path / name).read_text("utf-8") for name in STATED)
    assert "partition." not in said and "root.key" not in said and "when it ended" in said


@pytest.fixture
def of_partition(monkeypatch):
    """Builds the population that a user-defined partition makes of six examples."""
    x, y = np.arange(12, dtype=np.float32).reshape(6, 2), np.arange(6) % 2
    data = Dataset("own", {"x": x, "y": y}, {"x": x, "y": y}, 2, "classification")
    monkeypatch.setattr(population.datasets, "load", lambda *_args, **_options: data)

    def build(rows, made=None):
        def factory(pool):
            held = [{name: array[:3] for name, array in pool.train.items()}] * 2
            parts = [FederatedData.from_clients(held) for _ in range(2)]
            return parts[0:2] if rows is None else Spread(parts[0], None, parts[1], rows)

        own = {"own": Partition(factory, ("pool",), changes_examples=True)}
        monkeypatch.setattr(population, "PARTITIONS", own)
        return population.build_population(DataSection(partition="own", num_clients=2), seed=0)

    return build


@pytest.mark.parametrize(
    "rows, message",
    [
        (None, r"the partition own must return a Spread, .* rows of the pool .*, got 'list'"),
        ([[0, 1, 2]], r"rows of the partition own must name 2 clients, got 1"),
        (
            [[0, 1, 2], [0, 1]],
            r"rows of the partition own\[1\] must hold one row for each of the 3",
        ),
        ([[0, 1, 2], [0, 1, 1]], r"rows of the partition own\[1\] must hold .*, got 'row 1 tw"),
        (
            [[0, 1, 2], [0, 1, 6]],
            r"rows of the partition own\[1\] must name rows in \[0, 6\), got 6",
        ),
    ],
)
def test_a_partition_that_changes_examples_names_their_source_records(of_partition, rows, message):
    with pytest.raises(ValueError, match=message):
        of_partition(rows)


def test_copies_of_a_user_defined_partition_are_counted(of_partition):
    assert of_partition([[0, 1, 2], [0, 1, 3]]).sharing == (2, 2)


def test_the_release_folder_is_removed_when_its_run_resumes(tmp_path):
    """It would be of fewer rounds than the statement beside it."""
    _, start = fresh(built(*RELEASED), tmp_path / "run")
    start.lock.release()
    start.checkpoints.close()
    (start.folder / "release").mkdir()
    (start.folder / "release" / "model.safetensors").write_bytes(b"of earlier rounds")
    _, again = restored(built(*RELEASED[:1]), start.folder, print)
    again.lock.release()
    again.checkpoints.close()
    assert not (start.folder / "release").exists()
    assert "release" not in marks_of(start.folder, is_secret=True)


@pytest.mark.parametrize(
    "name, covered", [("local_only", "the clients' own models"), ("fedavg", "the shared model")]
)
def test_a_model_that_is_not_there_is_not_called_covered(name, covered):
    experiment = built(*RELEASED, f"--algorithm.name={name}")
    found = results.covered_models(
        experiment.evaluator.is_personal,
        results.has_personal_models(experiment),
        experiment.simulation.federation.shared is not None,
        ("record",),
    )
    assert found == covered
    has_none = "run.release: local_only has no shared model, so the folder release will have none"
    assert without_model(experiment) == (has_none if name == "local_only" else "")
    assert without_model(built(f"--algorithm.name={name}")) == ""


def test_parts_of_clients_share_test_examples_alone():
    x, y = np.arange(12, dtype=np.float32).reshape(6, 2), np.arange(6) % 2
    pool = Dataset("own", {"x": x, "y": y}, {"x": x, "y": y}, 2, "classification")
    facts = Facts(pool, 2, 0)

    def build(train, second):
        made = Splits(train, second, [[0, 1], [1, 2]])
        return Partition(lambda: made, ()).make(facts, {})

    made = build([[0], [1]], [[2], [3]])
    assert made.client_test.examples["y"].tolist() == [0, 1, 1, 0]
    for train, second in ([[0], [1]], [[1], [3]]), ([[0], [0]], [[2], [3]]):
        with pytest.raises(ValueError, match="the partition must give every example to one client"):
            build(train, second)
