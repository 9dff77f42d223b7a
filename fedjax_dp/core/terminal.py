"""A terminal: the characters that it can show, and Ctrl-C."""

import codecs
import contextlib
import os
import signal
import sys
import unicodedata
from typing import Any, NoReturn

# What stands for characters of messages; Greek letters are written by name.
_PLAIN = {"…": "...", "→": "->", "≤": "<=", "≥": ">=", "×": "x", "±": "+-", "–": "-", "√": "sqrt"}
_is_interrupted = False


def prepare() -> None:
    """Makes the streams of a command take any text, and the first Ctrl-C the only one."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    # Where a width is not known it may be said to be 0, at which nothing would be printed.
    if not os.environ.get("COLUMNS", "1").strip("0"):
        del os.environ["COLUMNS"]
    codecs.register_error("plain", _plain)
    for stream in (sys.stdout, sys.stderr):
        # Another object may stand in for a stream, and None where there is no terminal.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="plain")


def is_interrupted() -> bool:
    """Whether Ctrl-C has interrupted the command, whatever error followed from that."""
    return _is_interrupted


def leave(status: int) -> NoReturn:
    """Ends an interrupted command at once: threads of a compiled round would crash Python's end."""
    for stream in (sys.stdout, sys.stderr):
        # Its reader may have gone.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(status)


def _interrupt(signum: int, frame: Any) -> None:
    # What the command does to end is not interrupted again.
    global _is_interrupted
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _is_interrupted = True
    while frame is not None:
        # Compiled modules print a traceback, or crash, if their import is interrupted.
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os.write(2, b"error: interrupted\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Replaces characters that the encoding of a stream lacks."""
    assert isinstance(error, UnicodeEncodeError)
    missing = error.object[error.start : error.end]
    return "".join(_PLAIN.get(letter, _greek(letter)) for letter in missing), error.end


def _greek(letter: str) -> str:
    name = unicodedata.name(letter, "").lower().split()
    return name[3] if name[:1] == ["greek"] and name[2:3] == ["letter"] else "?"
