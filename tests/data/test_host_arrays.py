import jax
import numpy as np
import pytest

from fedjax_dp.data import host_arrays
from fedjax_dp.data.federated import FederatedData

X, Y = np.arange(60, dtype=np.float32).reshape(20, 3), np.arange(20, dtype=np.int32)
POOL = {"x": X, "y": Y}
STORES = {
    "from_client_ids": lambda: FederatedData.from_client_ids(POOL, np.arange(20) % 3),
    "from_indices": lambda: FederatedData.from_indices(POOL, [[1, 2, 19], [4]]),
    "from_clients": lambda: FederatedData.from_clients([{"x": X[:3]}, {"x": X[3:5]}]),
    "select": lambda: STORES["from_client_ids"]().select([2, 0]),
}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other devices have their own memory")
@pytest.mark.parametrize("name", STORES)
def test_devices_on_a_cpu_read_stores_in_place(name):
    for array in STORES[name]().examples.values():
        for device in jax.local_devices():
            assert jax.device_put(array, device).unsafe_buffer_pointer() == array.ctypes.data


def test_rows_and_parts_are_those_that_numpy_would_copy():
    rows = np.array([19, 0, 0, 7])
    np.testing.assert_array_equal(host_arrays.take(X, rows), X[rows])
    assert host_arrays.take(X, rows[:0]).shape == (0, 3)
    mixed = [Y[:2], Y[2:3].astype(np.float64)]
    found = host_arrays.joined(mixed)
    np.testing.assert_array_equal(found, np.concatenate(mixed))
    assert found.dtype == np.float64
    assert host_arrays.empty((0, 5), bool).shape == (0, 5)
