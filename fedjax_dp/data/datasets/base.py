"""The type of a data set, stratified splits, and conversion of images to numbers."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Positive
from fedjax_dp.data import arrays as array_checks
from fedjax_dp.data.disk_arrays import is_on_disk
from fedjax_dp.data.federated import flat, nested

Task = Literal["classification", "multi_label", "next_token", "regression"]

ImageDtype = Literal["float32", "uint8"]
ImageScaling = Literal["unit", "symmetric", "standard"]
IMAGE_DTYPES = ("float32", "uint8")
# Numbers that are scaled to a norm at once, in float64.
_SCALED_NUMBERS = 1 << 20


class Encoding(NamedTuple):
    """How the cells of a table became inputs and labels, in the words of the table's options.

    Attributes:
      coding: "one_hot" or "integer".
      columns: for each input column in order its `name` and, as far as it has them, `range`,
        `dates`, `categories`, `mean`, `deviation` and `fill`. `exact` lists those of these that
        were computed from the training part.
      labels: the same for each label.
      missing_values: strings that stand for a missing value.
    """

    coding: str
    columns: tuple[Mapping[str, Any], ...]
    labels: tuple[Mapping[str, Any], ...]
    missing_values: tuple[str, ...]

    def without_exact(self) -> "Encoding":
        """Leaves out what was computed from data; `exact` still names it.

        Returns:
          The encoding with public facts alone.
        """
        columns, labels = (
            tuple({k: v for k, v in each.items() if k not in each.get("exact", ())} for each in of)
            for of in (self.columns, self.labels)
        )
        return self._replace(columns=columns, labels=labels)


@dataclasses.dataclass(frozen=True)
class Dataset:
    """The training and the test part of one data set, on the host.

    Attributes:
      name: the name for `load`.
      train: named arrays `[train examples, ...]`; `x` are inputs, one array or a dict of them, and
        `y` are targets. `example_weight`, if there, are factors of the losses of training examples.
      test: the same for the test part.
      num_classes: the number of classes or tokens of `y`, or of labels; 0 for regression.
      task: what `y` means: one class for each example; 0 or 1 for each of several labels; the next
        token at each position (-1 marks positions that are not targets); or a number, or several.
      train_clients: the natural client of each training example, `[train examples]`, ids that can
        be sorted (integers or text), or None without natural clients.
      test_clients: the same for the test part.
      class_names: a label for each class, the name of each of several labels, or nothing.
      feature_names: a label for each input column of tabular data, or nothing.
      origin: the set of files it was read from.
      exact_statistics: exact figures of the training part that entered every example, such as the
        means that features were scaled by, as text for the privacy statement; empty if an example
        depends only on itself and public facts.
      client_names: if clients are numbered from 0 in `train_clients` and `test_clients`, the name
        of each.
      encoding: how the cells of a table became inputs and labels; None of other data.
    """

    name: str
    train: Mapping[str, Any]
    test: Mapping[str, Any]
    num_classes: int
    task: Task
    train_clients: np.ndarray | None = None
    test_clients: np.ndarray | None = None
    class_names: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()
    origin: str = ""
    exact_statistics: tuple[str, ...] = ()
    client_names: tuple[str, ...] = ()
    encoding: Encoding | None = None

    def __post_init__(self) -> None:
        """Checks that the parts fit each other, and hold what JAX can compute with."""
        checks.one_of("task", self.task, get_args(Task))
        for part in ("train", "test"):
            given = getattr(self, part)
            arrays = {
                name: array_checks.example_array(f"{part}[{name!r}]", array)
                for name, array in flat(given).items()
            }
            has_both = "y" in arrays and any(name.split("/")[0] == "x" for name in arrays)
            rule = "hold inputs 'x' and targets 'y'"
            checks.require(has_both, part, rule, sorted(arrays))
            lengths = {len(array) for array in arrays.values()}
            clients = getattr(self, f"{part}_clients")
            if clients is not None:
                clients = array_checks.client_ids(f"{part}_clients", clients)
                object.__setattr__(self, f"{part}_clients", clients)
                lengths.add(len(clients))
                _require_named(f"{part}_clients", clients, self.client_names)
            checks.require(
                len(lengths) == 1, part, "have arrays and client ids of one length", sorted(lengths)
            )
            object.__setattr__(self, part, nested(arrays))
        array_checks.require_different("client_names", self.client_names)
        array_checks.require_same_rows("test", flat(self.test), "training", flat(self.train))
        checks.require(len(self.train["y"]) > 0, "train", "hold at least one example", "none")
        fits = len(self.class_names) in (0, self.num_classes)
        rule = f"name all {self.num_classes} classes or none"
        checks.require(fits, "class_names", rule, len(self.class_names))

    def __repr__(self) -> str:
        """Describes the data set, without its examples."""
        counts = f"{len(self.train['y'])} training and {len(self.test['y'])} test examples"
        arrays = array_checks.in_words(flat(self.train))
        return f"Dataset({self.name!r}, {self.task}, {counts}, {arrays})"


def _require_named(what: str, clients: np.ndarray, names: tuple[str, ...]) -> None:
    """Requires numbers of clients that have names, if there are names."""
    if not names or not len(clients):
        return
    is_number = clients.dtype.kind in "iu"
    fits = is_number and int(clients.min()) >= 0 and int(clients.max()) < len(names)
    rule = f"be integers in [0, {len(names)}), as client_names has {len(names)} names"
    checks.require(fits, what, rule, "others")


@checked
def within_norm(data: Dataset, norm: Positive) -> Dataset:
    """Scales the inputs of examples down to an L2 norm; shorter ones stay as they are.

    The constant 1 that a model adds for its intercept is outside of the norm.

    Guarantee: each input depends on itself and the norm alone, so the privacy of a training on the
    result is that of the training.

    Args:
      data: a data set whose `x` is one array of floats in memory.
      norm: the longest that an input may be, all axes together, above 0.

    Returns:
      A data set with copies of the inputs.

    Raises:
      ValueError: if inputs are several arrays, integers, floats of 16 bits, or on disk.

    Source: Mugunthan 2022, section 2.5, with norm 1.
    """
    rule = "be one array of float32 in memory, to be scaled to a norm"
    parts: dict[str, Any] = {}
    for part in ("train", "test"):
        examples = dict(getattr(data, part))
        x = examples["x"]
        is_array = not isinstance(x, Mapping) and not is_on_disk(x)
        kind = f"{x.dtype} in memory" if is_array else "several, or on disk"
        # The margin below is for the rounding of float32.
        is_floats = is_array and x.dtype in (np.float32, np.float64)
        checks.require(is_floats, f"inputs of {data.name}", rule, kind)
        examples["x"] = _scaled_down(x, norm)
        parts[part] = examples
    return dataclasses.replace(data, **parts)


def _scaled_down(x: np.ndarray, norm: float) -> np.ndarray:
    """Copies rows within a norm; what is computed in float64 is a few of them at a time."""
    scaled = np.empty_like(x)
    step = max(1, _SCALED_NUMBERS // max(1, math.prod(x.shape[1:])))
    for start in range(0, len(x), step):
        rows = x[start : start + step].astype(np.float64)
        lengths = np.sqrt(np.sum(rows**2, axis=tuple(range(1, rows.ndim)), keepdims=True))
        # A little shorter, so that rounding makes no input longer.
        shares = norm * (1 - 1e-6) / np.maximum(lengths, norm * 1e-6)
        scaled[start : start + step] = rows * np.minimum(1.0, shares)
    return scaled


def stratified_split(
    strata: np.ndarray, test_fraction: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Holds out the same share of every stratum for testing; returns training and test rows.

    The rows are those of scikit-learn's `train_test_split`, whose import takes as long as JAX's.
    """
    checks.require(0 < test_fraction < 1, "test_fraction", "be in (0, 1)", test_fraction)
    _, codes, counts = np.unique(strata, return_inverse=True, return_counts=True)
    num_test = math.ceil(test_fraction * len(strata))
    smallest = min(num_test, len(strata) - num_test)
    rule = f"leave both parts at least {len(counts)} records, one of each stratum"
    checks.require(smallest >= len(counts), "test_fraction", rule, test_fraction)
    checks.require(bool(counts.min() >= 2), "each stratum", "have at least 2 records", counts.min())
    draws = np.random.RandomState(seed)
    for_training = _shares(counts, len(strata) - num_test, draws)
    for_testing = _shares(counts - for_training, num_test, draws)
    train, test = [], []
    rows_of = np.split(np.argsort(codes, kind="stable"), np.cumsum(counts)[:-1])
    for rows, num_trained, num_tested in zip(rows_of, for_training, for_testing, strict=True):
        drawn = draws.permutation(rows)
        train.append(drawn[:num_trained])
        test.append(drawn[num_trained : num_trained + num_tested])
    return draws.permutation(np.concatenate(train)), draws.permutation(np.concatenate(test))


