"""Settings of JAX under which nothing can run."""

import jax
import pytest

from fedjax_dp.core.backend import require_backend


def test_settings_that_do_not_work_are_refused_before_any_work():
    require_backend()
    for setting, name in (
        (jax.transfer_guard("disallow"), "jax_transfer_guard_host_to_device must be 'allow'"),
        (jax.checking_leaks(), "jax_check_tracer_leaks must be off"),
        (jax.enable_x64(True), "jax_enable_x64 must be off"),
        (jax.disable_jit(), "jax_disable_jit must be off"),
    ):
        with setting, pytest.raises(ValueError, match=name):
            require_backend()
