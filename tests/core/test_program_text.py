"""What a program does, counted from a text that is small enough to count by hand."""

import math

import pytest

from fedjax_dp.core import program_text
from fedjax_dp.core.targets import KINDS

# One call: a copy; a loop of rounds of unknown length; in each round an exchange, and a loop of
# chunks, of unknown length too, that multiplies matrices, calls a library, and passes four times
# through a loop whose length is known; and a loop of local steps.
TEXT = """\
HloModule jit_block_of

%fused (p0: f32[100,8], p1: s32[]) -> f32[2,8] {
  %p0 = f32[100,8]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %part = f32[2,8]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={2,8}
}

%random (r: (s32[], f32[8])) -> (s32[], f32[8]) {
  %r = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%r), index=0
  %x = f32[8]{0} get-tuple-element(%r), index=1
  %y = f32[8]{0} negate(%x), metadata={op_name="jit(block)/while/body/round/while/body/chunk/neg"}
  ROOT %t = (s32[], f32[8]) tuple(%i, %y)
}

%steps (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s = (s32[], f32[8]) parameter(0)
  %si = s32[] get-tuple-element(%s), index=0
  %sx = f32[8]{0} get-tuple-element(%s), index=1
  %copied = f32[8]{0} copy(%sx), backend_config={"estimated_cycles":"0"}
  %again = f32[8]{0} copy(%copied), backend_config={"estimated_cycles":"0"}
  %sy = f32[8]{0} add(%sx, %sx), metadata={op_name="jit(block)/round/chunk/vmap(local_step)/add"}, backend_config={"estimated_cycles":"3000"}
  ROOT %st = (s32[], f32[8]) tuple(%si, %sy)
}

%chunks (c: (s32[], f32[8])) -> (s32[], f32[8]) {
  %c = (s32[], f32[8]) parameter(0)
  %ci = s32[] get-tuple-element(%c), index=0
  %cx = f32[8]{0} get-tuple-element(%c), index=1
  %all = f32[100,8]{1,0} broadcast(%cx), dimensions={1}, metadata={op_name="jit(block)/while/body/round/while/body/chunk/b"}
  %two = f32[2,8]{1,0} fusion(%all, %ci), kind=kLoop, calls=%fused, metadata={op_name="jit(block)/while/body/round/while/body/chunk/slice"}
  %dot = f32[2,100]{1,0} dot(%two, %all), lhs_contracting_dims={1}, rhs_contracting_dims={1}, metadata={op_name="jit(block)/while/body/round/while/body/chunk/dot"}
  %threefry = (s32[], f32[8]) while(%c), condition=%cond, body=%random, backend_config={"known_trip_count":{"n":"4"}}
  %trained = (s32[], f32[8]) while(%threefry), condition=%cond, body=%steps, metadata={op_name="jit(block)/while/body/round/while/body/chunk/vmap()/while"}
  %out = f32[8]{0} get-tuple-element(%trained), index=1
  ROOT %ct = (s32[], f32[8]) tuple(%ci, %out)
}

%rounds (q: (s32[], f32[8])) -> (s32[], f32[8]) {
  %q = (s32[], f32[8]) parameter(0)
  %qi = s32[] get-tuple-element(%q), index=0
  %qx = f32[8]{0} get-tuple-element(%q), index=1
  %sum = f32[8]{0} all-reduce(%qx), to_apply=%add, metadata={op_name="jit(block)/while/body/round/psum"}
  %qt = (s32[], f32[8]) tuple(%qi, %sum)
  ROOT %loop = (s32[], f32[8]) while(%qt), condition=%cond, body=%chunks
}

ENTRY %main (a: f32[8], n: s32[]) -> (s32[], f32[8]) {
  %a = f32[8]{0} parameter(0)
  %n = s32[] parameter(1)
  %b = f32[8]{0} copy(%a), backend_config={"estimated_cycles":"1500"}
  %start = (s32[], f32[8]) tuple(%n, %b)
  ROOT %all_rounds = (s32[], f32[8]) while(%start), condition=%cond, body=%rounds
}
"""  # noqa: E501
V5E, H100 = KINDS["v5e"], KINDS["h100"]


