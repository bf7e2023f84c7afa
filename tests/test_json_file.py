"""Files from outside: whatever is in them, the answer is a problem or an error with a way out."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoshard.errors import InputError
from autoshard.json_file import read_json
from autoshard.problem import Problem, load_problem, validate_problem

EXAMPLE = Path(__file__).parent / "data" / "iopddl" / "example.json"


def refused(path: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        load_problem(path)
    assert str(path) in caught.value.at
    assert caught.value.fix
    assert len(str(caught.value)) < 600
    return caught.value


@pytest.mark.parametrize("kept", [1, 10, 100, 200])
def test_a_gzip_file_that_is_cut_off_is_refused(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "p.json.gz"
    path.write_bytes(gzip.compress(EXAMPLE.read_bytes())[:kept])
    refused(path)


def test_a_gzip_file_with_a_flipped_byte_is_refused(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(EXAMPLE.read_bytes()))
    packed[40] ^= 0xFF
    (tmp_path / "p.json.gz").write_bytes(packed)
    refused(tmp_path / "p.json.gz")


def test_a_gzip_file_is_known_without_its_suffix(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_bytes(gzip.compress(EXAMPLE.read_bytes()))
    assert len(load_problem(tmp_path / "p.json").costs) == 5


def test_what_unpacks_to_too_much_is_refused_before_it_is_held(tmp_path: Path) -> None:
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b" " * 5_000_000))
    with pytest.raises(InputError, match="more than 1,000,000 bytes"):
        read_json(path, fix="mend it", most_bytes=1_000_000)
    with pytest.raises(InputError, match="no JSON"):
        read_json(path, fix="mend it", most_bytes=5_000_000)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 200_000,
        b'{"problem":' * 100_000,
        b"\xff\xfe\x00",
        b'{"problem": NaN}',
        b'{"problem": -Infinity}',
        b"1" * 5000,
        b'{"problem": {"nodes": 1, "nodes": 2}}',
    ],
)
def test_what_json_cannot_be_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "p.json").write_bytes(text)
    refused(tmp_path / "p.json")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    refused(tmp_path)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found = [path]
    for key, part in inner:
        found += places(part, (*path, key)) if isinstance(part, dict | list) else [(*path, key)]
    return found


PLACES = places(json.loads(EXAMPLE.read_text()))
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.text(max_size=3),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-(2**70), 2**70),
    st.sampled_from([-1, 10**18, -(10**18), 2**62, 2**63, -(2**63), 10**400]),
    st.lists(st.integers(-3, 3), max_size=3),
    st.just([[[]]]),
    st.just({}),
)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(place=st.sampled_from(PLACES[1:]), value=VALUES, drop=st.booleans())
def test_any_value_anywhere_gives_a_problem_or_an_error_that_says_where(
    place: tuple[Any, ...], value: Any, drop: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = copy.deepcopy(json.loads(EXAMPLE.read_text()))
    part = data
    for key in place[:-1]:
        part = part[key]
    if drop:
        del part[place[-1]]
    else:
        part[place[-1]] = value
    path = tmp_path_factory.mktemp("fuzz") / "p.json"
    path.write_text(json.dumps(data))
    found: Problem | InputError
    try:
        found = load_problem(path)
    except InputError as error:
        found = error
    if isinstance(found, InputError):
        assert str(path) in found.at
        assert found.fix
        assert len(str(found)) < 600
    else:
        validate_problem(found)


@pytest.mark.parametrize(
    ("place", "value", "complaint"),
    [
        (("nodes", "costs", 1), [1.5, 2], r"problem.nodes.costs\[1\]: .* found 1.5"),
        (("nodes", "costs", 1), [True, 2], r"found true"),
        (("nodes", "usages", 2), "x", r"problem.nodes.usages\[2\]: .* found \"x\""),
        (("nodes", "usages", 2), [10**30, 0, 0], r"does not fit 64 bits"),
        (("nodes", "intervals", 0), [1], r"problem.nodes.intervals\[0\] is a list of 1"),
        (("edges", "nodes", 3), [0, -1], r"edge \(0, -1\)"),
        (("edges", "costs", 3), [1], r"problem.edges.costs\[3\] has 1 entries for"),
        (("usage_limit",), "50", r"problem.usage_limit: .* found \"50\""),
        (("nodes", "names"), [1], r"not a list of names"),
    ],
)
def test_the_place_is_named(
    tmp_path: Path, place: tuple[Any, ...], value: Any, complaint: str
) -> None:
    data = json.loads(EXAMPLE.read_text())
    part = data["problem"]
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    (tmp_path / "p.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match=complaint):
        load_problem(tmp_path / "p.json")
