"""Checks of clients' targets against the outputs of a model, on the host before any work."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from fedjax_dp.core.disclosure import GuardedError
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data import disk_arrays
from fedjax_dp.data.disk_arrays import is_on_disk
from fedjax_dp.data.federated import FederatedData, nested
from fedjax_dp.models import losses
from fedjax_dp.models.base import Model
from fedjax_dp.models.losses import Allowed


def require_fitting(
    model: Model,
    data: FederatedData,
    per_example: Callable[[PyTree, Any], Any] | None = None,
    *,
    what: str = "data",
    on_disk: bool = False,
) -> tuple[Allowed, ...]:
    """Requires targets that a function of parameters and a batch is for, by default the losses.

    It is traced on one example. Returns what it is for, for targets that are on disk.
    """
    one = {
        name: jax.ShapeDtypeStruct((1, *x.shape[1:]), jax.dtypes.canonicalize_dtype(x.dtype))
        for name, x in data.examples.items()
    }

    def traced(constants: Any, params: PyTree, batch: Any) -> Any:
        with model.given(constants):
            return (per_example or model.losses)(params, batch)

    params = jax.eval_shape(model.init, jax.random.key(0))
    with losses.reads() as found:
        jax.eval_shape(traced, model.constants, params, nested(one))
    require_targets(what, data, found, on_disk=on_disk)
    return tuple(found)


def require_targets(
    what: str, data: FederatedData, allowed: Iterable[Allowed], *, on_disk: bool = False
) -> None:
    """Requires targets that losses are for, in memory, and on disk if they are to be read."""
    for each in dict.fromkeys(allowed):
        array = data.examples.get(each.name)
        if array is not None and (on_disk or not is_on_disk(array)):
            _require(what, each, disk_arrays.parts(array), data.offsets)


def require_rows(what: str, arrays: Mapping[str, Any], allowed: Iterable[Allowed]) -> None:
    """Requires the same of rows that have been read from disk."""
    for each in dict.fromkeys(allowed):
        if each.name in arrays:
            _require(what, each, [arrays[each.name]], None)


def _require(what: str, allowed: Allowed, parts: Iterable[Any], offsets: np.ndarray | None) -> None:
    first_wrong, count, start, num_left_out = "", 0, 0, 0
    for part in parts:
        if not allowed.is_declared:
            num_left_out += int(np.count_nonzero(np.asarray(part) == allowed.ignore_label))
        wrong = allowed.wrong(part)
        by_row = wrong.reshape(len(wrong), -1).any(axis=1)
        if by_row.any() and not first_wrong:
            row = int(np.argmax(by_row))
            value = np.asarray(part)[row].reshape(-1)[np.argmax(wrong[row].reshape(-1))]
            place = "" if offsets is None else _place(start + row, offsets)
            first_wrong = f"{value.item()!r}{place}"
        count, start = count + int(by_row.sum()), start + len(wrong)
    if num_left_out:
        warnings.warn(
            f"{what}[{allowed.name!r}] has no target, {allowed.ignore_label}, in {num_left_out} "
            "places, which the loss leaves out; Loss(…, ignore_label=…) as the loss of the model "
            "says that this is meant",
            stacklevel=2,
        )
    if count:
        others = f", the first of {count} such rows of {start}" if count > 1 else ""
        public = f"{what}[{allowed.name!r}] must {allowed.rule}"
        way_out = "; Loss(…, ignore_label=…) as the loss of the model declares a label to leave out"
        way_out *= not allowed.are_numbers
        raise GuardedError(f"{public}, got {first_wrong}{others}{way_out}", public)


def _place(row: int, offsets: np.ndarray) -> str:
    client = int(np.searchsorted(offsets, row, side="right")) - 1
    return f" in row {row} (client {client})"
