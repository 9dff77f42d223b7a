"""Signs that a run went wrong, while it runs and when it is over."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.core.decimals import rounded_up
from fedjax_dp.experiment.schema.config import TrainingSection

# Above it an ε is a promise in name alone: odds may change by e^50.
_WEAK = 50.0
# Share of the work of a round that is worth a word, since it is done for nothing.
_MUCH_PADDING = 0.75


class Health:
    """Reads rounds as they come, and warns once of each thing that is not as it should be.

    Attributes:
      warnings: what was found, in words.
    """

    def __init__(self, report: Callable[[str], None], clients_per_chunk: int = 1):
        """Starts with nothing found.

        Args:
          report: called with each warning when it comes up.
          clients_per_chunk: clients that are computed side by side.
        """
        self._clients_per_chunk = clients_per_chunk
        self.warnings: list[str] = []
        self._report = report
        self._seen: set[str] = set()
        self._num_with_work = self._num_drawn = 0

    @property
    def is_futile(self) -> bool:
        """Whether clients were drawn and no round brought any of their work."""
        return self._num_drawn > 0 and self._num_with_work == 0

    def warn(self, text: str) -> None:
        """Keeps a warning and reports it.

        Args:
          text: the warning.
        """
        self.warnings.append(text)
        self._report(text)

    def note(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Looks at rounds.

        Args:
          rows: metrics of rounds, in their order.
        """
        for row in rows:
            self._note_padding(row)
            for name in ("epsilon_client", "epsilon_record"):
                if row.get(name) is not None:
                    self.note_epsilon(row[name])
            drawn, lost = int(row["num_participants"]), int(row["num_non_finite"])
            if drawn == 0:
                continue
            self._num_drawn += 1
            loss, read = row.get("train_loss"), row.get("num_examples")
            has_loss = loss is None or read == 0 or not np.isfinite(loss) or float(loss) != 0
            self._num_with_work += lost < drawn and has_loss
            number = f"round {row['round']}"
            if lost == drawn:
                self._once(
                    "not finite",
                    f"{number}: the updates of all {drawn} clients are not finite and count as "
                    "zero; a smaller training.learning_rate, or data of a smaller scale, may help",
                )
            elif not all(map(_is_finite, row.get("update_norm_quantiles", ()))):
                self._once(
                    "overflow",
                    f"{number}: updates are so large that their norms exceed what float32 holds; "
                    "a smaller training.learning_rate may help",
                )
            if not has_loss:
                self._once(
                    "no loss",
                    f"{number}: the loss of all examples is exactly 0, so that nothing is learned; "
                    "labels may be out of range, or the loss may not read them",
                )

    def note_epsilon(self, epsilon: Any) -> None:
        """Warns of a budget, or of what was spent, that promises next to nothing.

        Args:
          epsilon: ε, of one unit or of several.
        """
        largest = float(np.max(np.asarray(epsilon, np.float64)))
        if _WEAK < largest < np.inf:
            self._once(
                "large epsilon",
                f"ε = {rounded_up(largest)} promises next to nothing: a reader of the release may "
                "be nearly certain of a unit's data; below 10 is usual",
            )

    def _note_padding(self, row: Mapping[str, Any]) -> None:
        share = row.get("padding_share")
        if share is None or share <= _MUCH_PADDING:
            return
        if self._clients_per_chunk > 1:
            advice = (
                f"execution.clients_per_chunk is {self._clients_per_chunk}, and clients side by "
                "side wait for the longest; a smaller number computes less for nothing"
            )
        else:
            advice = (
                "the last micro-batch of a batch is filled up; a smaller training.micro_batch_size "
                "computes less for nothing"
            )
        self._once(
            "padding",
            f"round {row['round']}: {share:.0%} of the examples that are computed are padding: "
            f"{advice}",
        )

    def _once(self, kind: str, text: str) -> None:
        if kind not in self._seen:
            self._seen.add(kind)
            self.warn(text)


def never_reached(algorithm: FederatedAlgorithm, num_rounds: int) -> str:
    """Warns of work on the host that a run ends before, such as that after a first stage.

    Args:
      algorithm: what is run.
      num_rounds: rounds of the run.

    Returns:
      A warning, or nothing.
    """
    late = [step.after for step in algorithm.host_steps if step.after > num_rounds]
    if not late:
        return ""
    return (
        f"run.rounds is {num_rounds}, and {algorithm.name} goes on to its next stage after round "
        f"{min(late)}: this run ends within its first stage"
    )


def without_learning(section: TrainingSection) -> list[str]:
    """Warns of clients whose local steps change nothing.

    Args:
      section: local training, a list where numbers are by client.

    Returns:
      A warning, or nothing.
    """
    rates = np.asarray(section.learning_rate, np.float64)
    if np.all(rates > 0):
        return []
    whose = "all clients" if rates.ndim == 0 else f"{int(np.sum(rates == 0))} clients"
    return [f"training.learning_rate is 0 for {whose}, whose local steps change nothing"]


def _is_finite(value: float | None) -> bool:
    """None is what a log has for what is not finite."""
    return value is not None and bool(np.isfinite(value))
