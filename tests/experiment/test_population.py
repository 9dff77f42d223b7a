"""User-defined partitions and unusual data: refused, or reported."""

from types import SimpleNamespace

import numpy as np
import pytest

from fedjax_dp.data import datasets
from fedjax_dp.data.datasets import Dataset
from fedjax_dp.experiment.assembly import population
from fedjax_dp.experiment.assembly.assemble import parts_of
from fedjax_dp.experiment.components.partitions import Partition
from fedjax_dp.experiment.reading.config_diff import decided, tables_of
from fedjax_dp.experiment.reading.config_files import from_toml, load_config, to_toml
from fedjax_dp.experiment.running.loading import other_data
from fedjax_dp.experiment.schema.config import DataSection

NUM = 6
PATHS = {"path": "old", "test_path": "new"}


@pytest.fixture
def built(monkeypatch):
    """Builds the population of tiny data that are dealt out as the rows say."""

    def build(rows, num_test=NUM, counts_clients=True, **more):
        x, y = np.arange(2.0 * NUM, dtype=np.float32).reshape(NUM, 2), np.arange(NUM) % 2
        test = {"x": x[:num_test], "y": y[:num_test]}
        data = Dataset("own", {"x": x, "y": y}, test, 2, "classification")
        monkeypatch.setattr(population.datasets, "load", lambda *_args, **_options: data)
        made = Partition(lambda num_clients: rows, ("num_clients",), counts_clients=counts_clients)
        monkeypatch.setattr(population, "PARTITIONS", {"own": made})
        section = {"partition": "own", "num_clients": 2, "client_test_share": 0.0} | more
        return population.build_population(DataSection(**section), seed=0)

    return build


def test_a_partition_may_count_its_clients_where_data_name_none(built):
    rows = np.array_split(np.arange(NUM), 3)
    made = built(rows, counts_clients=False, unseen_client_share=0.3)
    assert (made.train.num_clients, made.unseen.num_clients) == (2, 1)
    assert sorted(map(int, made.train.client_names + made.unseen.client_names)) == [0, 1, 2]


def test_a_client_column_that_is_not_used_and_unscaled_numbers_are_named(tmp_path):
    path = tmp_path / "t.csv"
    lines = [f"site {i % 3},{i},{1000 * i},{'yn'[i % 2]}" for i in range(12)]
    path.write_text("\n".join(["site,small,big,ill", *lines]))

    def notes(partition, **more):
        options = {"path": str(path), "client": "site", "label": "ill"} | more
        section = DataSection(name="table", options=options, partition=partition, num_clients=2)
        made = population.build_population(section, seed=0)
        assert made.class_names == ("n", "y") and made.feature_names == ("small", "big")
        return [note for note in made.notes if "test set" not in note]

    unused, unscaled = notes("iid")
    assert unused.startswith(
        "data.options.client does not determine the clients: the partition iid"
    )
    assert unscaled.startswith("the inputs big of table have values above 100")
    ranges = {"small": [0, 12], "big": [0, 12_000]}
    assert notes("natural", scaling="range", ranges=ranges) == []


