"""The offsets on floats that PrivacyFL released: they cancel, and they do not hide."""

import numpy as np
import pytest
from marks import floats

from fedjax_dp.server import float_offsets

pytestmark = floats


def test_offsets_cancel_up_to_rounding_and_after_clients_left():
    rng = np.random.default_rng(0)
    weights, offsets = rng.normal(size=(7, 5)), float_offsets(7, seed=3)
    for is_active in (np.ones(7, bool), np.arange(7) != 2):
        total = offsets.offsets(is_active)
        assert total.sum() == 0 and not np.any(total[~is_active])
        assert np.all(np.abs(total[is_active]) > 2**10)
        masked = (weights + total[:, None])[is_active]
        # Offsets cancel up to rounding in float64.
        error = np.abs(masked.mean(axis=0) - weights[is_active].mean(axis=0))
        assert 0 < error.max() < 1e-9
        # In float32 the mean is lost.
        narrow = (weights.astype(np.float32) + total.astype(np.float32)[:, None])[is_active]
        lost = np.abs(narrow.mean(axis=0) - weights[is_active].mean(axis=0))
        assert lost.max() > 1e-4


def test_an_offset_has_18_digits_and_the_first_is_one_and_all_weights_share_it():
    offsets = float_offsets(2)
    for _ in range(20):
        one, other = offsets.offsets()
        assert one == -other and 2**17 <= one < 2**18
        message = np.array([0.25, 0.75]) + one
        # What is not hidden at all: the difference of two weights.
        assert np.diff(message)[0] == pytest.approx(0.5, abs=1e-9)
        following = offsets.following()
        assert following.offsets()[0] != one
        offsets = following


def test_the_next_key_follows_from_the_digits_that_are_no_offset():
    """Keys that differ in the last two digits of the offset alone have the same next key."""
    keys = [int(f"{offset:018b}" + "01" * 119, 2).to_bytes(32, "big") for offset in range(4)]
    keys = [bytes([key[0] | 128, *key[1:]]) for key in keys]
    both = [float_offsets(2)._replace(keys={(0, 1): key}) for key in keys]
    assert [one.offsets()[0] for one in both] == [2**17 + i for i in range(4)]
    assert len({one.following().offsets()[0] for one in both}) == 1


def test_offsets_of_one_client_are_refused():
    with pytest.raises(ValueError, match="num_clients must be"):
        float_offsets(1)
    with pytest.raises(ValueError, match="is_active must have one entry"):
        float_offsets(3).offsets(np.ones(2, bool))
