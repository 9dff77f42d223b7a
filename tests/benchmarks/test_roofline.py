import jax
import jax.numpy as jnp
import pytest

from benchmarks import roofline

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads CPU programs")


def operations_of(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return roofline.Program(jax.jit(function).lower(*arguments).compile().as_text()).operations()


def test_a_product_counts_two_operations_for_each_pair_and_its_arrays_once():
    found = operations_of(lambda a, b: jnp.tanh(a) @ b, (30, 50), (50, 70))
    [product] = [op for op in found.values() if op.kind == "dot"]
    assert product.flops >= 2 * 30 * 50 * 70
    assert product.flops <= 2 * 30 * 50 * 70 + 30 * 50
    assert product.moved == 4 * (30 * 50 + 50 * 70 + 30 * 70)


# As XLA writes it; a frame's parent is the number of the frame above, plus one.
PROGRAM = """HloModule jit_block_of, is_scheduled=true

FileNames
1 "fedjax_dp/engine/round.py"
2 "fedjax_dp/models/lowering/pooling.py"
3 "jax/numpy/reductions.py"

FunctionNames
1 "run"

FileLocations
1 {file_name_id=1 function_name_id=1 line=5 end_line=5 column=2 end_column=7}
2 {file_name_id=2 function_name_id=1 line=9 end_line=9 column=2 end_column=7}
3 {file_name_id=3 function_name_id=1 line=9 end_line=9 column=2 end_column=7}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}

%fused (param_0: f32[8,4], param_1: pred[8,4]) -> f32[8,4] {
  %param_0 = f32[8,4]{1,0} parameter(0)
  %param_1 = pred[8,4]{1,0} parameter(1)
  %double.0 = f32[8,4]{1,0} add(%param_0, %param_0)
  ROOT %choice.0 = f32[8,4]{1,0} select(%param_1, %double.0, %param_0)
}

ENTRY %main (a: f32[8,4], b: pred[8,4]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = pred[8,4]{1,0} parameter(1)
  %pooled = f32[8,4]{1,0} fusion(%a, %b), kind=kLoop, calls=%fused, metadata={stack_frame_id=3}
  %while.1 = f32[8,4]{1,0} while(%pooled), body=%other, metadata={stack_frame_id=1}
  %part.1 = f32[2,4]{1,0} slice(%while.1), metadata={stack_frame_id=2}
  ROOT %sum.1 = f32[8,4]{1,0} add(%a, %while.1), metadata={stack_frame_id=1}
}
"""


def test_parts_are_those_of_the_sources_and_containers_do_not_count():
    found = roofline.Program(PROGRAM).operations()
    assert found.keys() == {"a", "b", "pooled", "while.1", "part.1", "sum.1"}
    seconds = {"pooled": (3, 0.5), "while.1": (1, 9.0), "sum.1": (1, 0.25), "another": (1, 9.0)}
    assert roofline.by_part(found, seconds) == {
        "pooling": {"calls": 3, "seconds": 0.5, "flops": 3 * 64, "bytes": 3 * (2 * 128 + 32)},
        "engine": {"calls": 1, "seconds": 0.25, "flops": 32, "bytes": 3 * 128},
    }
    assert found["part.1"].moved == 2 * 32


def test_the_table_states_the_share_of_each_part_and_its_bound():
    part = {"calls": 2.0, "seconds": 3.0, "flops": 6e9, "bytes": 1e9}
    row = {
        "seconds": 4.0, "traced_seconds": 5.0, "devices": 1, "gemm_gflops": 4.0,
        "memory_gb_per_second": 1.0, "cache_gb_per_second": 2.0,
        "parts": {"sums": part, "update": {**part, "seconds": 1.0}},
        "operations": [],
    }  # fmt: skip
    text = roofline.table({"W1": row})
    # 6 GFLOP at 4 GFLOP/s take 1.5 s, longer than 1 GB at 2 GB/s from caches.
    assert "| sums | 75.0% | 2 | 6.0 | 1.0 | 2 | 0 | 0.50 |" in text
    assert "| update | 25.0% | 2 | 6.0 | 1.0 | 6 | 1 | 1.50 |" in text
