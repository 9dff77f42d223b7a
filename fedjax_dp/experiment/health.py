"""What tells that a run went wrong, while it runs and when it is over."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from fedjax_dp.algorithms.base import FederatedAlgorithm


class Health:
    """Reads rounds as they come, and warns once of each thing that is not as it should be.

    Attributes:
      warnings: what was found, in words.
    """

    def __init__(self, tell: Callable[[str], None]):
        """Starts with nothing found.

        Args:
          tell: is told of each warning when it comes up.
        """
        self.warnings: list[str] = []
        self._tell = tell
        self._seen: set[str] = set()
        self._num_with_work = self._num_drawn = 0

    @property
    def is_futile(self) -> bool:
        """Tells whether clients were drawn and no round brought any of their work."""
        return self._num_drawn > 0 and self._num_with_work == 0

    def warn(self, text: str) -> None:
        """Keeps a warning and tells it.

        Args:
          text: the warning.
        """
        self.warnings.append(text)
        self._tell(text)

    def note(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Looks at rounds.

        Args:
          rows: metrics of rounds, in their order.
        """
        for row in rows:
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

    def _once(self, kind: str, text: str) -> None:
        if kind not in self._seen:
            self._seen.add(kind)
            self.warn(text)


def never_reached(algorithm: FederatedAlgorithm, num_rounds: int) -> str:
    """Tells of work on the host that a run ends before, such as that behind a first stage.

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


def _is_finite(value: float | None) -> bool:
    """None is what a log has for what is not finite."""
    return value is not None and bool(np.isfinite(value))