@pytest.mark.parametrize(
    ("words", "partition"),
    [
        ("", "natural"),
        ("--data.partition=iid", "iid"),
        ("--data.num_clients=3", "label_and_quantity_skew"),
        ("--data.options.client=none", "label_and_quantity_skew"),
        ("--data.options.client=none --data.options.clients_are_files=true", "natural"),
        ("--data.name=digits", "label_and_quantity_skew"),
        ("--data.name=heart_disease --data.options={}", "natural"),
        ("--data.name=femnist --data.options={} --data.partition=iid", "iid"),
        ("--data.name=femnist --data.options={} --data.num_clients=3", "label_and_quantity_skew"),
        ("--data.name=mnist --data.partition=shifted_clusters", "shifted_clusters"),
        (
            "--data.name=femnist --data.options={} --data.partition_options.alpha=1",
            "label_and_quantity_skew",
        ),
    ],
)
def test_clients_that_an_option_names_are_the_default(tmp_path, words, partition):
    file = tmp_path / "table.toml"
    file.write_text('data.name = "table"\n[data.options]\npath="t"\nlabel="y"\nclient="c"\n')
    config = load_config(file, words.split())
    assert config.data.partition == partition
    file.write_text(to_toml(config), encoding="utf-8")
    assert load_config(file).data == config.data
    # The default number is written if it is that of the run, and else makes no other run.
    assert ("num_clients" in file.read_text()) == (partition not in ("natural", "shifted_clusters"))
    if partition == "natural":
        older = load_config(file, ["--data.num_clients=10"])
        assert "num_clients" in to_toml(older) and tables_of(older) == tables_of(config)
    if "--data.partition=" not in words and "num_clients" not in words:
        name, given = config.data.name, config.data.partition_options
        options = config.data.options
        section = DataSection(name=name, options=options, partition_options=given)
        assert section.partition == partition, "as in Python"


# An option says whether each of these has natural clients.
OPTIONAL = ("table", "parquet", "image_folder")


@pytest.mark.parametrize("name", [name for name in datasets.available() if name not in OPTIONAL])
def test_data_sets_with_natural_clients_are_known(name):
    without = " ".join((datasets.registry.loader(name).__doc__ or "").split())
    assert datasets.info(name).names_clients == ("without natural clients" not in without)


def test_clients_that_share_no_class_are_named(tmp_path):
    labels = {"north": "no,yes", "south": "No,Yes", "west": "yes,maybe", "east": "never"}
    rows = [
        f"{site},{i},{x}" for site, all_ in labels.items() for i, x in enumerate(all_.split(","))
    ]
    (tmp_path / "t.csv").write_text("\n".join(["site,a,ill", *rows, *rows]))
    options = {"path": str(tmp_path / "t.csv"), "label": "ill", "client": "site"}

    def notes(words="share no class", **more):
        section = DataSection(name="table", options=options, client_test_share=0.0, **more)
        made = population.build_population(section, seed=0)
        return [note for note in made.notes if words in note]

    (note,) = notes()
    assert note.startswith("2 of 4 clients share no class") and note.endswith(": east, south")
    alike = "the classes 'No' and 'no' differ in case or spaces alone"
    assert notes(words="differ in case") == [alike]
    assert notes(partition="iid", num_clients=4) == []
    assert notes(partition="shards", num_clients=4) == []


OWN = """
import numpy as np
from fedjax_dp.data import datasets
from fedjax_dp.data.datasets import Dataset

def load(data_dir, *, named: bool = True):
    x, y = np.eye(12, dtype=np.float32), np.arange(12) % 2
    ids = np.array(["north", "south", "west"]).repeat(4) if named else None
    return Dataset("own", {"x": x, "y": y}, {"x": x, "y": y}, 2, "classification", ids)
"""


@pytest.mark.parametrize(
    ("words", "partition", "names"),
    [
        ("", "natural", ("north", "south", "west")),
        ("--data.options.named=false", "label_and_quantity_skew", ()),
        ("--data.partition=iid --data.num_clients=2", "iid", ()),
    ],
)
def test_the_natural_clients_of_data_of_ones_own_are_the_default(tmp_path, words, partition, names):
    (tmp_path / "mine.py").write_text(OWN)
    given = [f"--data.name={tmp_path / 'mine.py'}:load", *words.split()]
    config = load_config(None, given)
    file = tmp_path / "written.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert load_config(file) == config and load_config(file).data.is_divided == ("iid" in words)
    parts = parts_of(load_config(file))
    assert parts.population.train.client_names == names
    assert parts.config.data.partition == partition
    file.write_text(to_toml(parts.config), encoding="utf-8")
    assert ("num_clients" in file.read_text()) == (not names)
    saved = load_config(file)
    assert saved.data.is_divided and saved.data.partition == partition
    # A sweep that is repeated finds the same settings, whatever its data decided.
    assert tables_of(decided(config, saved)) == tables_of(saved)
    # A default share that is written was asked for.
    for share, is_same in (("0", bool(names)), ("0.2", not names), ("0.3", False)):
        other = load_config(file, [f"--data.client_test_share={share}"])
        assert (tables_of(decided(config, other)) == tables_of(other)) == is_same
    if names:
        few = [*given, "--participation.sampler=fixed_size", "--participation.cohort_size=5"]
        with pytest.raises(ValueError, match=r"cohort_size must be at most .* 3 clients, got 5"):
            parts_of(load_config(None, few))
        divided = population.build_population(
            load_config(None, [*given, "--data.num_clients=2"]).data, seed=0
        )
        assert divided.notes[0].startswith("the natural clients of own do not determine the cl")


