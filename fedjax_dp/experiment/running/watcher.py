"""Watches a run: progress, warnings, and interruptions, the first of which asks it to end."""

import _thread
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.core.decimals import shown
from fedjax_dp.engine.accounts.privacy_accounting import unit_facts
from fedjax_dp.experiment.components.experiment import Experiment
from fedjax_dp.experiment.schema.config import TrainingSection
from fedjax_dp.privacy.reports.large_delta import large_delta

# Sent by a terminal and by a scheduler to end a run.
_STOPS = (signal.SIGINT, signal.SIGTERM)
# Signals within this many seconds count once: some senders signal a process and its group.
_TOGETHER = 1.0
# Seconds until a run that was interrupted twice is ended from outside.
_PATIENCE = 2.0


class Watcher:
    """Receives the progress of a run; this one ignores it.

    Subclasses override methods to show it.
    """

    def phase(self, name: str) -> None:
        """Receives the current phase.

        Args:
          name: a few words, such as "compiling".
        """

    def done(self, rounds: int, row: Mapping[str, Any]) -> None:
        """Receives the number of completed rounds.

        Args:
          rounds: completed rounds.
          row: the newest metrics; empty before the first round.
        """

    def warn(self, text: str) -> None:
        """Receives a warning, which the summary has too.

        Args:
          text: the warning.
        """

    def should_stop(self) -> bool:
        """Returns whether the run should end with a checkpoint, as after a first Ctrl-C."""
        return False

    def end(self) -> None:
        """Ends the process; called from a thread when an interrupted run cannot end by itself."""


@contextmanager
def interruptions(watcher: Watcher) -> Iterator[Callable[[], bool]]:
    """Yields whether the run should stop: the watcher, a first Ctrl-C or SIGTERM asks for it."""
    # The second raises KeyboardInterrupt. A compiled round may hold that up, so a thread listens
    # for signals too and has the watcher end the process.
    is_asked = is_urgent = False
    left = threading.Event()

    def note(signum: int, frame: Any) -> None:
        nonlocal is_asked
        is_asked = True
        if is_urgent:
            # Nothing interrupts the end.
            for number in _STOPS:
                signal.signal(number, signal.SIG_IGN)
            raise KeyboardInterrupt

    def listen(signals: socket.socket) -> None:
        nonlocal is_urgent
        first = None
        for byte in iter(lambda: signals.recv(1), b""):
            if byte[0] not in _STOPS:
                continue
            if first is None:
                first = time.monotonic()
                watcher.phase("stopping after the rounds under way; once more stops at once")
            elif time.monotonic() > first + _TOGETHER:
                break
        if left.is_set():
            return
        is_urgent = True
        _thread.interrupt_main()
        if not left.wait(_PATIENCE):
            watcher.end()

    try:
        before = {number: signal.signal(number, note) for number in _STOPS}
    except ValueError:  # Not the main thread, which alone receives signals.
        yield watcher.should_stop
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    woken = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    listener = threading.Thread(target=listen, args=(receiver,), daemon=True)
    listener.start()
    try:
        yield lambda: is_asked or watcher.should_stop()
    finally:
        left.set()
        signal.set_wakeup_fd(woken)
        sender.close()
        listener.join()
        receiver.close()
        for number, handler in before.items():
            signal.signal(number, handler)


# Above it an ε is meaningless: odds may change by e^50.
_WEAK = 50.0
# Share of padding in a round above which a warning is given.
_MUCH_PADDING = 0.75


class Health:
    """Checks rounds as they finish, and warns once of each kind of problem."""

    def __init__(self, report: Callable[[str], None], clients_per_chunk: int = 1):
        """Reports to a function; `clients_per_chunk` clients are computed together."""
        self._clients_per_chunk = clients_per_chunk
        self.warnings: list[str] = []
        self._report = report
        self._seen: set[str] = set()
        self._num_with_work = self._num_drawn = 0

    @property
    def is_futile(self) -> bool:
        """Whether clients were drawn, but no round included any of their work."""
        return self._num_drawn > 0 and self._num_with_work == 0

    def warn(self, text: str) -> None:
        """Reports a warning and keeps it for the summary."""
        self.warnings.append(text)
        self._report(text)

    def note(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Checks the metrics of rounds, in their order."""
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
            elif loss is not None and read != 0 and not np.isfinite(loss):
                self._once(
                    "loss not finite",
                    f"{number}: the loss of at least one example is NaN or infinite; an update "
                    "that is not finite, or such a gradient of a record whose privacy is "
                    "protected, counts as zero",
                )
            if not has_loss:
                self._once(
                    "no loss",
                    f"{number}: the loss of all examples is exactly 0, so nothing is learned; "
                    "labels may be out of range, or the loss may not read them",
                )

    def note_epsilon(self, epsilon: Any) -> None:
        """Warns of an ε, spent or budgeted, that is too large to mean anything."""
        largest = float(np.max(np.asarray(epsilon, np.float64)))
        if _WEAK < largest < np.inf:
            self._once(
                "large epsilon",
                f"ε = {shown('epsilon', largest)} protects almost nothing: an attacker may be "
                "nearly certain of a unit's data; below 10 is usual",
            )

    def _note_padding(self, row: Mapping[str, Any]) -> None:
        share = row.get("padding_share")
        if share is None or share <= _MUCH_PADDING:
            return
        if self._clients_per_chunk > 1:
            advice = (
                f"execution.clients_per_chunk is {self._clients_per_chunk}, and all clients of a "
                "chunk take as many steps as the longest; a smaller number wastes less"
            )
        else:
            advice = (
                "the last micro-batch of a batch is padded; a smaller training.micro_batch_size "
                "wastes less"
            )
        self._once(
            "padding",
            f"round {row['round']}: {share:.0%} of the computed examples are padding: {advice}",
        )

    def _once(self, kind: str, text: str) -> None:
        if kind not in self._seen:
            self._seen.add(kind)
            self.warn(text)


def large_deltas(experiment: Experiment) -> list[str]:
    """Returns warnings of δ that are not below the share of one unit."""
    facts = unit_facts(experiment.simulation.federation)
    warnings = {
        unit: large_delta(unit, dp_delta, facts[unit]["num_units"])
        for unit, dp_delta in experiment.dp_delta.items()
    }
    return [f"privacy.{unit}.dp_delta: {text}" for unit, text in warnings.items() if text]


def never_reached(algorithm: FederatedAlgorithm, num_rounds: int) -> str:
    """Returns a warning if a run ends before a stage of its algorithm begins, else ""."""
    late = [step.after for step in algorithm.stages.host_steps if step.after > num_rounds]
    if not late:
        return ""
    return (
        f"run.rounds is {num_rounds}, and the next stage of {algorithm.name} begins after round "
        f"{min(late)}: this run ends within its first stage"
    )


def without_learning(section: TrainingSection) -> list[str]:
    """Returns a warning if local steps of some clients change nothing, else []."""
    rates = np.asarray(section.learning_rate, np.float64)
    if np.all(rates > 0):
        return []
    whose = "all clients" if rates.ndim == 0 else f"{int(np.sum(rates == 0))} clients"
    return [f"training.learning_rate is 0 for {whose}, whose local steps change nothing"]


def _is_finite(value: float | None) -> bool:
    """Returns whether a number is finite; in a log, None stands for one that is not."""
    return value is not None and bool(np.isfinite(value))
