"""XLA:TPU's estimates of fusions, read off a program that was compiled to the end for v5e:2x2."""

from __future__ import annotations

import gzip
from pathlib import Path

from autoshard.cost_models.hlo_cycles import CYCLES_PER_S, xla_estimates

DATA = Path(__file__).parents[1] / "data" / "hlo"
TEXT = gzip.decompress((DATA / "tpu_v5e_full.txt.gz").read_bytes()).decode()


def test_each_instruction_with_an_estimate_is_told_with_its_line_the_longest_first() -> None:
    found = xla_estimates(TEXT)
    assert len(found) == TEXT.count('"estimated_cycles"') == 8
    cycles = [estimate.cycles for estimate in found]
    assert cycles == sorted(cycles, reverse=True)
    longest = found[0]
    assert (longest.opcode, longest.cycles, longest.trips) == ("fusion", 141232, 1)
    assert longest.source == "train.py:5"


def test_products_take_as_long_as_the_matrix_unit_needs_or_longer() -> None:
    products = [e for e in xla_estimates(TEXT) if e.cycles > 130000]
    # Four products of 8192 x 1024 x 4096 over four devices, at 197 TFLOP/s.
    ideal_s = 2 * 8192 * 1024 * 4096 / 4 / 197e12
    assert len(products) == 5
    for estimate in products[:4]:
        assert 1.0 <= estimate.cycles / CYCLES_PER_S["v5e"] / ideal_s < 1.25


def test_a_loop_counts_with_its_rounds() -> None:
    config = 'backend_config={"window_config":{"estimated_cycles":"100"}}'
    text = f"""HloModule m

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %x = f32[8] get-tuple-element(%p), index=1
  %y = f32[8] negate(%x), {config}
  ROOT %t = (s32[], f32[8]) tuple(%next, %y)
}}

%condition (q: (s32[], f32[8])) -> pred[] {{
  %q = (s32[], f32[8]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %seven = s32[] constant(7)
  ROOT %less = pred[] compare(%j, %seven), direction=LT
}}

ENTRY %main (a: f32[8]) -> (s32[], f32[8]) {{
  %a = f32[8] parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8]) tuple(%zero, %a)
  ROOT %loop = (s32[], f32[8]) while(%start), condition=%condition, body=%body
}}
"""
    (estimate,) = xla_estimates(text)
    assert (estimate.name, estimate.cycles, estimate.trips) == ("y", 100, 7)


def test_a_program_that_was_only_scheduled_has_none() -> None:
    assert xla_estimates((DATA / "tpu_step.txt").read_text("utf-8")) == ()
