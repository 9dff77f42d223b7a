"""User tables: columns by name, required rules, errors that name the cell."""

import gzip
import json
import re
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet
import pytest

from fedjax_dp.data import datasets
from fedjax_dp.data.datasets import cells
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.assembly.own_data import own_population
from fedjax_dp.experiment.assembly.population import build_population
from fedjax_dp.experiment.reading import config_files

CSV = """\
hospital,age,job,smokes,ill
north,30,nurse,true,no
south,60,cook,false,yes
north,40,nurse,false,no
south,,cook,true,yes
north,50,,true,yes
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text, name="patients.csv"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return name

    return write


def load(path="patients.csv", **options):
    return datasets.load("table", path=path, **{"label": "ill"} | options)


WHOLE = "\n".join(line for line in CSV.splitlines() if ",," not in line) + "\n"


def test_columns_by_name_without_any_option(write):
    write(WHOLE)
    data = load(client="hospital")
    assert data.feature_names == (
        "age",
        *("job=cook", "job=nurse"),
        *("smokes=false", "smokes=true"),
    )
    expected = [[30, 0, 1, 0, 1], [60, 1, 0, 1, 0], [40, 0, 1, 1, 0]]
    np.testing.assert_array_equal(data.train["x"], expected)
    assert data.train["x"].dtype == np.float32
    np.testing.assert_array_equal(data.train["y"], [0, 1, 0])
    assert data.class_names == ("no", "yes") and data.num_classes == 2
    counts = "3 training and 0 test examples"
    arrays = "x: float32 [5], y: int32 []"
    assert repr(data) == f"Dataset('table', classification, {counts}, {arrays})"
    assert data.train_clients.tolist() == ["north", "south", "north"]
    assert len(data.test["y"]) == 0 and data.test["x"].shape == (0, 5)
    (words,) = data.exact_statistics
    assert words.startswith("which values occur in 'job', 'smokes', 'ill'")


@pytest.mark.parametrize("ending", ["parquet", "arrow", "stream.arrow", "jsonl", "csv.gz", "tsv"])
def test_every_format_has_the_same_result(write, tmp_path, ending):
    write(CSV)
    options = {"client": "hospital", "missing": "mean"}
    expected = load(**options)
    table = pa.csv.read_csv("patients.csv")
    path = f"patients.{ending}"
    if ending == "parquet":
        pa.parquet.write_table(table, path)
    elif ending == "arrow":
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table, max_chunksize=2)
    elif ending == "stream.arrow":
        with pa.ipc.new_stream(path, table.schema) as file:
            file.write_table(table)
    elif ending == "jsonl":
        write("\n".join(map(json.dumps, table.to_pylist())), path)
    elif ending == "tsv":
        write(CSV.replace(",", "\t"), path)
    else:
        with pa.CompressedOutputStream(path, "gzip") as file:
            file.write(CSV.encode())
    if ending in ("parquet", "arrow", "stream.arrow", "jsonl"):
        # Truth values are numbers there.
        options["categories"] = {"smokes": ["false", "true"]}
    found = load(path, **options)
    np.testing.assert_array_equal(found.train["x"], expected.train["x"])
    np.testing.assert_array_equal(found.train["y"], expected.train["y"])
    np.testing.assert_array_equal(found.train_clients, expected.train_clients)
    assert found.feature_names == expected.feature_names


def test_missing_values_by_each_rule(write):
    write(CSV)
    who = {"client": "hospital"}
    with pytest.raises(
        ValueError, match=r"patients\.csv, row 4, column 'age', must have a.*'drop'"
    ):
        load(**who)
    assert load(missing="drop", **who).train["x"].shape == (3, 5)
    filled = load(missing="fill", fill={"age": 20, "job": "none"}, **who)
    assert filled.feature_names[1:4] == ("job=cook", "job=none", "job=nurse")
    np.testing.assert_array_equal(filled.train["x"][3], [20, 1, 0, 0, 0, 1])
    np.testing.assert_array_equal(filled.train["x"][4], [50, 0, 1, 0, 0, 1])
    with pytest.raises(ValueError, match=r"row 5, column 'job', must have a value.*or one in fill"):
        load(missing="fill", fill={"age": 20}, **who)
    mean = load(missing="mean", **who)
    # Of 30, 60, 40 and 50; cook and nurse come twice, the first of them is taken.
    np.testing.assert_array_equal(mean.train["x"][3], [45, 1, 0, 0, 1])
    np.testing.assert_array_equal(mean.train["x"][4], [50, 1, 0, 0, 1])


def test_means_are_of_the_training_part_alone(write):
    rows = ["part,age,ill", "train,10,a", "train,,b", "train,30,a", "test,,b", "test,90,a"]
    write("\n".join(rows))
    data = load(split="part", missing="mean")
    np.testing.assert_array_equal(data.train["x"][:, 0], [10, 20, 30])
    np.testing.assert_array_equal(data.test["x"][:, 0], [20, 90])
    scaled = load(split="part", missing="mean", scaling="standard")
    np.testing.assert_allclose(scaled.train["x"][:, 0], np.array([-1, 0, 1]) * np.sqrt(1.5))
    np.testing.assert_allclose(scaled.test["x"][1, 0], 70 / np.std([10, 20, 30]), rtol=1e-6)


def test_public_ranges_learn_nothing(write):
    write(WHOLE)
    options = {"scaling": "range", "ranges": {"age": [20, 50]}}
    declared = {
        "job": ["nurse", "cook", "smith"],
        "smokes": ["true", "false"],
        "ill": ["no", "yes"],
    }
    data = load(**options, features=["age", "job"], categories=declared)
    np.testing.assert_allclose(data.train["x"][:, 0], [1 / 3, 1, 2 / 3], rtol=1e-6)
    assert data.exact_statistics == () and data.feature_names[-1] == "job=smith"
    with pytest.raises(ValueError, match="ranges must hold the lowest and highest value of 'age'"):
        load(scaling="range", features=["age"])


def test_all_columns_without_a_fill_or_a_range_are_named(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b,c,d,y\n1,,,u,p\n,2,4,,q\n3,5,6,v,p\n")
    options = {"path": str(path), "label": "y"}
    for more, way in (
        ({"missing": "fill", "fill": {"c": 1}}, "or one in fill; so must 'b', 'd', got '1 missing"),
        ({}, "'drop', 'fill' or 'mean'; so must 'b', 'c', 'd', got"),
        ({"missing": "drop", "scaling": "range", "ranges": {"b": [0, 9]}}, "value of 'a', 'c', "),
    ):
        with pytest.raises(ValueError, match=way):
            datasets.load("table", **options, **more)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scaling": "standard"}, "means and standard deviations"),
        ({"missing": "mean"}, "most frequent categories"),
        ({"categories": {"job": ["nurse", "cook"], "smokes": ["true", "false"]}}, "occur in 'ill'"),
    ],
)
def test_what_was_read_off_the_data_is_named(write, options, words):
    write(CSV)
    data = load(**{"missing": "drop", "client": "hospital"} | options)
    assert any(words in each for each in data.exact_statistics)


def test_integer_codes_for_embeddings(write):
    write(WHOLE)
    data = load(coding="integer", client="hospital")
    assert sorted(data.train["x"]) == ["job", "numbers", "smokes"]
    np.testing.assert_array_equal(data.train["x"]["job"], [1, 0, 1])
    assert data.train["x"]["job"].dtype == np.int32
    np.testing.assert_array_equal(data.train["x"]["numbers"], [[30], [60], [40]])


def test_files_may_be_clients_and_test_rows_a_file(write):
    for name, age in (("north", 30), ("south", 60)):
        write(f"age,ill\n{age},no\n{age + 1},yes\n", f"hospitals/{name}.csv")
    write("ill,age\nyes,70\n", "test.csv")
    data = load("hospitals/*.csv", clients_are_files=True, test_path="test.csv")
    assert data.train_clients.tolist() == ["north", "north", "south", "south"]
    np.testing.assert_array_equal(data.train["x"][:, 0], [30, 31, 60, 61])
    np.testing.assert_array_equal(data.test["x"], [[70]])
    np.testing.assert_array_equal(data.test["y"], [1])


def test_rows_to_predict_need_neither_labels_nor_clients(write):
    write("id,age,job,note,ill\n10,30,nurse,,no\n9,60,cook,x,yes\n9,40,cook,,no\n")
    write("age,job\n50,cook\n20,nurse\n", "new.csv")
    options = {"client": "id", "features": ["age", "job"]}
    known, data = load(**options), load(test_path="new.csv", **options)
    assert data.train_clients.tolist() == known.train_clients.tolist() == [10, 9, 9]
    assert data.test_clients is None and data.class_names == known.class_names == ("no", "yes")
    np.testing.assert_array_equal(data.train["y"], known.train["y"])
    np.testing.assert_array_equal(data.test["x"], [[50, 1, 0], [20, 0, 1]])
    np.testing.assert_array_equal(data.test["y"], [-1, -1])
    write("id,age,job,note,ill\n,50,cook,,\n", "new.csv")
    np.testing.assert_array_equal(load(test_path="new.csv", **options).test["y"], [-1])


@pytest.mark.parametrize("options", [{"split": "s"}, {"test_fraction": 0.3}])
def test_another_test_part_leaves_the_training_part_as_it_was(write, options):
    rows = [f"{i},{'yes' if i % 2 else 'no'},{'test' if i % 3 else 'train'}" for i in range(20)]
    write("\n".join(["n,ill,s", *rows]))
    write("n\n5\n7\n", "new.csv")
    options |= {"features": ["n"], "scaling": "standard"}
    before, after = load(**options), load(test_path="new.csv", **options)
    for name in ("x", "y"):
        np.testing.assert_array_equal(before.train[name], after.train[name])
    assert len(before.test["y"]) > 2 and len(after.test["y"]) == 2


def test_numbers_to_predict_are_nan(write):
    write("a,ill\n1,0.5\n2,1.5\n")
    write("a\n3\n", "new.csv")
    data = load(test_path="new.csv", task="regression")
    np.testing.assert_array_equal(data.train["y"], np.float32([0.5, 1.5]))
    np.testing.assert_array_equal(data.test["y"], np.float32([np.nan]))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("age,ilness", r"new\.csv must have the input columns of patients\.csv, \['age', 'job'\]"),
        ("age,job,ilness", r"and no unknown ones, got \['age', 'job', 'ilness'\]"),
    ],
)
def test_columns_of_rows_to_predict_are_those_of_the_inputs(write, header, message):
    write("age,job,ill\n30,nurse,no\n60,cook,yes\n")
    write(f"{header}\n{','.join(['50'] * len(header.split(',')))}\n", "new.csv")
    with pytest.raises(ValueError, match=message):
        load(test_path="new.csv")


def test_one_missing_label_among_others_is_refused(write):
    write("a,ill\n1,no\n2,yes\n")
    write("a,ill\n3,no\n4,\n", "new.csv")
    with pytest.raises(ValueError, match=r"new\.csv, row 2, column 'ill', must have a value"):
        load(test_path="new.csv")


def test_a_share_of_rows_is_for_testing(write):
    write("n,ill\n" + "".join(f"{i},{'yes' if i % 2 else 'no'}\n" for i in range(50)))
    one, other = (load(test_fraction=0.2, seed=seed) for seed in (0, 1))
    assert len(one.train["y"]) == 40 and len(one.test["y"]) == 10
    together = np.concatenate([one.train["x"], one.test["x"]])[:, 0]
    assert sorted(together) == list(range(50))
    assert not np.array_equal(one.test["x"], other.test["x"])


def test_numbers_as_labels_and_as_clients(write):
    write("id,a,ill\n10,1,0.5\n9,2,2.5\n10,3,1\n")
    data = load(client="id", task="regression")
    np.testing.assert_array_equal(data.train["y"], np.float32([0.5, 2.5, 1]))
    assert data.num_classes == 0 and data.train_clients.dtype == np.int64
    write("id,a,ill\n010,1,10\n9,2,9\n11,3,9\n")
    data = load(client="id")
    assert data.train_clients.tolist() == ["010", "9", "11"], "010 is a name"
    assert data.class_names == ("9", "10"), "whole numbers have their own order"


def test_a_byte_order_mark_and_quotes(write):
    write('\ufeffage,"job, now",ill\n30,"cook, nurse",no\n40,smith,yes\n')
    assert load().feature_names == ("age", "job, now=cook, nurse", "job, now=smith")


WRONG = {
    "no label": (CSV, {"label": "il"}, r"label, a column of patients.csv, must be one of .*'ill'"),
    "client": (CSV, {"client": "hospitl"}, "did you mean 'hospital'"),
    "two roles": (CSV, {"client": "ill"}, r"be different columns, got \['ill'\]"),
    "twice": ("a,a,ill\n1,2,x\n", {}, r"patients\.csv must name every column once, got \['a'\]"),
    "ragged": ("a,ill\n1,x\n1,2,y\n", {}, r"patients\.csv must be a table.*Expected 2 columns"),
    "empty": ("", {}, r"patients\.csv must be a table"),
    "header alone": ("a,ill\n", {}, r"patients\.csv must hold rows"),
    "mixed": ("a,ill\n1,x\n2,y\n?,x\n", {}, r"row 3, column 'a', must hold numbers.*got '\?'"),
    "infinite": ("a,ill\n1,x\n1e999,y\n2,x\n", {}, r"row 2, column 'a', must hold finite .*1e999"),
    "label missing": ("a,ill\n1,x\n2,\n", {}, r"row 2, column 'ill', must have a value.*the label"),
    "client missing": (
        "c,a,ill\nn,1,x\n,2,y\n",
        {"client": "c"},
        "row 2, column 'c', must have a value in every row, as the client",
    ),
    "split": (
        "s,a,ill\ntrain,1,x\nvalid,2,y\n",
        {"split": "s"},
        "row 2, column 's', must be one of train, test, got 'valid'",
    ),
    "no training": ("s,a,ill\ntest,1,x\ntest,2,y\n", {"split": "s"}, "hold training rows"),
    "two splits": (
        CSV,
        {"split": "job", "test_fraction": 0.5},
        "only one of split and test_fraction",
    ),
    "one class": ("a,ill\n1,x\n2,x\n", {}, "label 'ill' must have two classes or more"),
    "texts as numbers": (
        "a,ill\n1,x\n2,y\n",
        {"task": "regression"},
        "row 1, column 'ill', must hold numbers, since task is 'regression', got 'x'",
    ),
    "undeclared": (
        WHOLE,
        {"categories": {"job": ["cook"]}},
        "row 1, column 'job', must be one of cook, its declared categories, got 'nurse'",
    ),
    "declared twice": (WHOLE, {"categories": {"job": ["cook", "cook"]}}, "be distinct values"),
    "fill alone": (WHOLE, {"fill": {"age": 1}}, "fill must be given only if missing is 'fill'"),
    "ranges alone": (WHOLE, {"ranges": {"age": [0, 1]}}, "given only if scaling is 'range'"),
    "a range": (
        WHOLE,
        {"scaling": "range", "ranges": {"age": [9, 1]}},
        "ranges.age must be two numbers, the lower one first",
    ),
    "a range of texts": (
        WHOLE,
        {"scaling": "range", "ranges": {"age": [0, 99], "job": [0, 1]}},
        r"ranges must name columns of numbers, \['age'\], got \['job'\]",
    ),
    "fill with text": (
        CSV,
        {"missing": "fill", "fill": {"age": "old", "job": "none"}},
        r"fill\.age must be a finite number .*, got 'old'",
    ),
    "nothing left": ("a,ill\n,x\n,y\n", {"missing": "drop"}, "have a row without missing cells"),
    "no mean": ("a,ill\n,x\n,y\n", {"missing": "mean"}, "column 'a' must have a value in the"),
    "separator": (CSV, {"separator": "::"}, "separator must be one ASCII character"),
    "a quote between cells": (CSV, {"separator": '"'}, "separator must be one .*'\"'"),
    "a range without numbers": (
        WHOLE,
        {"scaling": "range", "ranges": {"age": ["x", 1]}},
        r"ranges.age must be two numbers, the lower one first, .*\['x', 1\]",
    ),
    "too many": (
        "a,ill\n" + "".join(f"name{i % 1001},{i % 2}\n" for i in range(2002)),
        {},
        "column 'a' must have at most 1000 different strings; list them in categories, or leave it "
        "out of features, got 1001",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_read_is_refused_by_place_rule_and_value(write, case):
    text, options, message = WRONG[case]
    write(text)
    with pytest.raises(ValueError, match=message):
        load(**options)


def test_paths_that_lead_nowhere(write, tmp_path):
    with pytest.raises(ValueError, match=r"path must be a file; there is none in .*nowhere\.csv"):
        load("nowhere.csv")
    with pytest.raises(ValueError, match=r"path must match files, got '\*\.csv'"):
        load("*.csv")
    write("x", "table.xlsx")
    with pytest.raises(ValueError, match=r"table\.xlsx must have one of the suffixes \.csv"):
        load("table.xlsx")
    write("no parquet", "table.parquet")
    with pytest.raises(ValueError, match=r"table\.parquet must be a Parquet file"):
        load("table.parquet")
    write("no arrow", "table.arrow")
    with pytest.raises(ValueError, match=r"table\.arrow must be an Arrow file or stream"):
        load("table.arrow")


def test_files_of_other_columns_and_kinds(write):
    write("a,ill\n1,x\n", "one.csv")
    write("b,ill\n1,y\n", "two.csv")
    with pytest.raises(ValueError, match=r"two\.csv must have the columns of one\.csv"):
        load("*.csv")
    times = pa.table({"when": pa.array([0], pa.timestamp("s")), "ill": ["x"]})
    pa.parquet.write_table(times, "times.parquet")
    with pytest.raises(ValueError, match="'when', must hold numbers, strings or Booleans"):
        load("times.parquet")


def test_nan_in_parquet_is_missing_and_infinity_is_refused(write):
    pa.parquet.write_table(pa.table({"a": [1.0, np.nan], "ill": ["x", "y"]}), "t.parquet")
    with pytest.raises(ValueError, match="row 2, column 'a', must have a value in every row"):
        load("t.parquet")
    assert load("t.parquet", missing="fill", fill={"a": 7}).train["x"][1, 0] == 7
    pa.parquet.write_table(pa.table({"a": [1.0, np.inf], "ill": ["x", "y"]}), "t.parquet")
    with pytest.raises(
        ValueError, match=r"row 2, column 'a', must hold finite numbers that.*, got inf"
    ):
        load("t.parquet")


def test_a_configuration_makes_clients_with_the_names_of_the_table(write):
    rows = [f"{'north' if i % 3 else 'south'},{i},{'no' if i % 2 else 'yes'}" for i in range(30)]
    write("hospital,age,ill\n" + "\n".join(rows) + "\n")
    words = {
        "data.name": "table",
        "data.partition": "natural",
        "data.options.path": "patients.csv",
        "data.options.client": "hospital",
        "data.options.label": "ill",
        "data.options.scaling": "range",
        "data.options.ranges": "{ age = [0, 30] }",
    }
    config = load_config(None, [f"--{key}={value}" for key, value in words.items()])
    population = build_population(config.data, config.run.seed)
    assert population.train.client_names == ("north", "south")
    assert population.train.sizes.tolist() == [16, 8] and population.client_test is not None
    assert population.exact_statistics == (
        "which values occur in 'ill', since no categories were declared",
    )
    with pytest.raises(config_files.ConfigError, match="must hold 'path'"):
        load_config(None, ["--data.name=table"])
    words["data.options.ranges"] = "{ age = 30 }"
    with pytest.raises(
        config_files.ConfigError, match="be a table, each value a list, each entry a f"
    ):
        load_config(None, [f"--{key}={value}" for key, value in words.items()])


def test_truth_values_have_a_range_by_nature(write):
    table = pa.table({"a": [5.0, 10.0], "b": [True, False], "ill": ["x", "y"]})
    pa.parquet.write_table(table, "t.parquet")
    data = load("t.parquet", scaling="range", ranges={"a": [0, 10]})
    np.testing.assert_array_equal(data.train["x"], [[0.5, 1], [1, 0]])


@pytest.mark.parametrize(
    ("files", "pattern", "names"),
    [
        (("site.1.csv", "site.2.csv"), "site.*.csv", ("site.1", "site.2")),
        (("h1/data.csv", "h2/data.csv"), "*/data.csv", ("h1/data", "h2/data")),
        (("in/h1/a.csv", "in/h2/a.csv", "in/h2/b.csv"), "in/*/*.csv", ("h1/a", "h2/a", "h2/b")),
        (("a.v1.CSV", "b.csv"), "*.*", ("a.v1", "b")),
    ],
    ids=lambda value: str(value[0]),
)
def test_clients_that_are_files_are_as_many_as_the_files(write, files, pattern, names):
    for number, name in enumerate(files):
        write(f"a,ill\n{number},no\n{number},yes\n", name)
    data = load(pattern, clients_are_files=True)
    assert dict.fromkeys(data.train_clients.tolist()) == dict.fromkeys(names)
    assert data.train_clients.tolist() == [name for name in names for _ in range(2)]


def test_files_that_would_be_clients_of_one_name_are_refused(write):
    write("a,ill\n1,no\n2,yes\n", "north.csv")
    write("a\till\n1\tno\n2\tyes\n", "north.tsv")
    with pytest.raises(ValueError, match=r"clients_are_files must .*north\.csv and north\.tsv"):
        load("north.*", clients_are_files=True)


def test_the_test_rows_of_a_client_are_in_the_file_of_its_name(write):
    for part in ("train", "test"):
        for client in ("h1", "h2"):
            write(
                f"a,ill\n1,no\n2,yes\n{'3,no' if part == 'test' else ''}", f"{part}/{client}/x.csv"
            )
    data = load("train/*/x.csv", test_path="test/*/x.csv", clients_are_files=True)
    assert data.train_clients.tolist() == ["h1/x"] * 2 + ["h2/x"] * 2
    assert data.test_clients.tolist() == ["h1/x"] * 3 + ["h2/x"] * 3


@pytest.mark.parametrize("name", ["--5", "²", "٣", "1-"])
def test_what_only_resembles_a_whole_number_is_a_name(write, name):
    write(f"id,kind,ill\n{name},{name},x\n7z,4z,y\n")
    data = load(client="id")
    assert data.train_clients.tolist() == [name, "7z"]
    assert f"kind={name}" in data.feature_names


def test_large_whole_numbers_name_clients_and_classes(write):
    table = {"id": [1e20, 2.0, 2.5], "a": [1, 2, 3], "ill": [1e20, 0.0, 0.0]}
    pa.parquet.write_table(pa.table(table), "t.parquet")
    data = load("t.parquet", client="id")
    assert data.train_clients.tolist() == ["1e+20", "2", "2.5"]
    assert data.class_names == ("0", "1e+20")


def test_a_number_names_the_same_client_in_every_file(write):
    for name, ids in (("a.parquet", [1.0, 2.0]), ("b.parquet", [1.0, 2.5])):
        pa.parquet.write_table(pa.table({"id": ids, "a": [1, 2], "ill": ["x", "y"]}), name)
    assert load("*.parquet", client="id").train_clients.tolist() == ["1", "2", "1", "2.5"]


@pytest.mark.parametrize("path", ["t.parquet", "t.csv"])
def test_whole_numbers_that_a_float_would_change_are_refused(write, path):
    table = pa.table({"a": [1, 2**60 + 1], "ill": ["x", "y"]})
    pa.parquet.write_table(table, path) if "parquet" in path else pa.csv.write_csv(table, path)
    with pytest.raises(ValueError, match=r"row 2, column 'a', must .*2\^53.*1152921504606846977"):
        load(path)
    codes = load(path, categories={"a": [1, 2**60 + 1]})
    np.testing.assert_array_equal(codes.train["x"], [[1, 0], [0, 1]])


def test_a_column_that_is_not_used_may_be_of_any_kind(write):
    when = pa.array([0, 1], pa.timestamp("s"))
    pa.parquet.write_table(pa.table({"when": when, "a": [1, 2], "ill": ["x", "y"]}), "t.parquet")
    np.testing.assert_array_equal(load("t.parquet", features=["a"]).train["x"], [[1], [2]])
    for options in ({}, {"client": "when"}, {"features": ["a"], "label": "when"}):
        with pytest.raises(ValueError, match="'when', must hold numbers, strings or Booleans"):
            load("t.parquet", **options)


@pytest.mark.parametrize(
    ("text", "options", "place"),
    [
        ("a,ill\n1,x\n1e39,y\n", {}, "row 2, column 'a'"),
        ("a,ill\n1,x\n-1e300,y\n", {"scaling": "standard"}, "row 2, column 'a'"),
        ("a,ill\n1,1\n1,1e39\n", {"task": "regression"}, "row 2, column 'ill'"),
        ("a,ill\n1,x\n1e999,y\n", {}, "row 2, column 'a'"),
        ("a,ill\n1e-300,x\n2e-300,y\n", {}, "row 2, column 'a'"),
        ("a,ill\n1,x\n,y\n", {"missing": "fill", "fill": {"a": 1e39}}, r"fill\.a"),
        ("a,ill\n1,x\n,y\n", {"missing": "fill", "fill": {"a": 10**400}}, r"fill\.a"),
        ("a,ill\n1,x\n2,y\n", {"scaling": "range", "ranges": {"a": [0, 1e39]}}, r"ranges\.a"),
        ("a,ill\n1,x\n2,y\n", {"scaling": "range", "ranges": {"a": [0, 10**400]}}, r"ranges\.a"),
    ],
)
def test_numbers_beyond_float32_are_refused_by_place(write, text, options, place):
    write(text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match=rf"{place},? must .*float32.*got"):
            load(**options)


def test_an_infinite_label_is_refused(write):
    pa.parquet.write_table(pa.table({"a": [1, 2], "ill": [1.0, np.inf]}), "t.parquet")
    for task in ("regression", "classification"):
        with pytest.raises(ValueError, match=r"row 2, column 'ill', must hold .*got inf"):
            load("t.parquet", task=task)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a,ill\n1,u\nx,v\n", "row 2, column 'a', must .*'x'"),
        ('a,ill\n"1,5",u\n2,v\n', "row 1, column 'a', must .*'1,5'"),
        ("a,ill\n1,u\nx,v\ny,v\nz,v\n", "row 1, column 'a', must .*'1'"),
        ("a,ill\n1_0,u\n2,v\n", "row 1, column 'a', must .*'1_0'"),
        ("a,ill\n5,1\n6,0\n7,?\n", r"row 3, column 'ill', must .*'\?'"),
    ],
)
def test_texts_beside_numbers_are_refused_unless_declared(write, text, place):
    write(text)
    with pytest.raises(ValueError, match=place):
        load()
    declared = {"a": ["1", "2", "x", "y", "z", "1,5", "1_0", "5", "6", "7"]}
    assert load(categories={**declared, "ill": ["u", "v", "0", "1", "?"]}).train["x"].shape[1] == 10


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.arrow", "a.csv.gz"])
def test_damaged_files_are_refused_or_read_whatever_was_changed(write, tmp_path, name):
    write(WHOLE)
    table = pa.csv.read_csv("patients.csv")
    if name == "a.parquet":
        pa.parquet.write_table(table, name)
    elif name == "a.arrow":
        with pa.ipc.new_file(name, table.schema) as file:
            file.write_table(table)
    else:
        data = WHOLE.encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    whole, rng = (tmp_path / name).read_bytes(), np.random.default_rng(0)
    for _ in range(40):
        data = bytearray(whole)
        for place in rng.integers(0, len(data), rng.integers(1, 6)):
            data[place] = rng.integers(0, 256)
        (tmp_path / f"b{name}").write_bytes(data[: rng.integers(1, 2 * len(data))])
        try:
            load(f"b{name}", client="hospital")
        except ValueError as error:
            assert "must" in str(error)


@pytest.mark.parametrize(
    ("one", "other", "name"),
    [
        *(("0", "0.0", "0"), ("-0", "+0.00", "0"), ("5", "+5", "5"), ("1e3", "1000.0", "1000")),
        *(
            (".5", "0.50", "0.5"),
            ("True", "true", "true"),
            ("Mu\u0308ller", "M\xfcller", "M\xfcller"),
        ),
    ],
)
def test_equal_cells_of_two_sites_are_one_class_and_one_client(write, one, other, name):
    last = "z" if name.isalpha() else "7"
    write(f"id,a,ill\n{one},1,{one}\n{last},2,{last}\n", "a.csv")
    write(f"id,a,ill\n{other},1,{other}\n{last},2,{last}\n", "b.csv")
    for options in ({}, {"categories": {"ill": [last, other]}}):
        for where in ({"path": "*.csv"}, {"path": "a.csv", "test_path": "b.csv"}):
            data = load(client="id", **where, **options)
            assert sorted(data.class_names) == sorted([last, name])
            ids = [*data.train_clients, *data.test_clients]
            assert [str(each) for each in ids] == [name, last] * 2
            labels = [*data.train["y"], *data.test["y"]]
            assert labels[:2] == labels[2:]


def test_numbers_are_compared_with_those_of_other_formats(write):
    write("a,kind,ill\n1,0.5,1\n2,2,0\n", "a.csv")
    for kind in (pa.float32(), pa.float64(), pa.decimal128(5, 2)):
        columns = {"a": [3, 4], "kind": pa.array([0.5, 2]).cast(kind), "ill": [1.0, 0.0]}
        pa.parquet.write_table(pa.table(columns), "b.parquet")
        data = load("[ab].*", categories={"kind": [0.5, 2]})
        assert data.class_names == ("0", "1") and data.train["y"].tolist() == [1, 0, 1, 0]
        np.testing.assert_array_equal(data.train["x"][2:, 1:], data.train["x"][:2, 1:])


@pytest.mark.parametrize(("column", "options"), [("a", {}), ("ill", {}), ("id", {"client": "id"})])
def test_a_name_with_leading_zeros_in_some_rows_is_refused(write, column, options):
    rows = [{"id": "3", "a": "n", "ill": "x"}, {"id": "4", "a": "m", "ill": "y"}] * 2
    rows = [dict(row) for row in rows]
    for row, text in zip(rows, ["07", "8", "7", "8"], strict=True):
        row[column] = text
    write("id,a,ill\n" + "".join(f"{r['id']},{r['a']},{r['ill']}\n" for r in rows))
    declared = {"a": ["07", "7", "8"]} if column == "a" else {}
    if column == "a":
        assert load(features=["a"], categories=declared).train["x"].sum() == 4
        rows[0]["a"] = "n"
        write("id,a,ill\n" + "".join(f"{r['id']},{r['a']},{r['ill']}\n" for r in rows))
        return
    with pytest.raises(
        ValueError, match=f"row 3, column {column!r}, must write each number in one"
    ):
        load(**{"features": ["a"], **options})


@pytest.mark.parametrize(
    ("options", "cells", "numbers"),
    [
        ({"decimal": ","}, ["1,5", "-2", ",25", "3,e2"], [1.5, -2, 0.25, 300]),
        ({"thousands": ","}, ["1,234", "12", "1,23,456.5"], [1234, 12, 123456.5]),
        ({"decimal": ",", "thousands": "."}, ["1.234,5", "12"], [1234.5, 12]),
        ({"thousands": " "}, ["1\u202f234", "1 234 567", "1\xa0000"], [1234, 1234567, 1000]),
        ({"thousands": "'"}, ["1'234", "1\u2019234.5"], [1234, 1234.5]),
        ({"thousands": "_"}, ["1_234"], [1234]),
    ],
)
def test_numbers_are_read_as_they_are_written(write, options, cells, numbers):
    write("a;ill\n" + "".join(f"{cell};{i % 2}\n" for i, cell in enumerate([*cells, "1", "2"])))
    data = load(separator=";", **options)
    np.testing.assert_array_equal(data.train["x"][:-2, 0], np.float32(numbers))
    assert data.exact_statistics == (
        "which values occur in 'ill', since no categories were declared",
    )
    coded = load(separator=";", categories={"a": [*cells, 1, "2"]}, **options)
    np.testing.assert_array_equal(coded.train["x"], np.eye(len(cells) + 2))


@pytest.mark.parametrize(
    ("options", "cell"),
    [
        ({"thousands": ","}, "1,23"),
        ({"thousands": ","}, "1,2345"),
        ({"thousands": ",", "decimal": "."}, "1.234,5"),
        ({"decimal": ","}, "1.5"),
        ({"decimal": ",", "thousands": "."}, "1.5"),
        ({}, "\u22125"),
    ],
)
def test_numbers_written_in_another_way_are_refused(write, options, cell):
    write(f"a;ill\n1;x\n2;y\n{cell};x\n")
    with pytest.raises(ValueError, match=r"row 3, column 'a', must hold n.*decimal and thou"):
        load(separator=";", **options)


AMOUNTS = (
    ["1,5", "2,5"],
    ["1,234", "5,678"],
    ["12 %", "30 %"],
    ["$5", "$7.50"],
    ["5 \u20ac", "-6 \u20ac"],
    *(["5 kg", "7.5kg"], ["EUR 5", "6 EUR"], ["120/80", "130/90"], ["'5", "'6"], ["5-", "6-"]),
    *(["=5", "=6"], ["\u0661", "\u0662"], ["inf", "-inf"]),
    *(["1.5k", "2K"], ["3-4", "0\u20139", "5 to 9"], ["<5", ">= 9", "6+"], ["1e3 kg", "2E-3 g"]),
    *(["10\xa0%", "7\xa0%"], ["(1,234)", "(7)"], ["\u22125", "\u22126.5"], ["[0, 10)", "[10-20]"]),
    *(["5 mg/dl", "6 mmol / l"], ["5 years", "1 yr."], ["2\xd710^3"], ["1\xbd", "\xbc"], ["0x1F"]),
    *(["45.2 \xb1 3"], ["5'11\"", "6'1\""], ["1h 30min", "2 h 5 m"], ["PT5M"], ["1.2M", "3 bn"]),
    ["65 and over", "up to 5", "16:9", "5 m²"],
    *(["1_200", "1_300"], ["R$ 5", "US$6"], ["5 kr.", "kr 6"], ["5 ₽", "6 zł"], ["~5", "~6"]),
)
DATES = (
    *(["2020-01-02", "2021-03-04"], ["2.1.2020", "3.1.2020"], ["1/2/20", "3/4/20"]),
    *(
        ["20200102T103000"],
        ["2020-W01", "2020-W02"],
        ["2020Q1", "2020Q2"],
        ["2:30 PM", "3 Mai 2020"],
    ),
    *(["2020-01-02T10:30:00Z"], ["2 Jan 2020", "March 3, 2020"], ["2020-01", "2020-02"], ["12:30"]),
    ["2020年1月2日", "2021年3月"],
)


@pytest.mark.parametrize("cells", [*AMOUNTS, *DATES], ids=lambda cells: cells[0])
@pytest.mark.parametrize("role", ["a", "ill"])
def test_amounts_and_dates_are_no_categories_unless_declared(write, cells, role):
    cells = [*cells, *cells[:1], *cells] * 3
    other = "ill" if role == "a" else "a"
    write(f"{role};{other}\n" + "".join(f"{cell};{i % 2}\n" for i, cell in enumerate(cells)))
    rule = f"column {role!r}, must hold names or plain numbers, .*by decimal, thousands or dates"
    with pytest.raises(ValueError, match=rule):
        load(separator=";")
    if role == "a" or len(set(cells)) > 1:
        load(separator=";", categories={role: list(dict.fromkeys(cells))})


@pytest.mark.parametrize("role", ["a", "ill", "id"])
@pytest.mark.parametrize(
    "marker", ["?", "-", "--", "\\N", "#DIV/0!", "n.a.", "(null)", "missing", "_"]
)
def test_markers_of_missing_values_are_no_names_unless_declared(write, role, marker):
    rows = [{"a": "u", "ill": "no", "id": "s"}, {"a": "v", "ill": "yes", "id": "t"}] * 2
    rows[2] = rows[0] | {role: marker}
    write("a,ill,id\n" + "".join(f"{','.join(row.values())}\n" for row in rows))
    options = {"features": ["a"], "client": "id"}
    rule = f"row 3, column {role!r}, must hold no marker of a missing value.*in missing_values, or"
    with pytest.raises(ValueError, match=rule):
        load(**options)
    if role == "id":
        return
    declared = {"a": ["u", "v"], "ill": ["no", "yes"]}
    assert load(categories={role: [*declared[role], marker]}, **options).train["x"].shape[0] == 4
    if role == "a":
        listed = load(missing="drop", missing_values=["", marker], **options)
        assert listed.train["x"].shape == (3, 2)


def test_signs_may_be_names(write):
    write("a,ill\n+,no\n-,yes\n+,no\n++,yes\n-,no\n")
    assert load().feature_names == ("a=+", "a=++", "a=-")


@pytest.mark.parametrize(
    ("text", "separator", "guess", "why"),
    [
        *((f"a{s}b{s}ill\n1{s}2{s}0\n3{s}4{s}1\n", ",", s, "3 cells") for s in ";\t|: "),
        ("a;b;ill\n1,5;2;0\n1;2;1\n", ",", ";", "3 cells"),
        ("a;ill\n1,5;0\n2,5;1\n", ",", ";", "2 cells"),
        ('a,ill\n"1\n;2",0\n3,1\n', ";", ",", "2 cells"),
        ("sep=;\na;ill\n1;0\n2;1\n", ",", ";", "first line"),
        ('"sep=|"\r\na|ill\r\n1|0\r\n2|1\r\n', ";", "|", "first line"),
    ],
)
def test_another_separator_is_named(write, text, separator, guess, why):
    write(text)
    rule = rf"separated by '{re.escape(separator)}'.*give separator = {re.escape(repr(guess))}, .*"
    with pytest.raises(ValueError, match=rule + why):
        load(separator=separator)
    numbers = {"decimal": ","} if "1,5" in text else {}
    if '"1' not in text:
        assert len(load(separator=guess, **numbers).train["y"]) == 2
    write(text, "t.tsv")
    if guess != "\t":
        with pytest.raises(
            ValueError, match=r"separated by '\\t'.*name it \.csv, .*give separator"
        ):
            load("t.tsv", separator=separator)


def test_amounts_among_plain_numbers_are_not_taken_for_names(write):
    write("a,ill\n" + "\u22125,0\n\u22126,1\n7,0\n" * 2)
    with pytest.raises(ValueError, match="row 1, column 'a', must hold numbers, as 33%"):
        load()


TIMES = [1_700_000_000 + i for i in range(8)]


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_large_numbers_that_float32_makes_equal_are_refused(write, form):
    def table(values):
        columns = {"at": values, "ill": [i % 2 for i in range(len(values))]}
        rows = zip(*columns.values(), strict=True)
        write("at,ill\n" + "".join(f"{a},{b}\n" for a, b in rows), "t.csv")
        pa.parquet.write_table(pa.table(columns), "t.parquet")
        return f"t.{form}"

    rule = r"row [1-8], column 'at', must hold no numbers above 2\^24 .*origin.* dates.* categories"
    for values in (TIMES, [1e8 + i / 4 for i in range(8)], [-20_000_001 - i for i in range(4)]):
        path = table(sorted(values, key=abs))
        for options in ({}, {"scaling": "range", "ranges": {"at": [-2e9, 2e9]}}):
            with pytest.raises(ValueError, match=rule):
                load(path, features=["at"], **options)
        with pytest.raises(ValueError, match=r"column 'at', must hold no numbers above 2\^24"):
            load(path, label="at", features=["ill"], task="regression")
        ends = [float(min(values)), float(max(values))]
        for options in ({"scaling": "range", "ranges": {"at": ends}}, {"scaling": "standard"}):
            assert len(set(load(path, **options).train["x"].ravel())) == len(values)
    path = table([0, 2**24, 2**24 + 2, 10**9, 10**9 + 64, 10**9])
    assert load(path).train["x"].shape == (6, 1)
    path = table(TIMES)
    assert load(path, categories={"at": TIMES}).train["x"].sum() == 8


def test_a_fill_is_one_of_the_declared_categories(write):
    write("job,ill\ncook,yes\n,no\nnurse,yes\n")
    options = {"missing": "fill", "categories": {"job": ["cook", "nurse"]}}
    with pytest.raises(ValueError, match=r"fill.job must be one of .* cook, nurse, got 'none'"):
        load(fill={"job": "none"}, **options)
    assert load(fill={"job": "cook"}, **options).train["x"].tolist() == [[1, 0], [1, 0], [0, 1]]


def test_values_that_mostly_occur_once_are_no_categories_unless_declared(write):
    notes = [f"was seen by nurse {chr(97 + i)}" for i in range(12)]
    write("note,ill\n" + "".join(f"{note},{i % 2}\n" for i, note in enumerate(notes + notes[:3])))
    with pytest.raises(ValueError, match=r"^column 'note' must hold names that recur.*9 of 12"):
        load()
    assert load(categories={"note": notes}).train["x"].shape == (15, 12)
    write("a,ill\n" + "".join(f"{i % 5},{i / 7}\n" for i in range(30)))
    with pytest.raises(ValueError, match=r"'ill' must hold names that recur.*regression"):
        load()
    assert load(task="regression").train["x"].shape == (30, 1)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-16-le", "cp1252"])
@pytest.mark.parametrize("place", ["cell", "name"])
def test_the_encoding_is_named_and_can_be_given(write, tmp_path, encoding, place):
    text = "j\xf6b,ill\nk\xf6k,x\nnurse,y\n" if place == "name" else "job,ill\nk\xf6k,x\nnurse,y\n"
    (tmp_path / "a.csv").write_bytes(text.encode(encoding))
    with pytest.raises(ValueError, match=r"a\.csv, read in the encoding 'utf-8', must"):
        load("a.csv")
    found = load("a.csv", encoding=encoding)
    job = text[:3]
    assert found.feature_names == (f"{job}=k\xf6k", f"{job}=nurse")
    (tmp_path / "a.csv").write_bytes(gzip.compress(text.encode(encoding)))
    (tmp_path / "a.csv").rename(tmp_path / "a.csv.gz")
    assert load("a.csv.gz", encoding=encoding).feature_names == found.feature_names


def test_an_encoding_that_is_not_that_of_the_file_is_refused(write):
    write("job,ill\nk\xf6k,x\nnurse,y\n")
    with pytest.raises(
        ValueError, match="read in the encoding 'latin-1', must not be text in utf-8"
    ):
        load(encoding="latin-1")
    with pytest.raises(ValueError, match="read in the encoding 'utf-16', must be text, got"):
        load(encoding="utf-16")
    for name in ("utf9", "rot13", "a\0b"):
        with pytest.raises(ValueError, match="encoding must be an encoding of text that Python"):
            load(encoding=name)
    pa.parquet.write_table(pa.table({"a": [1, 2], "ill": ["x", "y"]}), "t.parquet")
    for options in ({"encoding": "latin-1"}, {"separator": ";"}):
        with pytest.raises(ValueError, match="must be given only if a file is CSV"):
            load("t.parquet", **options)


def test_the_former_name_of_an_option_still_works(write):
    write(WHOLE)
    with pytest.warns(DeprecationWarning, match="coding='integer'"):
        data = load(encoding="integer")
    assert set(data.train["x"]) == {"hospital", "job", "smokes", "numbers"}


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_dates_that_are_numbers_are_read_by_a_rule_too(write, form):
    days = {"when": [20200131, 20200201], "ill": ["x", "y"]}
    if form == "csv":
        write("when,ill\n20200131,x\n20200201,y\n", "t.csv")
    else:
        pa.parquet.write_table(pa.table(days), "t.parquet")
    with pytest.raises(ValueError, match="row 1, column 'when', must hold no dates as numbers"):
        load(f"t.{form}")
    rule = {"when": {"format": "%Y%m%d", "since": "2020-01-01"}}
    assert load(f"t.{form}", dates=rule).train["x"].tolist() == [[30], [31]]


def test_dates_become_days_by_the_rule_that_is_asked_for(write):
    write(
        "when,seen,ill\n01.02.2020,2020-01-01T12:00+02:00,x\n31.12.2019,2020-01-02T00:00+00:00,y\n,,x\n"
    )
    dates = {
        "when": {"format": "%d.%m.%Y", "since": "2020-01-01"},
        "seen": {"format": "%Y-%m-%dT%H:%M%z", "since": "2020-01-01"},
    }
    data = load(dates=dates, missing="fill", fill={"when": 9, "seen": 8})
    expected = [[31, 10 / 24], [-1, 1], [9, 8]]
    np.testing.assert_allclose(data.train["x"], expected, rtol=1e-6)
    assert data.feature_names == ("when", "seen")
    days = np.array(["2020-02-01", "2019-12-31"], "datetime64[D]")
    times = pa.array(days.astype("datetime64[s]"), pa.timestamp("s", "UTC"))
    columns = {"when": pa.array(days), "seen": times, "ill": ["x", "y"]}
    pa.parquet.write_table(pa.table(columns), "t.parquet")
    since = {"since": "2020-01-01"}
    data = load(
        "t.parquet",
        dates={"when": since, "seen": since},
        scaling="range",
        ranges={"when": [-1, 63], "seen": [-1, 31]},
    )
    np.testing.assert_array_equal(data.train["x"], [[0.5, 1], [0, 0]])


DAY = {"format": "%d.%m.%Y", "since": "2020-01-01"}


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        (
            DAY,
            {},
            r"row 2, column 'when', must be a date written as '%d\.%m\.%Y'.*got '2020-01-02'",
        ),
        ({"since": "2020-01-01"}, {}, "row 1, column 'when', must be a date of a format"),
        ({"format": "%d.%m.%Y"}, {}, "dates.when must hold 'since'"),
        ("%d.%m.%Y", {}, "dates.when must hold 'since'.*got '%d"),
        ({"since": 20200101}, {}, "dates.when must hold 'since'"),
        (DAY | {"since": "1.1.2020"}, {}, r"dates\.when\.since must be a date in ISO format"),
        (
            DAY | {"since": "2020-01-01T00:00+01:00"},
            {},
            r"dates\.when\.since must be a date in ISO",
        ),
        (DAY | {"format": "%d.%m"}, {}, r"dates\.when\.format must be .* at least a year"),
        (DAY | {"format": "%Q"}, {}, r"dates\.when\.format must be a format"),
        (DAY | {"format": "%Y %Y"}, {}, r"dates\.when\.format must be a format"),
        (DAY | {"format": "%Y \ud800"}, {}, r"dates\.when\.format must be a format"),
        (DAY, {"categories": {"when": ["x"]}}, r"dates must name inputs.*got \['when'\]"),
        (DAY, {"label": "when"}, r"dates must name inputs.*got \['when'\]"),
        (DAY, {"features": ["a"]}, r"dates must name inputs.*got \['when'\]"),
    ],
)
def test_dates_that_the_rule_does_not_read_are_refused(write, rule, options, message):
    write("when,a,ill\n01.02.2020,1,x\n2020-01-02,2,y\n")
    with pytest.raises(ValueError, match=message):
        load(dates={"when": rule}, **options)


def test_times_outside_of_the_years_of_python_are_days_too(write):
    """A day before the year 1 in UTC, and the year 38505, in every unit of Arrow."""
    write("when,ill\n0001-01-01+1400,x\n0001-01-02+0000,y\n")
    rule = {"when": {"since": "0001-01-01", "format": "%Y-%m-%d%z"}}
    assert load(dates=rule).train["x"].tolist() == [[np.float32(-14 / 24)], [1]]
    seconds = np.array([1_152_921_504_606, 0])
    for unit, many in (("s", 1), ("ms", 10**3), ("us", 10**6)):
        times = pa.array(seconds * many, pa.timestamp(unit))
        pa.parquet.write_table(pa.table({"when": times, "ill": ["x", "y"]}), "t.parquet")
        found = load("t.parquet", dates={"when": {"since": "1970-01-01"}}).train["x"]
        np.testing.assert_allclose(found, seconds[:, None] / 86_400, rtol=1e-6)
    times = pa.array([2**62, 0], pa.timestamp("ms"))
    pa.parquet.write_table(pa.table({"when": times, "ill": ["x", "y"]}), "t.parquet")
    with pytest.raises(ValueError, match="column 'when', must hold times that 64 bits"):
        load("t.parquet", dates={"when": {"since": "1970-01-01"}})


def test_a_file_whose_name_has_brackets_is_no_pattern(write):
    write("a,ill\n1,x\n2,y\n", "t[1].csv")
    assert load("t[1].csv").train["x"].tolist() == [[1], [2]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('a,ill\n1,x\n2,"y\n3,x\n4,y\n', "line 5 must close each quote"),
        ('a,ill\n"5"6,x\n2,y\n', "line 2 must close each quote"),
        ("a,ill\n1,x\0y\n2,y\n", "must hold no NUL"),
        (",a,ill\n0,1,x\n1,2,y\n", r"features must name the inputs.*\['', 'a'\]"),
        ("a,a ,ill\n0,1,x\n1,2,y\n", r"name every column once, got \['a'\]"),
    ],
)
def test_cells_that_would_be_lost_in_silence_are_refused(write, text, message):
    write(text)
    with pytest.raises(ValueError, match=message):
        load()


@pytest.mark.parametrize("quote", ["", '"'])
def test_rows_longer_than_a_block_are_read(write, quote):
    long = "n" * 700_000
    write(f"a,{quote}{long}{quote},b{long},ill\n1,2,3,x\n4,{quote}{long}{quote},{long},y\n")
    assert load(features=["a"]).train["x"].tolist() == [[1], [4]]


def test_halves_of_characters_are_refused_with_their_file(write):
    write("a,ill\n1,x\n2,\\ud800\n")
    with pytest.raises(
        ValueError, match=r"patients\.csv, read in the encoding 'unicode_escape', mu"
    ):
        load(encoding="unicode_escape")


def test_texts_as_polars_writes_them(write):
    views = pa.array(["u", None, "w"], pa.string_view())
    pa.parquet.write_table(pa.table({"a": [1, 2, 3], "t": views, "ill": views}), "t.parquet")
    with pytest.raises(ValueError, match="row 2, column 'ill', must have a value"):
        load("t.parquet")
    known = pa.array(["u", "v", "w"], pa.string_view())
    pa.parquet.write_table(pa.table({"a": [1, 2, 3], "ill": known}), "t.parquet")
    assert load("t.parquet").class_names == ("u", "v", "w")


def test_many_columns_take_a_look_each(write, monkeypatch):
    looks, count = [], 60

    def is_missing(column):
        looks.append(column.name)
        return np.zeros(2, bool)

    monkeypatch.setattr(cells.Column, "is_missing", property(is_missing))
    write(
        ",".join([*(f"c{i}" for i in range(count)), "ill"]) + f"\n{'1,' * count}x\n{'2,' * count}y"
    )
    load()
    assert len(looks) < 10 * count


def test_names_in_an_error_are_not_all_that_there_are(write):
    write("a,ill\nother,x\nk1,y\n")
    with pytest.raises(ValueError, match=r"be one of k0, k1, .*…, its declared") as error:
        load(categories={"a": [f"k{i}" for i in range(1000)]})
    assert len(str(error.value)) < 2200
    write(",".join(f"column{i}" for i in range(1000)) + "\n" + ",".join("1" * 1000) + "\n")
    with pytest.raises(ValueError, match=r"must be one of column0, .*…, got 'ill'") as error:
        load()
    assert len(str(error.value)) < 2200


def test_long_texts_are_no_dates():
    assert cells._is_notation("on the 5th of May")
    # Without a bound, patterns for months take a time quadratic in the length.
    assert not cells._is_notation("seen again after 3 days, on the 5th of May")


def test_spaces_around_names_and_other_markers_of_missing_values(write):
    write(" a ,ill \n 1 ,x\n<NA>,y\nn/a,x\nNone,y\n#N/A,x\n")
    assert load(missing="fill", fill={"a": 2}).train["x"][:, 0].tolist() == [1, 2, 2, 2, 2]
    with pytest.raises(ValueError, match=r"categories\.a must hold no string of missing_values"):
        load(categories={"a": [1, "None"]})


def test_nodes_with_files_of_their_own_read_them_by_one_rule(write):
    config = """
    [data]
    name = "table"
    partition = "natural"
    num_clients = 2
    client_test_share = 0
    [data.options]
    path = "node.csv"
    client = "site"
    label = "ill"
    decimal = ","
    separator = ";"
    categories = { ill = [0, 1.0] }
    dates = { when = { format = "%d.%m.%Y", since = "2020-01-01" } }
    """
    write(config, "plan.toml")
    plan = config_files.from_toml(config_files.to_toml(load_config("plan.toml")), "the plan")
    found = []
    for name, site, labels in (("a.csv", "7", "01"), ("b.csv", "7,0", ("0,0", "1,00"))):
        rows = [f"{site};1,5;02.01.2020;{label}" for label in labels]
        write("\n".join(["site;dose;when;ill", *rows]), name)
        found.append(own_population(plan, name))
    (one, kind), (other, same) = found
    assert kind == same and kind["class_names"] == ["0", "1"]
    assert one.train.client_names == other.train.client_names == ("7",)
    for examples in (one.train.examples, other.train.examples):
        np.testing.assert_array_equal(examples["x"], [[1.5, 1]] * 2)
        np.testing.assert_array_equal(examples["y"], [0, 1])
