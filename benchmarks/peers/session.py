"""How a runner talks to `compare.py`: one line of JSON in, one line of JSON out.

A runner is started once, warms up, and is then asked for one round at a time, so that rounds of
several implementations alternate and compilation is paid once. Commands:

    {"do": "round"}                                        one timed round, noise as in the problem
    {"do": "delta", "clients": n, "steps": n, "path": …}   a round without noise; its mean delta
    {"do": "quit"}

What libraries print goes to standard error.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

# The answers keep the pipe; everything else that is printed goes to standard error.
_answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

if "--double" in sys.argv:
    os.environ["JAX_ENABLE_X64"] = "1"

import problem as problems  # noqa: E402

Run = Callable[[int, int, float], tuple[float, problems.Params]]
"""`(clients, steps, noise_multiplier) -> (seconds, mean delta)`, from the initial weights."""


class Session:
    """The runner's end of the conversation.

    Attributes:
      path: the file of the problem.
      problem: what to train on, cut to the clients that were asked for.
      num_steps: local steps of a timed round.
      variant: which way of doing it, where a peer has several.
    """

    def __init__(self, *packages: str):
        parser = argparse.ArgumentParser()
        parser.add_argument("problem")
        parser.add_argument("--clients", type=int)
        parser.add_argument("--steps", type=int)
        parser.add_argument("--variant", default="")
        parser.add_argument("--double", action="store_true", help="compute in float64")
        options = parser.parse_args()
        self._started = time.perf_counter()
        self.path = options.problem
        self._packages = packages
        self.problem = problems.load(options.problem, options.clients)
        if options.double:
            self.problem = self.problem.double()
        self.num_steps = min(options.steps or self.problem.num_steps, self.problem.num_steps)
        self.variant = options.variant

    def commands(self) -> Iterator[dict[str, Any]]:
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "quit":
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
                self.answer(peak_rss_mb=peak)
                return
            yield command

    def answer(self, **values: Any) -> None:
        print(json.dumps(values), file=_answers, flush=True)

    def serve(
        self, run: Run, checking: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """Warms up by one round and answers until it is asked to quit.

        Deltas are computed within `checking`, in which a device's products do not round.
        """
        whole = self.problem.num_clients, self.num_steps, self.problem.noise_multiplier
        first = run(*whole)[0]
        self.answer(
            first_round_seconds=first,
            setup_seconds=time.perf_counter() - self._started,
            clients=self.problem.num_clients,
            steps=self.num_steps,
            versions={name: importlib.metadata.version(name) for name in self._packages}
            | {"python": platform.python_version()},
        )
        for command in self.commands():
            if command["do"] == "round":
                self.answer(seconds=run(*whole)[0])
            else:
                with checking():
                    seconds, delta = run(command["clients"], command["steps"], 0.0)
                problems.save_delta(command["path"], delta)
                self.answer(seconds=seconds)