@pytest.mark.parametrize(
    ("made", "options"),
    [
        ("few_classes", {"test_per_client": 20}),
        ("class_mixtures", {"test_per_client": 20}),
        ("common_pool", {"samples_per_client": 20}),
    ],
)
def test_a_partition_that_makes_test_data_holds_out_no_share(tmp_path, made, options):
    words = [f"--data.partition_options.{name}={value}" for name, value in options.items()]
    given = ["--data.name=digits", "--data.num_clients=2", f"--data.partition={made}", *words]
    config = load_config(None, given)
    parts = parts_of(config)
    # Workers of a sweep get the configuration as text.
    assert parts_of(from_toml(to_toml(config), "a worker")).config == parts.config
    file = tmp_path / "written.toml"
    file.write_text(to_toml(parts.config), encoding="utf-8")
    saved = load_config(file)
    assert saved.data.client_test_share == 0
    assert (
        tables_of(parts_of(saved).config) == tables_of(saved) == tables_of(decided(config, saved))
    )
    with pytest.raises(ValueError, match=r"client_test_share must be 0 for .* what .*, got 0\.2"):
        parts_of(load_config(None, [*given, "--data.client_test_share=0.2"]))


@pytest.mark.parametrize("words", [(), ("--data.client_test_share=0.5",)])
def test_clients_with_test_rows_hold_out_a_share_only_if_asked_on_workers_too(tmp_path, words):
    rows = "".join(f"{site},{i},{'yn'[i % 2]}\n" for site in "ab" for i in range(8))
    for name in ("old.csv", "new.csv"):
        (tmp_path / name).write_text(f"site,x,ill\n{rows}", encoding="utf-8")
    paths = (
        f"--data.options.{key}={tmp_path / name}"
        for key, name in (("path", "old.csv"), ("test_path", "new.csv"))
    )
    named = ("--data.name=table", "--data.options.client=site", "--data.options.label=ill")
    config = load_config(
        None, [*named, *paths, "--privacy.unit=none", "--algorithm.name=fedavg", *words]
    )
    here, there = map(parts_of, (config, from_toml(to_toml(config), "a worker")))
    assert here.population.train.sizes.tolist() == [4 if words else 8] * 2
    assert there.population.train.sizes.tolist() == here.population.train.sizes.tolist()


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_test_rows_without_labels_are_for_predictions_alone(tmp_path, task):
    (tmp_path / "old.csv").write_text("a,c,y\n" + "1,n,0\n2,s,1\n" * 5, encoding="utf-8")
    (tmp_path / "new.csv").write_text("a\n3\n4\n", encoding="utf-8")
    paths = {key: str(tmp_path / f"{name}.csv") for key, name in PATHS.items()}
    options = {"label": "y", "client": "c", "task": task} | paths
    section = DataSection(name="table", partition="natural", options=options)
    made = population.build_population(section, 0, needs_test_labels=False)
    assert list(made.test.examples) == ["x"] and made.test.num_examples == 2
    with pytest.raises(ValueError, match="labels of table, test part, must be known; only pred"):
        population.build_population(section, 0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0, 1, 1], [2]], "give every example to one client, once, got .*row 1 in client 0"),
        ([[0, 1], [1, 2]], "row 1 in client 0 and in client 1, 1 in all"),
        ([[0, 1], [1.5]], r"rows of the partition\[1\] must list rows as integers"),
        ([np.arange(NUM) < 3, np.arange(NUM) >= 3], r"rows of the partition\[0\] must list"),
        ([[0, 1], [6]], r"rows of the partition\[1\] must name rows in \[0, 6\), got 6"),
        ([range(NUM)], "the partition own must make the 2 clients .* got 1"),
        ([], "rows of the partition must hold at least one client"),
    ],
)
def test_a_partition_that_is_none_is_refused(built, rows, message):
    with pytest.raises(ValueError, match=message):
        built(rows)