def test_loops_are_counted_by_what_they_run():
    found = program_text.by_loop(program_text.operations(TEXT, V5E), V5E)
    assert {scope: cost.operations for scope, cost in found.items()} == {
        "call": 1,
        "round": 1,
        # A broadcast, a slice, a product, and four passes of one operation.
        "round/chunk": 3 + 4,
        # With two copies, of which nothing says where they are from.
        "round/chunk/local_step": 3,
    }
    assert found["round/chunk"].products == 2 * 2 * 100 * 8
    # Of what it slices the fusion reads two rows, and the index; others read and write all.
    sizes = {"broadcast": 8 + 800, "slice": 16 + 16 + 1, "dot": 16 + 800 + 200, "loop": 4 * 16}
    assert found["round/chunk"].bytes == 4 * sum(sizes.values())
    assert found["call"].estimate == pytest.approx(1500 / 1.5e9)
    assert found["round/chunk/local_step"].estimate == pytest.approx(3000 / 1.5e9)


def test_a_round_is_the_sum_of_its_passes():
    ran = program_text.operations(TEXT, V5E)
    times = program_text.passes(ran, chunks=5, steps=4)
    assert times == {"round": 1, "round/chunk": 5, "round/chunk/local_step": 20}
    whole = program_text.total(program_text.by_loop(ran, V5E), times)
    assert whole.operations == 1 + 5 * 7 + 20 * 3
    assert whole.estimate == pytest.approx(20 * 3000 / 1.5e9)


def test_a_first_chunk_in_front_of_its_loop_is_one_pass_of_it():
    first = "  %first = (s32[], f32[8]) while(%q), condition=%cond, body=%steps, "
    first += 'metadata={op_name="jit(block)/while/body/round/while/body/chunk/vmap()/while"}\n'
    ran = program_text.operations(TEXT.replace("  %qt = ", first + "  %qt = "), V5E)
    times = program_text.passes(ran, chunks=5, steps=4)
    assert times["round/local_step"] == 4 and times["round/chunk/local_step"] == 16
    assert program_text.passes(ran, chunks=1, steps=4)["round/chunk"] == 0


def test_loops_of_one_scope_share_its_passes():
    source = 'metadata={op_name="jit(block)/while/body/round/while/body/chunk/vmap()/while"}\n'
    trained = "  %trained = (s32[], f32[8]) while("
    once = TEXT.index(trained)
    again = f"  %other = (s32[], f32[8]) while(%c), condition=%cond, body=%steps, {source}"
    ran = program_text.operations(TEXT[:once] + again + TEXT[once:], V5E)
    cost = program_text.by_loop(ran, V5E)["round/chunk/local_step"]
    # One pass of a mean loop, of which a client with four steps in all takes four.
    assert cost.operations == 3
    assert program_text.passes(ran, chunks=1, steps=4)["round/chunk/local_step"] == 4


def test_a_loop_in_one_that_is_no_scope_runs_as_often():
    body = TEXT.index("ENTRY %main")
    around = """\
%around (v: (s32[], f32[8])) -> (s32[], f32[8]) {
  %v = (s32[], f32[8]) parameter(0)
  ROOT %w = (s32[], f32[8]) while(%v), condition=%cond, body=%rounds
}

"""
    text = (
        TEXT[:body]
        + around
        + TEXT[body:].replace(
            "body=%rounds", 'body=%around, backend_config={"known_trip_count":{"n":"3"}}'
        )
    )
    found = program_text.by_loop(program_text.operations(text, V5E), V5E)
    assert found["round"].operations == 3 and found["round/chunk"].operations == 3 * 7


def test_what_devices_exchange_is_counted_by_kind():
    assert program_text.collectives(program_text.operations(TEXT, V5E)) == {
        "round": {"all-reduce": 32.0}
    }


