"""Watches a run: its progress, and interruptions, of which the first asks it to end."""

import _thread
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

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

    def end(self) -> None:
        """Ends the process; called from a thread when an interrupted run cannot end by itself."""


@contextmanager
def interruptions(watcher: Watcher) -> Iterator[Callable[[], bool]]:
    """Yields whether the run should stop, which the first Ctrl-C or SIGTERM asks for."""
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
        yield lambda: False
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    woken = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    listener = threading.Thread(target=listen, args=(receiver,), daemon=True)
    listener.start()
    try:
        yield lambda: is_asked
    finally:
        left.set()
        signal.set_wakeup_fd(woken)
        sender.close()
        listener.join()
        receiver.close()
        for number, handler in before.items():
            signal.signal(number, handler)
