"""How values and paths are written in errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_dp.core import checks, files, ranges
from fedjax_dp.core.argument_checks import checked, rule_of
from fedjax_dp.privacy import mechanisms


def test_a_whole_number_of_thousands_of_digits_is_written_by_its_bits():
    with pytest.raises(ValueError, match=r"rounds must be small, got an integer of 40000 bits"):
        checks.require(False, "rounds", "be small", (1 << 40_000) - 1)


def test_a_key_or_an_array_that_was_deleted_is_refused_by_name():
    with pytest.raises(ValueError, match=r"must .*got .*key"):
        mechanisms.gaussian(jax.random.key(0), 1.0)
    gone = jnp.ones(3)
    gone.delete()
    with pytest.raises(ValueError, match=r"x must be there, got .*float32\[3\]"):
        checks.require(False, "x", "be there", gone)


def test_a_folder_that_cannot_be_made_is_named_as_it_was_given(tmp_path):
    with pytest.raises(ValueError, match=r"--output must be a folder.*got an empty path"):
        files.require_folder("", "--output", writable=True)
    path = str(tmp_path / "missing" / ("y" * 300))
    with pytest.raises(ValueError, match="too long") as refused:
        files.require_folder(path, "--output")
    assert path[:40] in str(refused.value)


@pytest.mark.parametrize("kind", [ranges.Positive, ranges.Count, float])
def test_a_whole_number_that_no_float_holds_is_out_of_range(kind):
    def taken(x):
        return x

    taken.__annotations__["x"] = kind
    with pytest.raises(ValueError, match=r"^x must be .*, got 1000"):
        checked(taken)(10**400)


@pytest.mark.parametrize("kind", [np.typing.ArrayLike, np.typing.ArrayLike | None])
def test_a_text_is_not_like_an_array(kind):
    """NumPy's type for what is like an array has another form under Python 3.12 and later."""
    rule = rule_of(kind)
    assert rule is not None and rule.holds([0.5, 1]) and not rule.holds("half")
