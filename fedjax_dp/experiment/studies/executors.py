"""Executors of clusters, by name: Ray, Slurm, and processes of this machine."""

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from fedjax_dp.core import checks
from fedjax_dp.core.packages import needed_for
from fedjax_dp.experiment.reading.config_files import value_of
from fedjax_dp.experiment.studies.cluster import Cluster

On = Literal["ray", "slurm", "local"]
# In the folder of a study: what submitit sends to workers, and what they print.
LOGS_FOLDER = ".jobs"
# What decides how a worker computes, and where it reads data and its package.
_ENVIRONMENT = ("JAX_", "XLA_", "LIBTPU_", "FEDJAX_DP_", "PYTHONPATH")
# Minutes of a process of this machine; by default submitit ends it after two.
_MINUTES = 60 * 24 * 30


@contextlib.contextmanager
def opened(
    on: On, output: pathlib.Path, workers: int = 2, words: Sequence[str] = ()
) -> Iterator[Cluster]:
    """Opens a cluster for a study in a folder; `words`, NAME=VALUE, are options of its workers."""
    checks.whole("--workers", workers)
    options = dict(map(_option, words))
    with _ray(options) if on == "ray" else _submitit(on, output, options) as executor:
        yield Cluster(executor, workers)


def _option(word: str) -> tuple[str, Any]:
    """Reads an option of workers, whose value is as in TOML or a word."""
    name, equals, text = word.partition("=")
    checks.require(bool(name and equals and text), "--worker", "be NAME=VALUE", word)
    return name, value_of(f"--worker {name}", text)


@contextlib.contextmanager
def _naming_options(options: Mapping[str, Any]) -> Iterator[None]:
    """Names the options of workers that an executor refuses."""
    try:
        yield
    except (ValueError, TypeError, NameError, AssertionError) as error:
        raise ValueError(
            f"--worker must be an option of its workers, got {options}: {error}"
        ) from error


@contextlib.contextmanager
def _ray(options: Mapping[str, Any]) -> Iterator["_Ray"]:
    """Connects, once there is work, to the Ray cluster that is there, or starts one here."""
    # Ray would report its use to its makers.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with needed_for("a sweep on Ray", "cluster"):
        import ray
    is_new = not ray.is_initialized()
    with _naming_options(options):
        # A task that failed is submitted again by the study, which knows what is saved.
        options = {"max_retries": 0, "runtime_env": {"env_vars": _environment()}, **options}
        made = ray.remote(**options)
        # Ray checks the options with the first function.
        made(_environment)
    try:
        yield _Ray(ray, made)
    finally:
        if is_new and ray.is_initialized():
            ray.shutdown()


def _environment() -> dict[str, str]:
    """Lists the variables of this process that its workers need."""
    return {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)}


class _Ray:
    """Ray's tasks as an executor."""

    def __init__(self, ray: Any, made: Callable[[Callable[..., Any]], Any]) -> None:
        self._ray, self._made = ray, made

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "_OfRay":
        """Submits a call."""
        if not self._ray.is_initialized():
            self._ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        return _OfRay(self._ray, self._made(function).remote(*arguments))


class _OfRay:
    """The result of a task of Ray, as a future."""

    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray, self._reference = ray, reference

    def done(self) -> bool:
        """Whether it has ended."""
        return bool(self._ray.wait([self._reference], timeout=0)[0])

    def result(self) -> Any:
        """Returns the result, or raises what ended it."""
        return self._ray.get(self._reference)

    def cancel(self) -> None:
        """Ends it at once."""
        self._ray.cancel(self._reference, force=True)


@contextlib.contextmanager
def _submitit(on: str, output: pathlib.Path, options: Mapping[str, Any]) -> Iterator["_Submitit"]:
    """Submits to Slurm, or to processes of this machine; logs stay if anything fails."""
    rule = "give timeout_min for Slurm, the minutes after which it ends or requeues a job"
    is_limited = on != "slurm" or not {"timeout_min", "slurm_time", "slurm_timeout_min"}.isdisjoint(
        options
    )
    checks.require(is_limited, "--worker", rule, dict(options))
    has_slurm = on != "slurm" or all(map(shutil.which, ("sbatch", "srun")))
    checks.require(has_slurm, "--on", "be slurm on a machine that has its sbatch and srun", on)
    with needed_for(f"a sweep on {on}", "cluster"):
        import submitit

    def made(folder: pathlib.Path | str) -> Any:
        executor = submitit.AutoExecutor(folder=folder, cluster=on)
        executor.update_parameters(**{"timeout_min": _MINUTES, **options})
        return executor

    with _naming_options(options), tempfile.TemporaryDirectory() as scratch:
        # An executor makes its folder before it reads its options.
        made(scratch)
    folder = output.absolute() / LOGS_FOLDER
    yield _Submitit(made(folder))
    shutil.rmtree(folder, ignore_errors=True)


class _Submitit:
    """An executor of submitit, whose jobs are requeued when Slurm needs their machines."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Submits a call."""
        return self._executor.submit(_Requeued(function), *arguments)


class _Requeued:
    """A call that is made again after a preemption: its points resume from their checkpoints."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        """Makes the call."""
        return self._function(*arguments)

    def checkpoint(self, *arguments: Any) -> Any:
        """Returns what is requeued, which submitit asks for."""
        import submitit

        return submitit.helpers.DelayedSubmission(self, *arguments)
