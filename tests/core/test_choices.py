"""What automatic execution chooses, by the facts of backends that need not be here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_dp.core.backend import Facts, facts, traced_for
from fedjax_dp.core.choices import Measured, Speed, choices, no_split
from fedjax_dp.core.products import Arithmetic, computed_with
from fedjax_dp.engine import ExecutionConfig
from fedjax_dp.engine import layout as layouts
from fedjax_dp.models import Model
from fedjax_dp.models.cost import Cost

GIB = 2.0**30
CPU = Facts("cpu", "cpu", memory=8 * GIB)
H100 = Facts("gpu", "NVIDIA H100 80GB HBM3", "9.0", 132, 80 * GIB)
T4 = Facts("gpu", "Tesla T4", "7.5", 40, 15 * GIB)
AMD = Facts("gpu", "AMD Instinct MI300X", "gfx942", 304, 192 * GIB)
TPU = Facts("tpu", "TPU v5 lite", memory=16 * GIB)


def speeds(form, precision, operations=2e8, **rates):
    """Speeds by clients, as `n4=100.0`."""
    return tuple(
        Speed(form, precision, int(name[1:]), rate, operations) for name, rate in rates.items()
    )


def test_a_cpu_has_caches_and_accelerators_have_wide_chunks():
    assert choices(CPU).has_caches and choices(CPU).cached_state_bytes == 2**19
    for card in (H100, T4, AMD, TPU):
        chosen = choices(card)
        assert not chosen.has_caches and chosen.cached_state_bytes is None
        assert chosen.operations_per_chunk > 100 * choices(CPU).operations_per_chunk
        assert chosen.widest_chunk > choices(CPU).widest_chunk


def test_work_for_a_gpu_grows_with_its_multiprocessors():
    small, large = (choices(card).operations_per_chunk for card in (T4, H100))
    assert large / small == pytest.approx(132 / 40)
    # What is unknown is a card of a hundred.
    unknown, hundred = (choices(H100._replace(cores=n)) for n in (None, 100))
    assert unknown == hundred


@pytest.mark.parametrize("card", [H100, T4, TPU])
def test_memory_of_a_device_has_a_quarter_for_each_part(card):
    chosen = choices(card)
    assert chosen.resident_bytes == chosen.chunk_bytes == chosen.state_bytes == card.memory / 4


def test_examples_are_held_up_to_two_gib_where_more_gains_nothing_or_is_unknown():
    for small in (CPU, H100._replace(memory=4 * GIB), H100._replace(memory=np.inf)):
        assert choices(small).resident_bytes == 2 * GIB


@pytest.mark.parametrize(
    ("card", "form"),
    [
        *((card, "native") for card in (H100, T4, TPU, Facts("gpu"))),
        *((card, "products") for card in (CPU, AMD, Facts("other"))),
    ],
)
def test_without_a_measurement_convolutions_are_what_the_compiler_counts_least_for(card, form):
    for measured in (None, Measured(card.device)):
        chosen = choices(card, measured)
        assert (chosen.products, chosen.convolutions) == ("exact", form)


def test_split_products_are_chosen_where_a_measurement_shows_that_they_gain():
    def chosen(card, split):
        measured = Measured(
            card.device,
            speeds("records", "float32", n1=50.0, n64=1000.0)
            + speeds("records", "split", n1=60.0, n64=split),
        )
        return choices(card, measured).products

    assert chosen(H100, 1300.0) == chosen(TPU, 1300.0) == "split"
    assert chosen(H100, 1200.0) == "exact"
    # Not where they cannot be had, whatever was measured.
    assert chosen(CPU, 9e9) == chosen(T4, 9e9) == chosen(AMD, 9e9) == "exact"


@pytest.mark.parametrize("card", [H100, TPU, AMD])
def test_the_other_form_of_convolutions_needs_a_measurement_that_shows_its_gain(card):
    form = choices(card).convolutions
    other = {"native": "products", "products": "native"}[form]

    def chosen(rate):
        rows = speeds(form, "default", n64=1000.0) + speeds(other, "default", n64=rate)
        return choices(card, Measured(card.device, rows)).convolutions

    assert (chosen(1240.0), chosen(1260.0)) == (form, other)


@pytest.mark.parametrize("card", [H100, TPU, AMD])
def test_kernels_of_our_own_are_chosen_where_they_were_measured_as_the_fastest(card):
    form = choices(card).convolutions

    def chosen(**rates):
        rows = sum((speeds(of, "default", n64=rate) for of, rate in rates.items()), ())
        return choices(card, Measured(card.device, rows)).convolutions

    assert chosen(kernel=9e9) == form
    assert chosen(native=1000.0, products=1000.0, kernel=1240.0) == form
    assert chosen(native=1000.0, products=1000.0, kernel=1260.0) == "kernel"
    assert chosen(native=3000.0, products=1000.0, kernel=2000.0) == "native"


def test_chunks_are_the_narrowest_that_were_nearly_as_fast_as_the_fastest():
    rows = speeds("native", "default", n4=500.0, n16=890.0, n64=910.0, n256=1000.0, n1024=950.0)
    chosen = choices(H100, Measured(H100.device, rows))
    assert chosen.operations_per_chunk == 64 * 2e8
    # A CPU has constants that are measured.
    assert choices(CPU, Measured(CPU.device, rows)) == choices(CPU)
    # Of two precisions the one that needs the wider chunk.
    rows += speeds("products", "float32", n64=500.0, n256=990.0)
    assert choices(H100, Measured(H100.device, rows)).operations_per_chunk == 256 * 2e8


def test_execution_follows_what_is_reported_and_measured(monkeypatch):
    monkeypatch.setattr(layouts, "facts", lambda: H100)
    monkeypatch.setattr(layouts, "memory_per_device", lambda: H100.memory)
    rows = speeds("records", "float32", n16=100.0) + speeds("records", "split", n16=300.0)
    rows += speeds("products", "float32", n16=100.0) + speeds("products", "split", n16=100.0)
    measured = Measured(H100.device, rows)
    auto = ExecutionConfig(products="auto", measured=measured)
    auto.validate()
    assert auto.arithmetic() == Arithmetic("split", "native")
    assert auto._replace(products="exact").arithmetic() == Arithmetic("exact", "native")
    # A step of 2e8 operations, as measured: 16 clients side by side. Unmeasured the card takes 660,
    # and 10,000 clients are 16 equal chunks.
    cost = Cost(2e8, 2e8, 1)
    assert auto.chunk(lambda: cost, 10_000) == 16
    assert auto._replace(measured=None).chunk(lambda: cost, 10_000) == 625
    monkeypatch.setattr(layouts, "facts", lambda: CPU)
    with pytest.raises(ValueError, match="measured must be None on a CPU"):
        auto._replace(measured=Measured(CPU.device)).validate()
    monkeypatch.setattr(layouts, "facts", lambda: H100)
    other = auto._replace(measured=measured._replace(device="another card"))
    with pytest.raises(ValueError, match="measured must be of this device, NVIDIA H100"):
        other.validate()


def test_reasons_name_what_is_missing():
    assert no_split(H100) is None and no_split(TPU) is None
    assert no_split(H100._replace(compute_capability="8.0")) is None
    assert "a cpu has no units" in no_split(CPU) and "7.5" in no_split(T4)
    assert "NVIDIA GPUs and TPUs, not for gfx942" in no_split(AMD)


def test_facts_are_those_of_the_default_device_or_of_a_target():
    here = facts()
    assert here.backend == jax.default_backend()
    assert here.device == jax.local_devices()[0].device_kind
    with traced_for("tpu"):
        assert facts() == Facts("tpu")
    assert facts() == here


def test_lowered_models_keep_their_convolutions_where_native_ones_are_chosen():
    def apply(p, x):
        names = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, p, (1, 1), "SAME", dimension_numbers=names)

    def model(lower):
        return Model.from_functions(
            init=lambda key: jnp.ones((3, 3, 1, 2)),
            apply=apply,
            loss=lambda outputs, batch: outputs,
            lower=lower,
        )

    x, p = jnp.ones((1, 5, 5, 1)), jnp.ones((3, 3, 1, 2))

    def text(lower, how=Arithmetic()):
        with computed_with(how):
            return str(jax.make_jaxpr(lambda p: model(lower).predict(p, x))(p))

    assert "conv_general" not in text(True)
    assert text(True, Arithmetic(convolutions="native")) == text(False)


def test_measured_widths_alone_override_how_many_convolutions_a_tpu_does_at_a_time():
    v5e = Facts("tpu", "TPU v5 lite")
    one = Speed("native", "default", 8, 100.0, 1e9)
    usual = choices(v5e).convolved_per_chunk
    assert choices(v5e, Measured(v5e.device, (one,))).convolved_per_chunk == usual
    wide = one._replace(clients=64, clients_per_second=300.0)
    assert choices(v5e, Measured(v5e.device, (one, wide))).convolved_per_chunk == np.inf


def test_no_client_of_an_accelerator_is_left_over_for_a_chunk_of_its_own():
    config = ExecutionConfig(devices=None)
    assert config.clients_of_device(50, 8) == 6
    with traced_for("gpu"):
        assert [config.clients_of_device(50, n) for n in (1, 8, 16, 64)] == [50, 7, 4, 1]
