"""Which cases of a test run when.

The quick suite keeps what tells cases apart. What is marked `telling` belongs to the slow suite and
runs in continuous integration too; the rest of the slow suite runs before a change is called done.
"""

import pytest

slow, telling = pytest.mark.slow, pytest.mark.telling


def later(values, *, but=(), mark=slow):
    """Parameters of which all are marked but those that stay in the quick suite."""
    quick = set(but)
    values = list(values)
    unknown = quick - set(values)
    assert not unknown, f"no such case: {unknown}"
    marks = {True: (), False: mark}
    return [
        pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=marks[v in quick])
        for v in values
    ]
