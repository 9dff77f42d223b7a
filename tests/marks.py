"""Which cases of a test run when.

`telling` tests are slow ones that run in continuous integration too. `floats` are those that the
bits of compiled programs decide: continuous integration also runs them optimised.
"""

import pytest

slow, telling, floats = pytest.mark.slow, pytest.mark.telling, pytest.mark.floats


def later(values, *, but=(), soon=(), mark=slow):
    """Parameters that are marked, but those that stay quick, and as telling those that run soon."""
    values = list(values)
    unknown = [value for value in (*but, *soon) if value not in values]
    assert not unknown, f"no such case: {unknown}"

    def marks_of(value):
        return () if value in but else telling if value in soon else mark

    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=marks_of(v)) for v in values]
