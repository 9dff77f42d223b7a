"""Gradients of records with split products: bounds, precisions, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import floats, later, slow, telling

from fedjax_dp.algorithms import fedavg
from fedjax_dp.audit.floats import hostile_records, search_sums
from fedjax_dp.audit.noise import distance
from fedjax_dp.clients import LocalConfig, dp_sgd_trainer
from fedjax_dp.clients.gradients import clipped, plain
from fedjax_dp.core import products
from fedjax_dp.core.backend import Facts, traced_for
from fedjax_dp.core.products import Arithmetic, computed_with
from fedjax_dp.data import participants, sampling
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine import ExecutionConfig, federation
from fedjax_dp.engine import layout as layouts
from fedjax_dp.engine.execution.compile import compile_federation
from fedjax_dp.engine.facts import population_of
from fedjax_dp.models import Model, registry

pytestmark = floats

SPLIT = Arithmetic("split")
MARGIN = 1e-3
KEY = jax.random.key(0)
SHAPES = {
    "dense": ((1, 40), (1, 6)),
    "one output": ((1, 300), (1, 1)),
    "rows": ((9, 6), (9, 5)),
    "few rows": ((6, 64), (6, 50)),
}


def sum_of(name):
    """The clipped sum, split, of a loss whose gradient is a product of a record's two arrays."""
    rows, columns = SHAPES[name]
    model = Model.from_functions(
        init=lambda key: {"w": jnp.zeros((rows[1], columns[1]))},
        apply=lambda p, x: jnp.sum((x["rows"] @ p["w"]) * x["columns"], (1, 2)),
        loss=lambda outputs, batch: outputs,
        lower=False,
    )
    rule, params = clipped(model), model.init(KEY)
    config = LocalConfig(clip_norm=1.0, noise_multiplier=0.0, batch_size=1)

    @jax.jit
    def total(batch, is_real):
        with computed_with(SPLIT):
            return rule.micro_batch(params, {"x": batch}, is_real, None, config).gradient

    return total, {"rows": np.zeros(rows, np.float32), "columns": np.zeros(columns, np.float32)}


@pytest.mark.parametrize("name", later(SHAPES, but=["dense"]))
def test_no_record_moves_a_split_sum_past_its_bound(name):
    total, record = sum_of(name)
    rng = np.random.default_rng(2)
    worst = search_sums(total, hostile_records(record), 6, 1.0, 60, rng)
    assert 0.5 < worst.ratio <= 1 + MARGIN, worst


def moved_by_a_record_that_rounds_up():
    """Every entry is 1 + 2^-8 + 2^-20, of which bfloat16 makes 1 + 2^-7."""
    total, record = sum_of("dense")
    entry = np.float32(1 + 2.0**-8 + 2.0**-20)
    batch = {name: np.full((3, *a.shape), entry) for name, a in record.items()}
    return distance(total(batch, np.ones(3, bool)), total(batch, np.arange(3) > 0))


def test_one_product_of_bfloat16_would_break_the_bound(monkeypatch):
    assert moved_by_a_record_that_rounds_up() <= 1 + MARGIN
    whole = products.parts
    monkeypatch.setattr(products, "parts", lambda x: (whole(x)[0], jnp.zeros_like(whole(x)[1])))
    assert moved_by_a_record_that_rounds_up() > 1 + 3 * MARGIN


def network():
    return registry.build("emnist_cnn", {"x": jax.ShapeDtypeStruct((12, 12, 1), jnp.float32)}, 3)


def text_of(make_rule, how=SPLIT):
    model = network()
    rule, params = make_rule(model), jax.eval_shape(model.init, KEY)
    one = {
        "x": jax.ShapeDtypeStruct((4, 12, 12, 1), jnp.float32),
        "y": jax.ShapeDtypeStruct((4,), jnp.int32),
    }
    config = LocalConfig(clip_norm=1.0, noise_multiplier=0.0, batch_size=1)

    def run(params, batch):
        return rule.micro_batch(params, batch, jnp.ones(4, bool), KEY, config).gradient

    with computed_with(how):
        return str(jax.make_jaxpr(run)(params, one))


NAMES = [("gpu", "BF16_BF16_F32_X3"), ("tpu", "Precision.HIGH,")]


