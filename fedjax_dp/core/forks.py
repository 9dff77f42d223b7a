"""Processes that were forked after JAX had started, in which no program of JAX ends."""

import os
import sys

_is_forked = False


def _note() -> None:
    global _is_forked
    bridge = sys.modules.get("jax._src.xla_bridge")
    # No public function says whether JAX has started without starting it.
    _is_forked = getattr(bridge, "backends_are_initialized", lambda: False)()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note)


def require_not_forked() -> None:
    """Refuses a process that was forked after JAX had started."""
    if _is_forked:
        raise RuntimeError(
            "this process was forked after JAX had started, so its programs would never end; "
            "start processes with multiprocessing.get_context('spawn')"
        )
