"""The parser of compiled HLO text: what it keeps, what it survives."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cost_models.hlo import Shape, parse_module
from autoshard.cost_models.hlo_groups import permute_groups, replica_groups
from autoshard.errors import InputError

TEXTS = sorted((Path(__file__).parents[1] / "data" / "hlo").glob("*.txt"))

SMALL = """\
HloModule small, is_scheduled=true, replica_count=2, num_partitions=4

FileNames
1 "/home/me/model.py"
2 "/home/me/layers.py"

FunctionNames
1 "main"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=31 end_line=31 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


%fused (p: bf16[8,16]) -> f32[8,16] {
  %p = bf16[8,16]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  ROOT %c = f32[8,16]{1,0} convert(%p), metadata={op_name="jit(f)/a, b={" stack_frame_id=2}
}, execution_thread="host"

ENTRY %main (a: bf16[8,16], b: s4[3]) -> (f32[8,16], s4[3], token[]) {
  %a = bf16[8,16]{1,0:T(8,128)(2,1)S(1)} parameter(0), sharding={replicated}
  %b = s4[3]{0} parameter(1), metadata={op_name="b" source_file="/x/y.py" source_line=12}
  %k = pred[2,2]{1,0} constant({ { 1, 0 },
    { 0, 1 } })
  %f = f32[8,16]{1,0} fusion(bf16[8,16]{1,0} %a), kind=kLoop, calls=%fused, strange=[1, {2}]
  %t = token[] after-all()
  ROOT %r = (f32[8,16]{1,0}, s4[3]{0}, /*index=2*/token[]) tuple(%f, %b, /*index=2*/%t)
}
"""


def test_an_instruction_keeps_its_shape_operands_calls_and_attributes() -> None:
    fusion = parse_module(SMALL).entry.by_name["f"]
    assert fusion.shapes == (Shape("f32", (8, 16), "1,0"),)
    assert (fusion.opcode, fusion.operands, fusion.called) == ("fusion", ("a",), ("fused",))
    assert fusion.attributes == {"kind": "kLoop", "calls": "%fused", "strange": "[1, {2}]"}


def test_a_tuple_result_is_flattened_and_its_index_comments_dropped() -> None:
    root = parse_module(SMALL).entry.root
    assert [shape.dtype for shape in root.shapes] == ["f32", "s4", "token"]
    assert root.operands == ("f", "b", "t")
    assert root.nbytes == 8 * 16 * 4 + 2 + 0  # three packed 4-bit integers take two bytes


def test_a_layout_tells_the_memory_space() -> None:
    module = parse_module(SMALL)
    assert module.entry.by_name["a"].shapes[0].memory_space == 1
    assert module.entry.by_name["f"].shapes[0].memory_space == 0


def test_a_source_line_is_found_through_the_tables_or_in_the_metadata() -> None:
    module = parse_module(SMALL)
    assert module.computations["fused"].root.source == "layers.py:31"
    assert module.computations["fused"].root.op_name == "jit(f)/a, b={"
    assert module.entry.by_name["b"].source == "y.py:12"
    assert module.entry.by_name["a"].source == ""


def test_a_literal_printed_over_several_lines_is_one_instruction() -> None:
    constant = parse_module(SMALL).entry.by_name["k"]
    assert constant.literal.split() == ["{", "{", "1,", "0", "},", "{", "0,", "1", "}", "}"]
    assert constant.operands == ()


def test_the_head_line_tells_the_number_of_devices() -> None:
    module = parse_module(SMALL)
    assert (module.name, module.devices, module.attributes["is_scheduled"]) == ("small", 8, "true")


def test_names_may_stand_without_percent_signs() -> None:
    text = "HloModule bare\n\nENTRY main {\n  a = f32[2] parameter(0)\n  b = f32[3] parameter(1)\n"
    text += "  ROOT d = f32[2,3] dot(f32[2]{0} a, b), lhs_contracting_dims={}\n}\n"
    entry = parse_module(text).entry
    assert entry.root.operands == ("a", "b")
    assert [shape.dims for shape in entry.operand_shapes(entry.root)] == [(2,), (3,)]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_every_instruction_of_a_real_program_is_read_and_its_operands_known(path: Path) -> None:
    text = path.read_text()
    module = parse_module(text)
    assert module.entry.entry
    instructions = [i for c in module.computations.values() for i in c.instructions]
    assert len(instructions) == sum(" = " in line for line in text.splitlines())
    for computation in module.computations.values():
        for instruction in computation.instructions:
            assert set(instruction.operands) <= set(computation.by_name)
            assert set(instruction.called) <= set(module.computations)
            assert computation.root.root
    assert any(i.source.startswith("make.py:") for i in instructions)


@pytest.mark.parametrize("text", ["", "module @jit_f {}", "HloModule empty\n\n"])
def test_a_text_that_is_no_hlo_module_is_refused_with_a_way_out(text: str) -> None:
    with pytest.raises(InputError, match=r"compiled\.as_text\(\)"):
        parse_module(text)


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, len(SMALL)), junk=st.text('(){}[]"%=, \nab', max_size=20))
def test_a_broken_text_is_refused_or_read_in_part_but_never_hangs(cut: int, junk: str) -> None:
    broken = SMALL[:cut] + junk + SMALL[cut:]
    try:
        module = parse_module(broken)
    except InputError:
        return
    assert module.computations


def test_reading_time_grows_with_the_length_of_the_text_alone() -> None:
    text = next(path for path in TEXTS if path.stem == "cpu_scan_grad").read_text()
    head, mark, body = text.partition("\n%")
    seconds = []
    for copies in (4, 32):
        long = head + mark + mark.join(body.replace("ENTRY ", "") for _ in range(copies))
        start = time.process_time()
        parse_module(long)
        seconds.append(time.process_time() - start)
    assert seconds[1] < 8 * 4 * seconds[0]  # 8 times the text; a quadratic reader takes 64 times


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("[4,2]<=[2,2,2]T(1,2,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=4,'b'=2] {'b'}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=4,'b'=2] {'a'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=4,'b'=2] {'b','a'}", ((0, 2, 4, 6, 1, 3, 5, 7),)),
        ("mesh['a'=4,'b'=2] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=4,'b'=2] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['x'=2,'y'=2], device_ids=(0,2,1,3) {'x'}", ((0, 1), (2, 3))),
        ("mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'x'}", ((0, 1), (2, 3), (4, 5), (6, 7))),
    ],
)
def test_every_notation_of_groups_names_the_same_devices_as_written_out(
    text: str, groups: tuple[tuple[int, ...], ...]
) -> None:
    assert replica_groups(text, 8) == groups


def test_the_device_order_of_a_mesh_stays_with_its_groups() -> None:
    text = SMALL.replace(
        "strange=[1, {2}]", "replica_groups=mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'x'}, z=1"
    )
    attributes = parse_module(text).entry.by_name["f"].attributes
    assert replica_groups(attributes["replica_groups"], 4) == ((0, 1), (2, 3))
    assert attributes["z"] == "1"


def test_a_permute_groups_the_devices_that_it_connects() -> None:
    shift = ",".join(f"{{{i},{(i + 2) % 8}}}" for i in range(8))
    assert permute_groups(f"{{{shift}}}") == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert permute_groups("{{0,1},{1,2},{5,5}}") == ((0, 1, 2), (5,))