def test_what_has_no_estimate_takes_what_its_bytes_or_products_take_on_a_gpu():
    dot = next(x for x in program_text.operations(TEXT, H100) if x.kind == "dot")
    bytes_at_peak = 4 * (16 + 800 + 200) / H100.bandwidth
    assert not dot.is_estimated and dot.seconds == pytest.approx(bytes_at_peak)
    micro = TEXT.replace("lhs_contracting", 'backend_config={"exec_time_us":7.5}, lhs_contracting')
    dot = next(x for x in program_text.operations(micro, H100) if x.kind == "dot")
    assert dot.is_estimated and dot.seconds == pytest.approx(7.5e-6)


@pytest.mark.parametrize(
    ("line", "multiplications"),
    [
        # 10 images of 8 x 8, 3 x 3 kernels of 4 channels to 6.
        (
            "f32[10,8,8,6]{3,2,1,0} convolution(%x, %w), window={size=3x3 pad=1_1x1_1}, "
            "dim_labels=b01f_01io->b01f",
            10 * 64 * 6 * 9 * 4,
        ),
        # A batch of 5 products [2, 3] x [3, 7], as a TPU's compiler writes it.
        (
            "f32[5,2,7]{2,1,0} convolution(%y, %v), window={size=5 stride=4 lhs_dilate=5}, "
            "dim_labels=0bf_0io->0bf",
            5 * 2 * 3 * 7,
        ),
    ],
)
def test_convolutions_count_their_multiplications(line, multiplications):
    text = f"""
ENTRY %main (x: f32[10,8,8,4], w: f32[3,3,4,6], y: f32[5,2,3], v: f32[5,3,7]) -> f32[] {{
  %x = f32[10,8,8,4]{{3,2,1,0}} parameter(0)
  %w = f32[3,3,4,6]{{3,2,1,0}} parameter(1)
  %y = f32[5,2,3]{{2,1,0}} parameter(2)
  %v = f32[5,3,7]{{2,1,0}} parameter(3)
  ROOT %out = {line}
}}
"""
    (one,) = program_text.operations(text, V5E)
    assert one.products == 2 * multiplications


# As libtpu writes it: the configuration of a kernel that is fused takes several lines.
KERNEL = """
%fused (x: f32[4,4], w: f32[4,4]) -> f32[4,4] {
  %x = f32[4,4]{1,0} parameter(0)
  %w = f32[4,4]{1,0} parameter(1)
  %y = f32[4,4]{1,0} negate(%x)
  ROOT %kernel = f32[4,4]{1,0} custom-call(%y, %w), backend_config={"cost_estimate": {
"bytes_accessed":8190000,
"flops":197000,
"transcendentals":0
}, "serialization_format": 1}
}

ENTRY %main (x: f32[4,4], w: f32[4,4]) -> f32[4,4] {
  %x = f32[4,4]{1,0} parameter(0)
  %w = f32[4,4]{1,0} parameter(1)
  %fusion = f32[4,4]{1,0} fusion(%x, %w), kind=kCustom, calls=%fused
  ROOT %alone = f32[4,4]{1,0} custom-call(%fusion, %w), custom_call_target="tpu_custom_call", \
backend_config={"cost_estimate":{"flops":"197000000","transcendentals":"0","bytes_accessed":"500"}}
}
"""


def test_kernels_in_pallas_cost_what_they_state():
    fused, alone = program_text.operations(KERNEL, V5E)
    assert (fused.bytes, fused.products) == (8190000, 197000)
    assert (alone.bytes, alone.products) == (500, 197000000)
    # At 0.819 TB and 197e12 operations a second.
    assert fused.seconds == pytest.approx(1e-5) and alone.seconds == pytest.approx(1e-6)
    assert not fused.is_estimated and not alone.is_estimated


def test_sizes_of_types():
    assert program_text._size("(bf16[2,3]{1,0}, pred[5], f32[], u4[8], f8e4m3fn[3])") == math.fsum(
        (12, 5, 4, 4, 3)
    )
