"""Mistakes of users: one line that names file, key or option, before any work."""

import os
import string

import numpy as np
import pytest
import tomli_w
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fedjax_dp.core import checks, files
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.components.numbers_by_client import (
    listed,
    with_client_numbers,
    with_named_lists,
)
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.reading.config_files import all_keys
from fedjax_dp.experiment.reading.validate import validate
from fedjax_dp.experiment.schema.constraints import ConfigError

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def checked(*words):
    config = with_client_numbers(load_config(None, list(words)))
    validate(listed(with_named_lists(config), None))


FEDAVG = ("--privacy.unit=none", "--algorithm.name=fedavg")
IFCA = ("--privacy.unit=none", "--algorithm.name=ifca")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--run.rounds=" + "[" * 2000], "run.rounds must hold no brackets nested hundreds deep"),
        (["--run.rounds=" + "1" * 5000], "no number of thousands of digits"),
        (["--training.learning_rate=[1.0, 1e-46]"], "learning_rate must be 0 or of a size"),
        (["--run.metrics=['f1', 'f1']"], "run.metrics must name each figure once"),
        (["--run.rounds=3", "digits.toml"], "a configuration file comes before all options"),
        (
            [*FEDAVG, "--training.batch_size=2.5"],
            "training.batch_size must be an integer .* got 2.5",
        ),
        ([*FEDAVG, "--training.num_steps=2.5"], "training.num_steps must be an integer .* got 2.5"),
        (
            [*IFCA, "--algorithm.options.num_models=11"],
            "algorithm.options.num_models must be at most the 10 clients, got 11",
        ),
        (
            [
                *FEDAVG,
                "--participation.sampler=min_separated",
                "--participation.cohort_size=6",
                "--participation.separation=3",
            ],
            "participation.cohort_size must be at most 3: each of 10 clients joins once in 3",
        ),
        (
            [*FEDAVG, "--participation.sampler=fixed_size", "--participation.cohort_size=1.5"],
            "participation.cohort_size must be an integer under the sampler",
        ),
        (
            [
                "--data.partition=shifted_clusters",
                "--data.partition_options.cluster_sizes=[2, 1]",
                "--training.learning_rate=[1.0, 2.0]",
            ],
            "training.learning_rate must be one number or have one for each of the 3 clients",
        ),
        (
            ["--algorithm.name=pfa", "--algorithm.options.declared_epsilon=[1, 2]"],
            "algorithm.options.declared_epsilon must have one number for each of the 10",
        ),
        (["--data.data_dir=a\0b"], "data.data_dir must be a path that can be opened"),
        (["--data.data_dir=/dev/null"], "data.data_dir must be a folder.*a device"),
        (["--model.pretrained=nowhere.npz"], "model.pretrained must be a file.*no such file"),
        (["--execution.compilation_cache=/dev/null/x"], "compilation_cache must be a path that"),
        (["--data.client_numbers=nowhere.csv"], "data.client_numbers must be a file that can be"),
        (
            ["--run.metrics=[f1]"],
            "run.metrics must be .*got '[f1]'; strings in it are written in q",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value[-1][:40],
)
def test_a_mistake_on_the_command_line_is_named_before_data_are_read(words, message):
    with pytest.raises(ValueError) as error:
        checked(*words)
    text = str(error.value)
    assert all(part in text for part in message.split(".*")), text
    assert len(text) < 1200 and "\n" not in text


def test_a_whole_number_may_be_written_with_an_exponent_everywhere(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("[run]\nrounds = 1e3\n[model]\nname = 'mlp'\noptions = {hidden_sizes = [1e2]}")
    words = ["--training.batch_size=1e3", "--training.micro_batch_size=1e2"]
    config = load_config(path, words)
    numbers = (config.run.rounds, *config.model.options["hidden_sizes"])
    numbers += (config.training.micro_batch_size,)
    assert numbers == (1000, 100, 100) and {type(n) for n in numbers} == {int}
    assert config.training.batch_size == 1000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[run]\nx = " + b"[" * 2000 + b"]" * 2000, "must not nest brackets hundreds deep"),
        (b"[run]\nrounds = " + b"1" * 5000, "must hold no number of thousands of digits"),
        (
            b'"run.seed" = 3',
            "the quotes make 'run.seed' one name, .* write run.seed without quotes",
        ),
        (b'[data]\n"options.seed" = 3', "write data.options.seed without quotes"),
        (b'[privacy]\n"record.epsilon" = 3', "write privacy.record.epsilon without quotes"),
        (b"[run]\nname = '\xff'", "line 2 must be text in UTF-8"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_the_file(tmp_path, content, message):
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"mine\.toml.*{message}"):
        load_config(path)


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xef\xbb\xbf[run]\r\nrounds = 3\r\n")
    assert load_config(path).run.rounds == 3


@pytest.fixture
def bad_paths(tmp_path):
    """Paths at which no file can be read and no folder can be made."""
    loop, file = tmp_path / "loop", tmp_path / "file"
    loop.symlink_to(loop)
    file.write_text("")
    return [loop, loop / "x", tmp_path / ("x" * 300), file / "x", f"{tmp_path}/a\0b", "/dev/null/x"]


def test_paths_that_nothing_can_lie_at_are_named(bad_paths):
    for path in bad_paths:
        for require in (files.kind_of, files.require_file, files.require_folder):
            with pytest.raises(ValueError, match=r"^--here must be a path that can be opened, got"):
                require(path, "--here")
        with pytest.raises(ConfigError, match="the configuration file must be a path that can be"):
            load_config(path)


def test_a_file_or_a_folder_of_another_kind_is_named(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    for path, kind in (
        (tmp_path, "a folder"),
        ("/dev/null", "a device"),
        (tmp_path / "x", "no such"),
    ):
        with pytest.raises(ValueError, match=f"^--here must be a file that can be read.*{kind}"):
            files.require_file(path, "--here")
    for path, kind in ((file, "a file"), ("/dev/null", "a device or a pipe")):
        with pytest.raises(ValueError, match=rf"^--here must be a folder.*{kind}"):
            files.require_folder(path, "--here")
    files.require_folder(tmp_path / "new" / "newer", "--here", writable=True)
    # Root may read all files, so that the system's answer is put in its place.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match="no permission to read it"):
        files.require_file(file, "--here")
    with pytest.raises(ValueError, match="no permission to use it"):
        files.require_folder(tmp_path / "new", "--here")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output=/dev/null"], "must be a new or an empty folder"),
        (["--output=/dev/null/x"], "--output must be a path that can be opened"),
        (["--output=new/" + "x" * 300], "--output must be a path that can be opened"),
        (["--run.name=" + "x" * 300], "run.name must be a path that can be opened"),
        (["--resume=" + "x" * 300], "--resume must be a path that can be opened"),
        (
            ["--run.rounds=3", "--run.rounds", "4"],
            "--run.rounds must be given once, got ['3', '4']",
        ),
        (["--output=a", "--output", "b"], "--output must be given once"),
        (["a\0b.toml"], "the configuration file must be a path that can be opened"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0][:40],
)
def test_the_command_ends_before_data_are_read_and_leaves_no_folder(
    tmp_path, monkeypatch, fedjax_dp, no_data, words, message
):
    monkeypatch.chdir(tmp_path)
    status, _, said = fedjax_dp("run", *words)
    assert status == 2 and said.startswith("error: ") and message in said
    assert said.count("\n") == 1 and not any(tmp_path.iterdir())


# --- whatever a file or a command line holds

SCALARS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.booleans(),
    st.text(max_size=4),
    st.dates(),
    st.sampled_from(["none", "auto", "poisson", "record", "fedavg", "mlp", "1e3"]),
)
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(st.text(string.ascii_letters, min_size=1, max_size=3), SCALARS, max_size=2),
)
KEYS = st.one_of(st.sampled_from(all_keys()), st.text(string.ascii_lowercase + "._", max_size=9))