def _shares(counts: np.ndarray, total: int, draws: np.random.RandomState) -> np.ndarray:
    """Divides a total in proportion to counts; what rounding leaves goes to the largest rests."""
    exact = counts / counts.sum() * total
    shares = np.floor(exact)
    rests = exact - shares
    for rest in np.unique(rests)[::-1]:
        left = int(total - shares.sum())
        if left <= 0:
            break
        # Among equal rests at random.
        (alike,) = np.nonzero(rests == rest)
        shares[draws.choice(alike, min(len(alike), left), replace=False)] += 1
    return shares.astype(int)


def as_images(pixels: np.ndarray, dtype: str) -> np.ndarray:
    """Converts bytes to float32 in [0, 1], or leaves them as uint8."""
    checks.one_of("dtype", dtype, IMAGE_DTYPES)
    if dtype == "uint8":
        return pixels
    return np.true_divide(pixels, np.float32(255), dtype=np.float32)


def scaled_images(
    train: np.ndarray, test: np.ndarray, scaling: str
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Scales both parts from [0, 1]; also names the exact figures that this puts into them."""
    if scaling == "unit":
        return train, test, ()
    middle = spread = np.full(train.shape[-1], 0.5, np.float32)
    exact = tuple[str, ...]()
    rule = f"be 'float32' for the scaling {scaling!r}"
    checks.require(train.dtype == np.float32, "dtype", rule, str(train.dtype))
    if scaling == "standard":
        middle = train.mean(axis=(0, 1, 2), dtype=np.float64).astype(np.float32)
        spread = train.std(axis=(0, 1, 2), dtype=np.float64).astype(np.float32)
        exact = ("the exact mean and standard deviation of each channel in the training part",)
    return (train - middle) / spread, (test - middle) / spread, exact
