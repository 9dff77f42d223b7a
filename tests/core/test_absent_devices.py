"""Devices that programs are compiled for where they are not."""

import importlib.util

import pytest

from fedjax_dp.core import targets
from fedjax_dp.core.backend import facts, traced_for
from fedjax_dp.core.devices import memory_per_device


@pytest.mark.parametrize(
    ("name", "kind", "count", "topology"),
    [
        ("h100", "h100", 1, "1x1x1"),
        ("h100x8", "h100", 8, "1x1x8"),
        ("a100x2", "a100", 2, "1x1x2"),
        ("v5e", "v5e", 1, "v5e:2x2"),
        ("v5e:4x4", "v5e", 16, "v5e:4x4"),
        ("v5p", "v5p", 1, "v5p:2x2x1"),
        ("v4:2x2x2", "v4", 8, "v4:2x2x2"),
        ("v4:2x2", "v4", 4, "v4:2x2x1"),
    ],
)
def test_names_are_devices_and_how_many(name, kind, count, topology):
    found = targets.target(name)
    assert (found.kind, found.num_devices, found.topology) == (kind, count, topology)
    assert found.device is targets.KINDS[kind]


@pytest.mark.parametrize(
    "name",
    ["", "h101", "h 100", "h100x0", "h100:2x2", "v5ex4", "v5e:1x1", "v5e:2x2x2", "v5e:2", "8"],
)
def test_other_names_are_refused_by_name(name):
    with pytest.raises(ValueError, match=r"^device must be"):
        targets.target(name)


def test_what_is_traced_for_a_target_follows_its_facts():
    h100 = targets.KINDS["h100"]
    with traced_for(h100.facts):
        assert facts() == h100.facts and facts().cores == 132
        assert memory_per_device() == memory_per_device(8) == h100.memory
    assert facts().backend != "gpu"


@pytest.mark.parametrize(("name", "module"), [("v5e", "libtpu"), ("h100", "jax_plugins")])
def test_a_missing_compiler_is_named_with_the_way_to_install_it(name, module):
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    with pytest.raises(ValueError, match=r'compiler for .* is not installed; run `.* install "'):
        targets.devices(targets.target(name))


def test_flags_of_the_user_are_kept(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_own=1")
    flags = targets.environment(targets.target("h100"))["XLA_FLAGS"].split()
    assert "--xla_own=1" in flags and "--xla_gpu_autotune_level=0" in flags
    assert "XLA_FLAGS" not in targets.environment(targets.target("v5e"))
