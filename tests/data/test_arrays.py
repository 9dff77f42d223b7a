"""What examples, client ids and rows may be: anything is refused by name, or means what it says."""

import warnings

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedjax_dp import engine
from fedjax_dp.algorithms import fedavg
from fedjax_dp.clients import LocalConfig, local_trainer
from fedjax_dp.data import arrays as array_checks
from fedjax_dp.data import full_participation, participation, partition
from fedjax_dp.data.datasets import Dataset
from fedjax_dp.data.federated import FederatedData, example_structure
from fedjax_dp.data.store_writer import write_store
from fedjax_dp.models import Model

X, Y = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([0, 1, 0, 1])
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def store(x):
    return FederatedData({"x": x}, np.array([0, 4]))


def dataset(train=None, test=None, task="classification", **more):
    both = {"x": X, "y": Y}
    return Dataset("own", both if train is None else train, test or both, 2, task, **more)


@QUICK
@given(
    arrays.arrays(
        st.one_of(
            arrays.scalar_dtypes(),
            arrays.integer_dtypes(sizes=(64,)),
            arrays.floating_dtypes(sizes=(64,)),
            arrays.unicode_string_dtypes(),
        ),
        arrays.array_shapes(max_dims=2, max_side=3),
    )
)
def test_any_array_is_refused_by_name_or_reaches_jax_as_what_it_is(array):
    try:
        found = array_checks.example_array("examples['x']", array)
    except ValueError as error:
        assert str(error).startswith("examples['x'] must ") and "got" in str(error)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        there = np.asarray(jnp.asarray(found))
    assert there.dtype.kind == array.dtype.kind in "biuf" and there.shape == array.shape
    if array.dtype.kind == "f":
        assert (np.isfinite(there) == np.isfinite(array)).all()
        assert not np.any(array) or np.any(there)
    else:
        assert (there == array).all()


KINDS = (
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=3),
    st.just(np.datetime64("NaT", "s")),
    st.binary(max_size=2),
    st.tuples(st.integers()),
)


@QUICK
@given(st.one_of(*(st.lists(one, min_size=4, max_size=4) for one in (st.one_of(KINDS), *KINDS))))
def test_any_client_ids_are_refused_by_name_or_group_like_with_like(ids):
    try:
        data = FederatedData.from_client_ids({"row": np.arange(4)}, ids)
    except ValueError as error:
        assert str(error).startswith("client_ids must ") and "got" in str(error)
        return
    assert len({type(one) for one in ids} - {int, float}) <= 1
    assert all(one == one and one is not None for one in ids)
    groups = [tuple(data.client(i)["row"]) for i in range(data.num_clients)]
    expected = {tuple(r for r in range(4) if ids[r] == one) for one in ids}
    assert set(groups) == expected and len(groups) == len(expected)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: store(np.ma.masked_equal(X, 5)), r"\['x'\] must have no masked entries.*1 of 12"),
        (lambda: store((X + 1).astype(float) * 1e300), r"\['x'\] must hold numbers .* float32"),
        (lambda: store(np.full((4, 3), 10**18)), r"must hold integers that int32 can"),
        (lambda: store([[1, 2], [3], [4, 5], [6]]), r"must have rows of one shape"),
        (
            lambda: FederatedData.from_client_ids({"x": X}, [1, "a", None, 1]),
            "client_ids must name the client of every example, got .*the first in row 2",
        ),
        (lambda: partition.natural(np.array([1, np.nan])), "client_ids must name .* in row 1"),
        (lambda: dataset(train_clients=np.ma.masked_equal(Y, 1)), "train_clients must name"),
        (
            lambda: FederatedData.from_indices({"x": X}, [[0], [0.5]]),
            r"clients\[1\] must list rows as integers",
        ),
        (
            lambda: FederatedData.from_indices({"x": X}, [np.array([True, False])]),
            r"clients\[0\] must list rows as integers",
        ),
        (
            lambda: partition.split_clients([np.array([0.5])], 0),
            r"clients\[0\] must list rows as integers",
        ),
        (
            lambda: FederatedData.from_clients([{"x": X}, {"x": X[:, :2]}]),
            r"clients\[1\]\['x'\] must have rows of shape \(3,\), as those of client 0, got \(2,\)",
        ),
        (
            lambda: dataset(test={"x": X[:, :2], "y": Y}),
            r"'x' of the test part must have rows of shape \(3,\), .* got \(2,\)",
        ),
        (lambda: dataset(test={"x": X}), "test must hold inputs 'x' and targets 'y', got .'x'."),
        (lambda: dataset(train={"x": X}), "train must hold inputs 'x' and targets 'y'"),
        (
            lambda: dataset(test={"x": {"ids": Y}, "y": Y}),
            "the test part must hold x, y, as the training part does, got .'x/ids', 'y'.",
        ),
        (lambda: dataset(task="clasification"), "did you mean 'classification'"),
        (lambda: dataset({"x": X[:0], "y": Y[:0]}), "train must hold at least one example"),
    ],
)
def test_what_would_be_taken_for_something_else_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


