"""The ledger: what ran, per unit of privacy, and what it cost."""

import contextlib
import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import dp_accounting as dpa
import numpy as np
import scipy.sparse
from numpy.typing import ArrayLike

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, NonNegative
from fedjax_dp.privacy import events as ev
from fedjax_dp.privacy.accounting import pld_answers, rdp
from fedjax_dp.privacy.accounting.dp_accounting_adapter import (
    require_accountant,
    require_some_accountant,
    translate,
)
from fedjax_dp.privacy.accounting.renyi import orders_of, rdp_curves
from fedjax_dp.privacy.events import DpEvent, UnsupportedEvent
from fedjax_dp.privacy.sensitivities import RELATIONS

UNITS = ("client", "record")
_FORMAT = 1
# A budget that was calibrated to the last bit must not fail on the last bit.
_SLACK = 1e-9


class Bound(NamedTuple):
    """An upper bound on ε or δ, and its accountant: "rdp" for "pld" if that is smaller."""

    value: np.ndarray
    accountant: np.ndarray


class Ledger:
    """Composes the events of what ran, for every unit of privacy separately.

    Noise multipliers are standard deviations over the largest contribution of one unit (the
    sensitivity, unless a unit is replaced), whatever the relation; the ledger takes replace-one's
    factor 2 into account. Events that carry a zCDP cost are taken as stated for the ledger's
    relation.

    Guarantee: ε and δ hold for the composition of all that was charged, adaptively chosen, under
    the ledger's relation, provided that what was charged is what ran. Two-level privacy is two
    ledgers side by side.

    Attributes:
      unit: whose data are protected: "client" (all data of a client) or "record" (one record of
        one client).
      relation: "add_remove", "zero_out" or "replace_one".
      num_units: the number of units with an account: 1 for a population of clients that are all
        treated alike, the number of clients for record-level training.
    """

    def __init__(self, unit: str = "client", relation: str = "add_remove", num_units: int = 1):
        """Opens an empty ledger of `num_units` accounts."""
        checks.one_of("unit", unit, UNITS)
        checks.one_of("relation", relation, RELATIONS)
        checks.whole("num_units", num_units)
        self.unit = unit
        self.relation = relation
        self.num_units = int(num_units)
        self._parts: dict[str, DpEvent] = {}
        # Arrays are replaced, never written to, so that copies may share them.
        self._counts: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._curves: dict[tuple[str, str], np.ndarray] = {}
        self._table: scipy.sparse.csr_array | None = None

    def copy(self) -> "Ledger":
        """Copies the ledger; later charges do not affect the copy, which shares its arrays."""
        other = Ledger(self.unit, self.relation, self.num_units)
        other._parts = dict(self._parts)
        other._counts = dict(self._counts)
        other._curves = self._curves
        return other

    @checked
    def charge(
        self, event: DpEvent, *, units: ArrayLike | None = None, count: ArrayLike = 1
    ) -> None:
        """Records what ran.

        Args:
          event: the event of one run; compositions are flattened.
          units: `[charged]` indices of the units that took part, or None for all. A unit that
            a sampler may have drawn took part, whether it was drawn or not.
          count: how often it ran: an integer of at least 0, or one for each of `units`.

        Raises:
          UnsupportedEvent: if no accountant has a valid analysis under the ledger's relation.
        """
        parts = ev.flatten(event)
        self._table = None
        for part, _ in parts:
            if ev.key_of(part) not in self._parts:
                require_some_accountant(part, self.relation)
        index, repeats = self._charged(units, count)
        if not index.size:
            return
        for part, times in parts:
            key = ev.key_of(part)
            self._parts[key] = part
            self._counts[key] = _merged(self._counts.get(key), index, repeats * times)

    def was_charged(self, event: DpEvent) -> np.ndarray:
        """Checks which units were charged for an event, alone or with others.

        Args:
          event: the event of one run; compositions are flattened.

        Returns:
          `[num_units]`, bool; true for all units if the event is free.
        """
        was_charged = np.full(self.num_units, True)
        for part, times in ev.flatten(event):
            counts = np.zeros(self.num_units, np.int64)
            index, charged = self._counts.get(ev.key_of(part), (np.arange(0), np.arange(0)))
            counts[index] = charged
            was_charged &= counts >= times
        return was_charged

    def _charged(self, units: ArrayLike | None, count: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        index = np.arange(self.num_units) if units is None else np.atleast_1d(np.asarray(units))
        if index.size == 0:
            index = index.astype(np.int64)
        is_index = index.dtype.kind in "iu" and index.ndim == 1
        rule = f"hold indices from 0 to {self.num_units - 1}"
        inside = is_index and bool(np.all((index >= 0) & (index < self.num_units)))
        checks.require(inside, "units", rule, units)
        repeats = np.asarray(count)
        is_count = repeats.dtype.kind in "iu" and bool(np.all(repeats >= 0))
        checks.require(is_count, "count", "hold integers of at least 0", count)
        fits = repeats.shape in ((), index.shape)
        checks.require(fits, "count", f"be a scalar or have shape {index.shape}", repeats.shape)
        repeats = np.broadcast_to(repeats, index.shape).astype(np.int64)
        return index.astype(np.int64)[repeats > 0], repeats[repeats > 0]

    @property
    def num_compositions(self) -> np.ndarray:
        """How many events each unit was charged for, `[num_units]`, int64."""
        total = np.zeros(self.num_units, np.int64)
        for index, counts in self._counts.values():
            total[index] += counts
        return total

    @checked
    def events(self, unit: int = 0) -> DpEvent:
        """Writes one unit's whole history as an event, from which its cost can be recomputed.

        Args:
          unit: the unit's index.

        Returns:
          The composition, noise multipliers as they were charged (see the class).
        """
        checks.require(0 <= unit < self.num_units, "unit", f"be below {self.num_units}", unit)
        return dpa.ComposedDpEvent(
            [
                dpa.SelfComposedDpEvent(self._parts[key], int(counts[index == unit][0]))
                for key, (index, counts) in self._counts.items()
                if unit in index
            ]
        )

    def histories(self) -> list[tuple[np.ndarray, DpEvent]]:
        """Groups the units by what they were charged for.

        Returns:
          For each distinct history the indices of its units and its event, as `events` writes it.
        """
        _, labels = self._histories()
        groups = [np.flatnonzero(labels == i) for i in range(labels.max() + 1)]
        return [(units, self.events(int(units[0]))) for units in groups]

    @checked
    def epsilon(self, dp_delta: ArrayLike, accountant: str = "rdp") -> np.ndarray:
        """Computes ε of every unit at its δ.

        Args:
          dp_delta: δ in [0, 1), a scalar or `[num_units]`.
          accountant: "rdp", "pld" (tighter and slower; if its lattice cannot resolve a history, the
            smaller of it and "rdp"), or "rdp-classic-64" (orders up to 64 and the conversion of
            older papers).

        Returns:
          `[num_units]`, float64; 0 for units without a charge. `bound` names the accountant too.

        Raises:
          UnsupportedEvent: if a charged event has no valid analysis by this accountant.
        """
        return self.bound(dp_delta, accountant).value

    @checked
    def bound(self, dp_delta: ArrayLike, accountant: str = "rdp") -> Bound:
        """Computes ε of every unit at its δ, and names the accountant that computed it.

        Args:
          dp_delta: as for `epsilon`.
          accountant: as for `epsilon`.

        Returns:
          ε and the accountant's name, `[num_units]` each.

        Raises:
          UnsupportedEvent: if a charged event has no valid analysis by this accountant.
        """
        return self._answer("epsilon", self._deltas(dp_delta), accountant)

    def _deltas(self, dp_delta: ArrayLike) -> np.ndarray:
        """One δ for each unit, `[num_units]`."""
        delta = np.asarray(dp_delta, float)
        rule = f"be one number or have one for each of the {self.num_units} units"
        checks.require(delta.shape in ((), (self.num_units,)), "dp_delta", rule, dp_delta)
        inside = bool(np.all((delta >= 0) & (delta < 1)))
        checks.require(inside, "dp_delta", "be in [0, 1)", dp_delta)
        return np.broadcast_to(delta, (self.num_units,))

    def _budgets(self, epsilon: ArrayLike) -> np.ndarray:
        """One budget for each unit, `[num_units]`."""
        budget = np.asarray(epsilon, float)
        checks.require(bool(np.all(budget >= 0)), "epsilon", "be at least 0", epsilon)
        return np.broadcast_to(budget, (self.num_units,))

    @checked
    def delta(self, epsilon: NonNegative, accountant: str = "rdp") -> np.ndarray:
        """Computes δ of every unit at one ε.

        Args:
          epsilon: ε, at least 0.
          accountant: as for `epsilon`.

        Returns:
          `[num_units]`, float64; 0 for units without a charge.

        Raises:
          UnsupportedEvent: if a charged event has no valid analysis by this accountant.
        """
        values = np.full(self.num_units, epsilon, float)
        return self._answer("delta", values, accountant).value

    def _answer(self, question: str, values: np.ndarray, accountant: str) -> Bound:
        """Computes the other of ε and δ for every unit, `[num_units]`."""
        require_accountant(accountant)
        history, labels = self._histories()
        # Units with one history and one given value share the answer.
        asked, labels = np.unique(np.stack([labels, values], axis=1), axis=0, return_inverse=True)
        history, values, labels = history[asked[:, 0].astype(int)], asked[:, 1], labels.reshape(-1)
        answers, names = self._answers(question, values, history, accountant)
        is_charged = np.diff(history.indptr) > 0
        return Bound(np.where(is_charged, answers, 0.0)[labels], names[labels].astype(str))

    def _answers(
        self, question: str, values: np.ndarray, history: scipy.sparse.csr_array, accountant: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Answers some histories, and names the accountant of each answer."""
        names = np.full(values.size, accountant, dtype=object)
        if accountant != "pld":
            return self._by_curves(question, values, history, accountant), names
        bounds = [self._by_losses(question, *each) for each in zip(values, history, strict=True)]
        answers = np.array([answer.value for answer in bounds])
        for i, answer in enumerate(bounds):
            other = np.inf if answer.is_tight else self._other(question, values[i], history[[i]])
            if other < answers[i]:
                answers[i], names[i] = other, "rdp"
        return answers, names

    def _by_curves(
        self, question: str, values: np.ndarray, history: scipy.sparse.csr_array, accountant: str
    ) -> np.ndarray:
        """Answers by Rényi curves, `[histories]`; parts that did not run need none."""
        parts, orders = list(self._parts[k] for k in self._counts), orders_of(accountant)
        ran = np.unique(history.indices)
        counts = history[:, ran].astype(float)
        curves = counts @ self._all_curves(accountant, ran)
        slack = counts @ np.array([ev.slack_of(parts[i], self.relation) for i in ran])
        is_classic = accountant == "rdp-classic-64"
        # A sum is rounded once for each part, and once when the part is multiplied.
        curves = curves * (1 + 2 * (ran.size + 1) * rdp.EPS)
        if question == "epsilon":
            # The δ that the curves do not cover is subtracted from the target δ.
            left = np.maximum(values - slack, 0.0)
            answers = rdp.to_epsilon(curves, orders, left, is_classic=is_classic)
            return np.where(values < slack, np.inf, answers)
        answers = rdp.to_delta(curves, orders, values, is_classic=is_classic)
        return np.minimum(answers + slack, 1.0)

    def _by_losses(self, question: str, value: float, row: Any) -> pld_answers.Answer:
        """Answers one history by privacy loss distributions."""
        parts = list(self._parts[k] for k in self._counts)
        events = [
            (translate(parts[i], self.relation, "pld"), int(count))
            for i, count in zip(row.indices, row.data, strict=True)
        ]
        ask = pld_answers.epsilon if question == "epsilon" else pld_answers.delta
        return ask(events, self.relation, float(value))

    def _other(self, question: str, value: float, history: scipy.sparse.csr_array) -> float:
        """Answers one history by Rényi curves; inf if they have no analysis of it."""
        try:
            return float(self._by_curves(question, np.array([value]), history, "rdp")[0])
        except UnsupportedEvent:
            return np.inf

    def _by_unit(self) -> scipy.sparse.csr_array:
        """Counts of every part, `[num_units, parts]`."""
        if self._table is None:
            units = [index for index, _ in self._counts.values()]
            counts = [count for _, count in self._counts.values()]
            parts = [np.full(index.size, i) for i, index in enumerate(units)]
            none = np.zeros(0, np.int64)
            position = (np.concatenate([none, *units]), np.concatenate([none, *parts]))
            self._table = scipy.sparse.csr_array(
                (np.concatenate([none, *counts]), position),
                shape=(self.num_units, max(len(units), 1)),
            )
            self._table.sort_indices()
        return self._table

    def _histories(self) -> tuple[scipy.sparse.csr_array, np.ndarray]:
        """Counts of every part, `[histories, parts]`, and the history of each unit."""
        table = self._by_unit()
        seen: dict[tuple[bytes, bytes], int] = {}
        labels = np.empty(self.num_units, np.int64)
        firsts: list[int] = []
        for unit in range(self.num_units):
            row = slice(table.indptr[unit], table.indptr[unit + 1])
            signature = (table.indices[row].tobytes(), table.data[row].tobytes())
            if signature not in seen:
                seen[signature] = len(firsts)
                firsts.append(unit)
            labels[unit] = seen[signature]
        return table[firsts], labels

    def _restricted(self, units: np.ndarray) -> "Ledger":
        """Selects the accounts of some units, in their order."""
        keys, rows = list(self._counts), self._by_unit()[units].tocsc()
        other = Ledger(self.unit, self.relation, units.size)
        other._curves = self._curves
        for part in np.flatnonzero(np.diff(rows.indptr)):
            column = slice(rows.indptr[part], rows.indptr[part + 1])
            order = np.argsort(rows.indices[column])
            other._parts[keys[part]] = self._parts[keys[part]]
            other._counts[keys[part]] = (
                rows.indices[column][order].astype(np.int64),
                rows.data[column][order].astype(np.int64),
            )
        return other

    def _all_curves(self, accountant: str, which: np.ndarray) -> np.ndarray:
        """The curves of some parts, `[which, orders]`."""
        keys = list(self._counts)
        wanted = [keys[i] for i in which]
        missing = [k for k in wanted if (accountant, k) not in self._curves]
        curves = rdp_curves([self._parts[k] for k in missing], self.relation, accountant)
        for key, curve in zip(missing, curves, strict=True):
            self._curves[accountant, key] = curve
        if not wanted:
            return np.zeros((0, len(orders_of(accountant))))
        return np.stack([self._curves[accountant, k] for k in wanted])

    @checked
    def max_rounds(
        self,
        event: DpEvent,
        epsilon: ArrayLike,
        dp_delta: ArrayLike,
        *,
        units: ArrayLike | None = None,
        accountant: str = "rdp",
        limit: int = 10**7,
    ) -> int:
        """Computes how many more times an event may run within a budget.

        Args:
          event: the event of one round.
          epsilon: the largest ε allowed, a scalar or `[num_units]`.
          dp_delta: δ in [0, 1), a scalar or `[num_units]`.
          units: as for `charge`.
          accountant: as for `epsilon`.
          limit: the largest answer, at least 1.

        Returns:
          The number of rounds, from 0 to `limit`.
        """
        checks.whole("limit", limit, is_sized=False)
        index = np.unique(self._charged(units, 1)[0])
        most, deltas = (self._budgets(epsilon) * (1 + _SLACK))[index], self._deltas(dp_delta)[index]
        if not index.size:
            return limit
        before = self._restricted(index)

        def exceeds(counts: np.ndarray, which: np.ndarray) -> np.ndarray:
            after = before.copy()
            after.charge(event, count=int(counts[0]))
            return np.array([np.any(after.epsilon(deltas, accountant) > most)])

        return int(_most(exceeds, np.zeros(1, np.int64), limit)[0])

    @checked
    def max_repeats(
        self,
        epsilon: ArrayLike,
        dp_delta: ArrayLike,
        *,
        accountant: str = "rdp",
        limit: Count = 10**7,
    ) -> np.ndarray:
        """Computes how often the whole history of each unit may run within its budget.

        With the event of one round charged to each unit, it is the number of rounds that each may
        pay for.

        Args:
          epsilon: the largest ε allowed, at least 0, or inf; a scalar or `[num_units]`.
          dp_delta: δ in [0, 1), a scalar or `[num_units]`.
          accountant: as for `epsilon`.
          limit: the largest answer, at least 1.

        Returns:
          `[num_units]`, int64, from 0 to `limit`.

        Raises:
          UnsupportedEvent: if a charged event has no valid analysis by this accountant.
        """
        require_accountant(accountant)
        budget, deltas = self._budgets(epsilon), self._deltas(dp_delta)
        history, labels = self._histories()
        asked = np.stack([labels, budget, deltas], axis=1)
        asked, labels = np.unique(asked, axis=0, return_inverse=True)
        history, (budget, deltas) = history[asked[:, 0].astype(int)], asked[:, 1:].T
        # Half of the slack, so that a ledger of these rounds and of other units is within it.
        most = budget * (1 + _SLACK / 2)

        def exceeds(by: str, counts: np.ndarray, which: np.ndarray) -> np.ndarray:
            repeated = history[which]
            repeated.data = repeated.data * np.repeat(counts, np.diff(repeated.indptr))
            return self._answers("epsilon", deltas[which], repeated, by)[0] > most[which]

        # What was charged for nothing may run as often as wanted.
        found = np.where(np.diff(history.indptr) > 0, 0, limit)
        if accountant == "pld":
            # Slow, and seldom allows much more than Rényi curves do.
            with contextlib.suppress(UnsupportedEvent):
                found = _most(partial(exceeds, "rdp"), found, limit)
        return _most(partial(exceeds, accountant), found, limit)[labels.reshape(-1)]

    def to_json(self) -> str:
        """Writes the whole ledger as text, from which `from_json` restores an equal one."""
        entries = []
        for key, (index, counts) in self._counts.items():
            entry: dict[str, Any] = {"event": ev.to_dict(self._parts[key])}
            if index.size == self.num_units and np.all(counts == counts[0]):
                entry["count"] = int(counts[0])
            else:
                entry["units"] = index.tolist()
                entry["count"] = counts.tolist()
            entries.append(entry)
        return json.dumps(
            {
                "format": _FORMAT,
                "unit": self.unit,
                "relation": self.relation,
                "num_units": self.num_units,
                "entries": entries,
            }
        )

    @classmethod
    @checked
    def from_json(cls, text: str) -> "Ledger":
        """Restores a ledger that `to_json` wrote.

        Args:
          text: the JSON text.

        Returns:
          The ledger.

        Raises:
          ValueError: if the text has another format.
        """
        data = json.loads(text)
        checks.require(data.get("format") == _FORMAT, "format", f"be {_FORMAT}", data.get("format"))
        ledger = cls(data["unit"], data["relation"], data["num_units"])
        for entry in data["entries"]:
            event = ev.from_dict(entry["event"])
            ledger.charge(event, units=entry.get("units"), count=entry["count"])
        return ledger


def _most(
    exceeds: Callable[[np.ndarray, np.ndarray], np.ndarray], first: np.ndarray, limit: int
) -> np.ndarray:
    """Finds the largest counts that do not exceed, beginning at `first`, which is kept at `limit`.

    `exceeds(counts, which)` answers for the counts of some places.
    """
    fits, too_many = first.copy(), np.full_like(first, limit + 1)

    def try_at(which: np.ndarray, counts: np.ndarray) -> None:
        is_over = exceeds(counts, which)
        too_many[which] = np.where(is_over, counts, too_many[which])
        fits[which] = np.where(is_over, fits[which], counts)

    if (begun := np.flatnonzero((first > 0) & (first < limit))).size:
        try_at(begun, first[begun])
        fits[too_many <= first] = 0
    step = 1
    while (which := np.flatnonzero((fits < limit) & (too_many > limit))).size:
        try_at(which, np.minimum(fits[which] + step, limit))
        step *= 2
    while (which := np.flatnonzero(too_many - fits > 1)).size:
        try_at(which, (fits[which] + too_many[which]) // 2)
    return fits


def _merged(
    old: tuple[np.ndarray, np.ndarray] | None, index: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Adds counts to sparse counts; the result has sorted, unique indices."""
    if old is not None:
        if np.array_equal(old[0], index):
            return old[0], old[1] + counts
        index, counts = np.concatenate([old[0], index]), np.concatenate([old[1], counts])
    unique, inverse = np.unique(index, return_inverse=True)
    total = np.zeros(unique.size, np.int64)
    np.add.at(total, inverse, counts)
    return unique, total
