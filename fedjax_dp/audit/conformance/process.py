"""Functions that run in another process, in whatever environment it has."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from fedjax_dp.audit.conformance import serve
from fedjax_dp.audit.conformance.subjects import NotStarted
from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Positive


class Served:
    """Functions of a file that another Python runs, such as one with PyTorch.

    The process starts with the first call and runs until this one ends. A call that takes too long,
    or in which the process dies, raises `RuntimeError`; the next one starts it again. A process
    that cannot be started raises `ValueError`, in a check too: it says nothing about the functions.
    """

    @checked
    def __init__(
        self,
        file: str | os.PathLike,
        python: str = sys.executable,
        *,
        timeout: Positive = 60.0,
        start: Positive = 600.0,
    ):
        """Names the file; it needs NumPy, and not this package.

        Args:
          file: a Python file with functions of arrays and numbers, which return an array, a number
            or a sequence of them. A relative path is looked up in the folder of the file that is
            run, as a module that it imports, and else in the working directory.
          python: the interpreter of its environment.
          timeout: seconds after which a call is given up, above 0.
          start: seconds after which a start is given up, above 0; on a busy machine the imports of
            some frameworks take a minute.

        Raises:
          ValueError: if there is no such file.
        """
        # Where the folder of a script, of a test or of a subject file comes first.
        beside = pathlib.Path(sys.path[0], file)
        path = beside if beside.is_file() else pathlib.Path(file)
        checks.require(path.is_file(), "file", "be an existing file", str(file))
        self._command = [python, str(pathlib.Path(serve.__file__)), str(path.resolve())]
        self._timeout, self._start = timeout, start
        self._process: subprocess.Popen | None = None

    def function(self, name: str) -> Callable[..., Any]:
        """Refers to a function of the file.

        Args:
          name: its name.

        Returns:
          A function that calls it in the other process.
        """

        def call(*arguments: Any) -> Any:
            request: dict[str, Any] = {"name": name, "arguments": len(arguments)}
            request |= {f"argument{i}": np.asarray(a) for i, a in enumerate(arguments)}
            answer = self._answer(request)
            if "error" in answer:
                raise RuntimeError(str(answer["error"]))
            return serve.unpacked(answer)

        return call

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sends a request to the process, which is started if it does not run."""
        process = self._process or self._started()
        return self._exchange(process, request, self._timeout)

    def _started(self) -> subprocess.Popen:
        """Starts the process and waits for its imports."""
        pipe, (python, _, file) = subprocess.PIPE, self._command
        try:
            self._process = process = subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe, start_new_session=True
            )
            started = {"name": serve.STARTED, "arguments": 0}
            answer = self._exchange(process, started, self._start)
        except (OSError, RuntimeError) as error:
            raise NotStarted(f"python must run the file {file}; {python}: {error}") from error
        if "error" in answer:
            self.close()
            said = str(answer["error"])
            raise NotStarted(f"file must be one that {python} can run; {file}: {said}")
        return process

    def _exchange(
        self, process: subprocess.Popen, request: dict[str, Any], seconds: float
    ) -> dict[str, Any]:
        """Sends a request and waits for the answer, so many seconds at most."""
        assert process.stdin is not None and process.stdout is not None
        # Ending the process ends reads and writes that wait for it.
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            _end(process)

        timer = threading.Timer(seconds, give_up)
        timer.start()
        try:
            serve.write(process.stdin, request)
            answer = serve.read(process.stdout)
        except (OSError, ValueError, EOFError) as error:
            self.close()
            raise RuntimeError(f"its process sent no valid answer: {error}") from error
        finally:
            timer.cancel()
        if answer is None:
            self.close()
            late = f"no answer within {seconds:g} s" if is_late.is_set() else "it ended"
            raise RuntimeError(f"its process died: {late}, exit status {process.returncode}")
        return answer

    def close(self) -> None:
        """Ends the process, if it runs."""
        process, self._process = self._process, None
        if process is not None:
            _end(process)
            process.wait()
            for pipe in filter(None, (process.stdin, process.stdout)):
                with contextlib.suppress(OSError):
                    pipe.close()

    def __del__(self):
        """Ends the process."""
        if getattr(self, "_process", None) is not None:
            self.close()


def _end(process: subprocess.Popen) -> None:
    """Ends a process and those that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