TIMES = 1_700_000_000 + np.arange(8)


@pytest.mark.parametrize("times", [TIMES.astype(float), TIMES / 8.0, -TIMES.astype(float)])
def test_large_numbers_that_float32_makes_equal_are_refused(times, tmp_path):
    x = np.stack([np.arange(8.0), times], axis=1)
    words = r"\['x'\], column 1, must hold no numbers above 2\^24 that float32 makes equal"
    for make in (
        lambda: FederatedData({"x": x}, [0, 8]),
        lambda: Dataset("own", {"x": x, "y": X[:1, 0]}, {"x": x, "y": X[:1, 0]}, 0, "regression"),
    ):
        with pytest.raises(ValueError, match=words):
            make()
    with pytest.raises(ValueError, match=words):
        write_store(tmp_path, [np.zeros(8, int)], [(np.zeros(8, int), {"x": x})])
    # An origin is subtracted, or what differs is far enough apart.
    for apart in (
        times - times[0],
        np.arange(8) * 1e8,
        np.full(8, times[0]),
        times.astype(np.float32),
    ):
        FederatedData({"x": apart}, [0, 8])


def test_large_integers_that_float32_makes_equal_are_named():
    """As tokens they would be right, so they are not refused."""
    for name, times in (("x", TIMES.astype(np.int32)), ("x/at", TIMES), ("y", -TIMES)):
        with pytest.warns(UserWarning, match=rf"\['{name}'\] should hold no numbers above"):
            FederatedData({name: times}, [0, 8])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FederatedData({"row": TIMES, "x": TIMES - TIMES[0], "y": TIMES * 0 + TIMES[0]}, [0, 8])


def test_the_other_byte_order_is_converted_and_on_disk_refused(tmp_path):
    swapped = X.astype(X.dtype.newbyteorder())
    found = store(swapped).examples["x"]
    assert found.dtype.isnative and (found == X).all()
    assert dataset({"x": swapped, "y": Y}).train["x"].dtype.isnative
    store(X).save(tmp_path)
    np.save(tmp_path / "x.npy", swapped)
    with pytest.raises(ValueError, match=r"x\.npy must be in the byte order of this computer"):
        FederatedData.open(tmp_path)


@pytest.mark.parametrize("kind", [np.longdouble, np.clongdouble, "V4"])
def test_types_that_jax_has_not_are_refused_by_name(kind):
    array = np.zeros((4, 3), kind)
    if array.dtype == np.float64:
        pytest.skip("here these are numbers of 64 bits")
    with pytest.raises(ValueError, match=r"examples\['x'\] must hold (real )?numbers.*got"):
        store(array)


@pytest.mark.parametrize("kind", [jnp.bfloat16, jnp.int4, jnp.float8_e4m3fn, np.float16, bool])
def test_types_that_jax_has_are_kept(kind):
    assert store(X.astype(kind)).examples["x"].dtype == np.dtype(kind)


def test_an_array_on_disk_in_the_other_byte_order_is_refused(tmp_path):
    swapped = np.memmap(tmp_path / "x", X.dtype.newbyteorder(), "w+", shape=X.shape)
    with pytest.raises(ValueError, match=r"\['x'\] must be in the byte order of this computer"):
        store(swapped)
    native = np.memmap(tmp_path / "y", X.dtype, "w+", shape=X.shape)
    assert isinstance(store(native).examples["x"], np.memmap)


