"""Calls that must not end or hold up a run, such as those to experiment trackers."""

import queue
import threading
from collections.abc import Callable

# Seconds that a call may take.
PATIENCE = 30.0
# What follows from a failure.
FAILED = "failed and receives nothing more, while the run continues"


class Aside:
    """Calls functions of one service in a thread of its own, until one of them fails or hangs."""

    def __init__(self, name: str):
        """Names the service, for warnings."""
        self._name, self._is_lost = name, False
        self._calls: queue.SimpleQueue[tuple[Callable[[], object], list[object]]]
        self._calls, self._done = queue.SimpleQueue(), threading.Event()
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[[], object], warn: Callable[[str], None]) -> None:
        """Calls a function and waits for it; warns of a failure, and calls nothing after it."""
        if self._is_lost:
            return
        if self._thread is None:
            # A daemon: one that hangs must not hold up the end of the process.
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        failures: list[object] = []
        self._done.clear()
        self._calls.put((function, failures))
        if not self._done.wait(PATIENCE):
            failures.append(f"no answer within {PATIENCE:g} seconds")
        if failures:
            self._is_lost = True
            warn(f"{self._name} {FAILED}: {failures[0]}")

    def _work(self) -> None:
        while True:
            function, failures = self._calls.get()
            try:
                function()
            except BaseException as error:
                failures.append(f"{type(error).__name__}: {error}")
            self._done.set()