@pytest.mark.parametrize(("kind", "named"), later(NAMES, but=NAMES[:1], mark=telling))
def test_products_of_records_are_all_split(kind, named):
    with traced_for(kind):
        text = text_of(clipped)
    count = text.count("dot_general[")
    # Three products of bfloat16, where the sum is made, have no other precision than their factors.
    of_sums = text.count("precision=(Precision.DEFAULT")
    assert of_sums >= 3 and of_sums % 3 == 0 and "bf16" in text
    assert text.count(f"precision={named}") + text.count(f"precision=({named}") == count - of_sums
    assert "precision=None" not in text and "HIGHEST" not in text


def test_products_of_other_gradients_are_as_before():
    assert text_of(plain) == text_of(plain, Arithmetic())


def test_convolutions_that_jax_would_not_split_are_refused():
    def apply(p, x):
        names = ("NHWC", "HWIO", "NHWC")
        out = jax.lax.conv_general_dilated(x, p["w"], (1, 1), "SAME", dimension_numbers=names)
        return jnp.sum(out, (1, 2, 3))

    def model(lower):
        return Model.from_functions(
            init=lambda key: {"w": jnp.zeros((3, 3, 1, 2))},
            apply=apply,
            loss=lambda outputs, batch: outputs,
            lower=lower,
        )

    batch, real = {"x": jnp.ones((2, 5, 5, 1))}, jnp.ones(2, bool)
    config = LocalConfig(clip_norm=1.0, noise_multiplier=0.0, batch_size=1)

    def shapes(lower, how):
        one = model(lower)
        with computed_with(how):
            rule, params = clipped(one), one.init(KEY)
            return jax.eval_shape(lambda p: rule.micro_batch(p, batch, real, KEY, config), params)

    shapes(True, SPLIT), shapes(False, Arithmetic())
    with pytest.raises(ValueError, match="products must be 'exact' for a model with convolutions"):
        shapes(False, SPLIT)


def test_split_products_are_refused_where_they_cannot_be_had(monkeypatch):
    monkeypatch.setattr(layouts, "facts", lambda: Facts("cpu", "cpu"))
    with pytest.raises(ValueError, match="products must be 'exact' or 'auto': a cpu has no units"):
        ExecutionConfig(products="split").validate()
    ExecutionConfig(products="auto").validate()
    for capability, words in (("7.5", "capability 7.5 has no units"), ("gfx942", "not for gfx942")):
        monkeypatch.setattr(layouts, "facts", lambda c=capability: Facts("gpu", "card", c))
        with pytest.raises(ValueError, match=words):
            ExecutionConfig(products="split").validate()
    for facts in (Facts("gpu", "card", "8.0"), Facts("gpu", "card", "10.0"), Facts("tpu", "v5")):
        monkeypatch.setattr(layouts, "facts", lambda f=facts: f)
        ExecutionConfig(products="split").validate()


@telling
def test_one_algorithm_is_traced_anew_for_each_choice():
    """What JAX keeps of a trace must not serve the other choice."""
    x = np.zeros((8, 3), np.float32)
    data = FederatedData({"x": x, "y": np.zeros(8, np.int32)}, np.array([0, 3, 8]))
    model = registry.build("mlp", {"x": jax.ShapeDtypeStruct((3,), jnp.float32)}, 2)
    config = LocalConfig(0.1, 1, 2, clip_norm=1.0, noise_multiplier=1.0)
    algorithm = fedavg(model, dp_sgd_trainer(model, config))
    participation = participants.participation(sampling.full_participation(), 2)
    bound = federation(algorithm, population_of(data), participation)

    def program(products):
        execution = ExecutionConfig(1, None, "device", products=products)
        return compile_federation(bound, data, execution).program.exported("cuda").mlir_module()

    with traced_for("gpu"):
        texts = [program(choice) for choice in ("exact", "split", "exact")]
    assert "num_primitive_operations = 3" in texts[1] and "bf16" in texts[1]
    assert texts[0] == texts[2] and "bf16" not in texts[0] and "HIGHEST, HIGHEST" in texts[0]


@slow
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_rounds_of_a_network_are_exported_with_split_products(platform):
    from benchmarks.operations import exported

    text = exported("W3", platform, products="split").mlir_module()
    assert "stablehlo.convolution" not in text and "bf16" in text
    named = "num_primitive_operations = 3" if platform == "cuda" else "precision = [HIGH, HIGH]"
    assert named in text