def test_empty_clients_and_an_empty_test_part_are_named(built):
    assert built([[0, 1], [2, 3]]).notes == ()
    found = built([[0, 1], []], num_test=0, client_test_share=0.5)
    empty, untested = found.notes
    assert empty == "1 of 2 clients have no training examples: 1"
    assert untested.startswith("own has no test set: accuracy is measured on the 50 %")
    assert found.test is None and found.client_test is not None
    (untested,) = built([[0, 1], [2, 3]], num_test=0, client_test_share=0.0).notes
    assert "no test accuracy is measured" in untested
    assert found.pooled().notes == ()


@pytest.mark.parametrize(
    ("header", "rows", "message"),
    [
        ("a,b,y", "1,2,up\n3,4,down\n", None),
        ("a,b,y", "1,2,up\n3,4,left\n", "the classes must be those of the training"),
        ("b,a,y", "1,2,up\n3,4,down\n", "the inputs must be those of the training"),
        ("a,b,y", "1,x,up\n3,z,down\n", "the inputs must be those of .*got 'also b=x, b=z'"),
    ],
)
def test_other_data_have_the_classes_and_inputs_of_the_training(tmp_path, header, rows, message):
    run = run_on(tmp_path, "a,b,y\n1,2,up\n3,4,down\n")
    words = other(tmp_path, f"{header}\n{rows}")
    if message is None:
        assert other_data(run, words).class_names == run.experiment.population.class_names
    else:
        with pytest.raises(ValueError, match=message):
            other_data(run, words)


