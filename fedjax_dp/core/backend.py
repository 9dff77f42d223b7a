"""The backend that programs are traced for: its kind, and the facts that it reports."""

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import jax

from fedjax_dp.core import checks
from fedjax_dp.core.forks import require_not_forked

_T = TypeVar("_T")
_TARGET: ContextVar["Facts | None"] = ContextVar("target", default=None)


# Settings of JAX under which rounds cannot be traced, or are others, and why.
_OFF = {
    "jax_enable_x64": "as within `with jax.enable_x64(False):`: rounds are of 32 bits",
    "jax_check_tracer_leaks": "since caches of JAX hold what it takes for leaks",
    "jax_no_tracing": "since rounds are traced",
    "jax_disable_jit": "since rounds are compiled; a debugger may step through `Federation.step`",
}
_GUARD = "jax_transfer_guard_host_to_device"


def require_settings() -> None:
    """Refuses settings of JAX under which rounds are not what they are defined to be."""
    for name, reason in _OFF.items():
        rule = f"be off while a simulation is built and run, {reason}"
        checks.require(not getattr(jax.config, name, False), name, rule, True)


def require_backend() -> None:
    """Starts JAX; refuses settings and platforms that fail, and a fork after JAX has started."""
    require_not_forked()
    require_settings()
    guard = str(setting(_GUARD))
    rule = "be 'allow' or 'log': arrays of the host are placed on devices"
    checks.require(not guard.startswith("disallow"), _GUARD, rule, guard)
    try:
        jax.devices()
    # A platform without its plugin fails an assertion.
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0] or "it has no plugin in this environment"
        named = setting("jax_platforms")
        rule = f"name platforms that start on this machine, such as 'cpu' ({reason})"
        checks.require(not named, "JAX_PLATFORMS", rule, named)
        raise ValueError(f"JAX must start on this machine, got the error: {reason}") from error


def setting(name: str) -> Any:
    """Reads a setting of JAX, whose annotations list none; None if this JAX has no such setting."""
    return getattr(jax.config, name, None)


def programs_folder() -> str | None:
    """Returns where JAX keeps compiled programs: a path or an address; None if it keeps none."""
    return setting("jax_compilation_cache_dir")


class Facts(NamedTuple):
    """What a backend reports about one of its devices; `core.choices` follows from it."""

    backend: str  # "cpu", "gpu" or "tpu".
    device: str = ""  # The name of its kind.
    compute_capability: str = ""  # "9.0" for NVIDIA, "gfx942" for AMD, else empty.
    cores: int | None = None  # Multiprocessors of a GPU, or cores of a TPU.
    memory: float = math.inf  # Bytes.


@contextlib.contextmanager
def traced_with(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """Sets what functions read of a context variable while they are traced."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


def backend() -> str:
    """Returns the kind of backend that is traced for: that of the default device, or a target."""
    target = _TARGET.get()
    return jax.default_backend() if target is None else target.backend


def target_facts() -> Facts | None:
    """Returns the facts of the target that is traced for, with its memory; None without one."""
    return _TARGET.get()


def facts() -> Facts:
    """Reads the facts of the default device, without its memory, or those of a target."""
    target = _TARGET.get()
    if target is not None:
        return target
    device = jax.local_devices()[0]
    cores = getattr(device, "core_count", None)
    return Facts(
        jax.default_backend(),
        device.device_kind,
        str(getattr(device, "compute_capability", "")),
        None if cores is None else int(cores),
    )


@contextlib.contextmanager
def traced_for(target: Facts | str) -> Iterator[None]:
    """Traces for another device than the default one, of which a kind alone ("gpu") says no more.

    What was traced before is dropped, and again at the end: it holds for one backend.
    """
    with traced_with(_TARGET, Facts(target) if isinstance(target, str) else target):
        jax.clear_caches()
        try:
            yield
        finally:
            jax.clear_caches()