def nested(pairs):
    tables: dict = {}
    for key, value in pairs.items():
        *path, last = key.split(".")
        table = tables
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                return tables
        table[last] = value
    return tables


def read_or_refused(path, words, origins, keys=()):
    """Reads a configuration, which survives a file then; or is refused with origin and key."""
    try:
        config = load_config(path, words)
    except ConfigError as error:
        text = str(error)
        assert any(text.startswith(origin) for origin in origins) and "\n" not in text, text
        assert not keys or any(key.split(".")[0] in text for key in keys), text
        return
    again = path.with_name("again.toml")
    again.write_text(config_files.to_toml(config), encoding="utf-8")
    assert load_config(again) == config


@QUICK
@given(st.dictionaries(KEYS, VALUES, max_size=3))
@example({"run": 3})
@example({"privacy.client": "gaussian"})
@example({"run.name": "a/b"})
@example({"model.options": {"width": 3}})
def test_any_tables_of_a_file_are_read_or_refused_with_its_name(tmp_path_factory, pairs):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(tomli_w.dumps(nested(pairs)), encoding="utf-8")
    read_or_refused(path, (), (str(path),), pairs)


@QUICK
@given(st.binary(max_size=40) | st.text("[]{}=.\"'\n#a1", max_size=20).map(str.encode))
@example(b"\xef\xbb\xbf")
@example(b"a = 1\r")
@example(b"[run")
@example(b"[[run]]\nrounds = 3")
@example(b"[run]\nrounds = 3\nrounds = 4")
@example(b"\xff\xfe[run]")
def test_any_bytes_of_a_file_are_read_or_refused_with_its_name(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(content)
    read_or_refused(path, (), (str(path),))


@QUICK
@given(st.lists(st.tuples(KEYS, st.text(max_size=6) | VALUES.map(str)), max_size=2))
@example([("training.optimizer", "{'A': 0}")])
def test_any_words_of_a_command_line_are_read_or_refused(tmp_path_factory, pairs):
    path = tmp_path_factory.getbasetemp() / "none.toml"
    path.write_text("")
    words = [f"--{key}={text}" for key, text in pairs]
    read_or_refused(path, words, ("command line: ", str(path)), [key for key, _ in pairs])


def test_numbers_in_errors_are_written_as_a_user_would():
    for value, text in (
        (np.float32(2.5), "2.5"),
        (np.asarray(0.1, np.float32), "0.1"),
        (np.asarray([0.1, 2], np.float32), "[0.1, 2. ]"),
        ("2.5", "'2.5'"),
        (True, "True"),
    ):
        assert checks.shown(value) == text
    assert len(checks.shown("x" * 10_000)) == 501


def test_a_multiple_of_a_published_list_is_read_like_the_list():
    words = ["--data.partition=iid", "--data.num_clients=20", "--privacy.record.epsilon"]
    plain, tenfold = (
        with_named_lists(load_config(None, [*words[:2], f"{words[2]}={name}"]))
        for name in ("Dist2", "Dist2 * 10")
    )
    found = np.array(tenfold.privacy.record.epsilon)
    np.testing.assert_allclose(found, 10 * np.array(plain.privacy.record.epsilon))
    for name in ("Dist10", "Dist2*10", "Dist2 * 0", "10 * Dist2"):
        with pytest.raises(ConfigError, match=r"privacy\.record\.epsilon"):
            load_config(None, [f"{words[2]}={name}"])