def run_on(folder, text, *words):
    """What `other_data` reads of a run on a table."""
    (folder / "old.csv").write_text(text, encoding="utf-8")
    words = ("--data.options.label=y", "--data.num_clients=1", "--algorithm.name=fedavg", *words)
    words = ("--data.name=table", *words, "--privacy.unit=none", "--data.client_test_share=0")
    config = load_config(None, [*words, f"--data.options.path={folder / 'old.csv'}"])
    (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    trained = SimpleNamespace(population=population.build_population(config.data, 0))
    return SimpleNamespace(folder=folder, config=config, experiment=trained)


def other(folder, text, key="path"):
    (folder / "new.csv").write_text(text, encoding="utf-8")
    return [f"--data.options.{key}={folder / 'new.csv'}"]


@pytest.mark.parametrize(
    ("given", "text", "column"),
    [
        ("scaling=standard", "a,b,y\n7,k,up\n9,l,down\n", "a"),
        ("missing=mean", "a,b,y\n7,k,up\n,l,down\n", "a"),
        ("coding=integer", "a,b,y\n1,k,up\n3,m,down\n", "b"),
    ],
)
def test_other_data_are_encoded_by_the_figures_of_the_training(tmp_path, given, text, column):
    run = run_on(tmp_path, "a,b,y\n1,k,up\n3,l,down\n", f"--data.options.{given}")
    with pytest.raises(ValueError, match=rf"columns must be encoded .*, got \['{column}'\]$"):
        other_data(run, other(tmp_path, text))
    found = other_data(run, other(tmp_path, "a,b,y\n2,l,up\n", "test_path"))
    assert found is not None and found.test.num_examples == 1


def test_inputs_of_other_data_are_not_all_named(tmp_path):
    names = [f"column{i}" for i in range(500)]
    lines = [",".join([*names, "y"]), *(",".join(["1"] * 500 + [y]) for y in ("up", "down"))]
    run = run_on(tmp_path, "\n".join(lines))
    turned = "\n".join([",".join([*names[::-1], "y"]), *lines[1:]])
    with pytest.raises(ValueError, match="inputs must be those of the training") as error:
        other_data(run, other(tmp_path, turned))
    assert len(str(error.value)) < 1500


def test_other_data_are_scaled_as_those_of_the_training(tmp_path):
    ranges = [f"--data.options.{x}" for x in ("scaling=range", "ranges={a=[0, 5], b=[0, 5]}")]
    run = run_on(tmp_path, "a,b,y\n1,2,up\n3,4,down\n", *ranges)
    with pytest.raises(ValueError, match=r"columns must be encoded .*, got \['a'\]"):
        other_data(run, ["--data.options.ranges={a=[0, 9], b=[0, 5]}"])
    with pytest.raises(ValueError, match=r"data\.input_norm must be that of the training, None"):
        other_data(run, ["--data.input_norm=1"])


def of_sites(monkeypatch, test_sites, **section):
    """Natural clients whose test examples differ by their first input."""
    train_sites = np.array(["b", "a", "c", "a", "b", "c"] * 5)
    test_sites = None if test_sites is None else np.asarray(test_sites)
    size = 4 if test_sites is None else len(test_sites)
    x = np.arange(float(len(train_sites)), dtype=np.float32)[:, None]
    train = {"x": x, "y": np.arange(len(x)) % 2}
    test = {"x": 100 + x[:size], "y": np.arange(size) % 2}
    data = Dataset("own", train, test, 2, "classification", train_sites, test_sites)
    monkeypatch.setattr(population.datasets, "load", lambda *_args, **_options: data)
    return population.build_population(DataSection(name="digits", **section), seed=0)


@pytest.mark.parametrize("section", [{}, {"client_test_share": 0.0}])
def test_natural_clients_are_tested_on_their_own_test_data(monkeypatch, section):
    made = of_sites(monkeypatch, ["c", "d", "a", "c", "d"], partition="natural", **section)
    assert made.train.client_names == made.client_test.client_names == ("a", "b", "c")
    assert made.train.sizes.tolist() == [10, 10, 10], "nothing is held out"
    values = [made.client_test.client(i)["x"].ravel().tolist() for i in range(3)]
    assert values == [[102], [], [100, 103]]
    assert made.test.num_examples == 5, "of all, with clients that do not train"
    assert made.is_test_of_clients
    (note,) = made.notes
    assert note == "1 of 3 clients have no test examples, and no test accuracy of their own: b"
    # The folder of the run says so, and a resumed run has the same data.
    again = of_sites(monkeypatch, ["c", "d", "a", "c", "d"], **made.chosen)
    assert again.client_test.sizes.tolist() == made.client_test.sizes.tolist()
    assert made.chosen["client_test_share"] == 0.0


@pytest.mark.parametrize(
    ("test_sites", "section"),
    [
        (["d", "e", "f"], {"partition": "natural"}),
        (None, {"partition": "natural"}),
        ([], {"partition": "natural"}),
        (["a", "b", "c"], {"partition": "natural", "client_test_share": 0.2}),
        (["a", "b", "c"], {"partition": "iid", "num_clients": 3}),
    ],
)
def test_other_clients_hold_out_a_share(monkeypatch, test_sites, section):
    made = of_sites(monkeypatch, test_sites, **section)
    assert made.train.sizes.tolist() == [8, 8, 8]
    assert made.client_test.sizes.tolist() == [2, 2, 2]
    assert made.client_test.examples["x"].max() < 100
    assert "client_test_share" not in made.chosen
    assert made.is_test_of_clients == (
        test_sites == ["a", "b", "c"] and "num_clients" not in section
    )


def test_fewer_examples_are_drawn_from_all_and_the_test_part_stays_whole(monkeypatch):
    x = np.arange(60.0, dtype=np.float32)[:, None]
    examples, owner = {"x": x, "y": np.repeat(np.arange(3), 20)}, np.repeat([0, 1, 2], [1, 29, 30])
    data = Dataset("own", examples, examples, 3, "classification", owner, owner)
    monkeypatch.setattr(population.datasets, "load", lambda *_args, **_options: data)

    def rows(count, seed=0, **section):
        given = {"partition": "iid", "num_clients": 2, "client_test_share": 0.0} | section
        section = DataSection(name="digits", max_examples=count, **given)
        made = population.build_population(section, seed=seed)
        assert made.test.num_examples == 60
        return made, made.train.examples["x"].ravel().astype(int).tolist()

    drawn = {seed: set(rows(24, seed)[1]) for seed in range(20)}
    assert all(len(each) == 24 for each in drawn.values()), "without replacement"
    # By class, whose rows lie together: 8 of 20 each, with a variance of 8 (2/3) (36/59).
    counts = np.array(
        [np.bincount([r // 20 for r in each], minlength=3) for each in drawn.values()]
    )
    assert np.all(np.abs(counts.mean(0) - 8) < 5 * np.sqrt(8 * 2 / 3 * 36 / 59 / 20))
    assert 3.5 > counts.std() > 0.9 and len(set(map(frozenset, drawn.values()))) == 20
    assert set(rows(9)[1]) < drawn[0], "a smaller number draws some of the same"
    assert sorted(rows(60)[1]) == list(range(60))
    assert sorted(rows(60, num_clients=3)[1]) == sorted(rows(None, num_clients=3)[1])
    seed = next(seed for seed, each in drawn.items() if 0 not in each)
    made, natural = rows(24, seed, partition="natural")
    assert set(natural) == drawn[seed] and made.train.client_names == ("1", "2")
    assert made.client_test.sizes.tolist() == [29, 30]
    left_out = (
        "1 of 3 clients have none of the examples drawn (data.max_examples), and are left out"
    )
    assert made.notes == (left_out,) and not any("left out" in n for n in rows(24, seed)[0].notes)
    with pytest.raises(
        ValueError, match=r"data.max_examples must be at most 60, .* of own, got 61"
    ):
        rows(61)


@pytest.mark.parametrize("name", ["iid", "dirichlet", "shards", "natural"])
def test_booleans_are_labels(monkeypatch, name):
    def made(kind):
        labels = (np.arange(40) % 3 == 0).astype(kind)
        arrays = {"x": np.arange(40.0, dtype=np.float32)[:, None], "y": labels}
        data = Dataset("own", arrays, arrays, 2, "classification", np.arange(40) % 2)
        monkeypatch.setattr(population.datasets, "load", lambda *_args, **_options: data)
        section = DataSection(name="digits", partition=name, num_clients=2)
        return population.build_population(section, seed=0)

    booleans, numbers = made(bool), made(np.int32)
    for part in ("train", "client_test", "test"):
        ours, theirs = (getattr(each, part) for each in (booleans, numbers))
        np.testing.assert_array_equal(ours.examples["y"], theirs.examples["y"])
        np.testing.assert_array_equal(ours.offsets, theirs.offsets)
    assert booleans.notes == numbers.notes
    counts = [each.statistics().label_counts for each in (booleans, numbers)]
    np.testing.assert_array_equal(*counts)


def test_classes_without_training_examples_are_named(tmp_path):
    (tmp_path / "t.csv").write_text(
        "a,y,s\n1,no,train\n2,yes,train\n3,maybe,test\n4,no,test\n", encoding="utf-8"
    )
    options = {"label": "y", "split": "s", "path": str(tmp_path / "t.csv")}
    made = population.build_population(DataSection(name="table", num_clients=1, options=options), 0)
    assert "1 of 3 classes have no training examples: maybe" in made.notes