def test_numbers_on_disk_that_32_bits_cannot_hold_are_refused_when_they_are_read(tmp_path):
    store(X).save(tmp_path)
    # Files of others have no digests.
    (tmp_path / "digests.json").unlink()
    np.save(tmp_path / "x.npy", X.astype(np.float64) * 1e300)
    with pytest.raises(ValueError, match=r"examples\['x'\] must hold numbers .* float32"):
        FederatedData.open(tmp_path).check_finite()


def test_nothing_hidden_is_nothing_lost():
    whole = store(np.ma.masked_array(X)).examples["x"]
    assert type(whole) is np.ndarray and (whole == X).all()
    ids = np.array([3, 1, 3, 1], object)
    assert FederatedData.from_client_ids({"x": X}, ids).client_names == ("1", "3")


def test_types_of_64_bits_are_those_that_jax_accepts_without_a_warning():
    tokens = FederatedData({"x": {"ids": Y, "size": X.astype(float)}, "y": Y}, np.array([0, 4]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = example_structure(tokens)
        assert (one["x"]["ids"].dtype, one["x"]["size"].dtype) == (np.int32, np.float32)
        # As documented in "Bring your own": a column of codes beside one of numbers.
        wide = jax.ShapeDtypeStruct((), np.int64)
        for example in (one["x"]["ids"], wide):
            model = Model.from_flax(flax.linen.Embed(2, 2), example, loss="softmax_cross_entropy")
            assert jax.eval_shape(model.init, jax.random.key(0))["params"]["embedding"].shape == (
                2,
                2,
            )


def test_data_without_targets_or_of_another_shape_are_named_before_anything_is_compiled():
    model = Model.from_functions(
        lambda key: {"w": jnp.zeros((3, 2))}, lambda p, x: x @ p["w"], loss="softmax_cross_entropy"
    )
    with pytest.raises(ValueError, match=r"examples must hold targets 'y' .* got \['x'\]"):
        model.loss_fn(jnp.zeros((4, 2)), {"x": X})
    train, narrow = (FederatedData({"x": x, "y": Y}, np.array([0, 4])) for x in (X, X[:, :2]))
    trainer = local_trainer(model, LocalConfig())
    federation = engine.federation(
        fedavg(model, trainer), train, participation(full_participation(), 1)
    )
    for part in ("whole", "clients"):
        with pytest.raises(ValueError, match=rf"'x' of the {part} part must have rows of shape"):
            engine.evaluator(federation, model, train, **{part: narrow})


def test_columns_of_pandas_are_read_as_what_they_hold():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"size": [1.0, 2.0, 3.0, 4.0], "kind": [0, 1, 0, 1], "who": ["b", "a", "b", None]},
        index=[3, 2, 1, 0],
    )
    with pytest.raises(ValueError, match=r"client_ids must name .* the first in row 3"):
        FederatedData.from_client_ids({"x": frame["size"]}, frame["who"])
    data = FederatedData.from_client_ids({"x": frame[["size", "kind"]]}, frame["who"].fillna("c"))
    assert data.client_names == ("a", "b", "c")
    assert data.client(1)["x"].tolist() == [[1.0, 0.0], [3.0, 0.0]]
    column = FederatedData({"x": frame["size"]}, np.array([0, 4])).examples["x"]
    assert type(column) is np.ndarray and column.tolist() == [1.0, 2.0, 3.0, 4.0]
    # Versions of pandas make NaN or objects of what is missing; neither is trained on.
    missing = frame["kind"].astype("Int64").where(frame["size"] > 1)
    with pytest.raises(ValueError, match=r"examples\['x'\] must (hold numbers|be finite)"):
        FederatedData({"x": missing}, np.array([0, 4])).check_finite()


def test_large_measurements_may_round():
    """Float32 holds their leading digits; only identifiers and times need more."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30_000, 2)) * 1e8
    assert array_checks.equal_in_float32(x[:, 0]) is not None
    assert array_checks.example_array("x", x) is x
    for lost in (np.floor(x), 1.7e9 + rng.random((1000, 1)) * 1e3):
        with pytest.raises(ValueError, match="hold no numbers above 2"):
            array_checks.example_array("x", lost)
