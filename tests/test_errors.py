from __future__ import annotations

import pytest

from autoshard.errors import (
    AutoshardError,
    InfeasibleError,
    InputError,
    PlanMismatchError,
    UnknownNameError,
)


def test_an_error_says_problem_place_and_fix_in_this_order() -> None:
    error = AutoshardError("the mesh has no axis 'modell'", at="pin of 'w'", fix="say 'model'")
    assert str(error) == ("the mesh has no axis 'modell'\n  at:  pin of 'w'\n  fix: say 'model'")
    assert (error.problem, error.at, error.fix) == (
        "the mesh has no axis 'modell'",
        "pin of 'w'",
        "say 'model'",
    )


def test_an_error_without_a_place_has_no_place_line() -> None:
    assert str(AutoshardError("no mesh", fix="pass one")) == "no mesh\n  fix: pass one"


def test_an_error_needs_a_fix() -> None:
    with pytest.raises(TypeError, match="fix"):
        AutoshardError("no mesh")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (InputError, ValueError),
        (UnknownNameError, LookupError),
        (InfeasibleError, ValueError),
        (PlanMismatchError, ValueError),
    ],
)
def test_each_kind_is_caught_by_its_builtin_too(
    kind: type[AutoshardError], builtin: type[Exception]
) -> None:
    error = kind("p", at="a", fix="f")
    assert isinstance(error, builtin)
    assert isinstance(error, AutoshardError)
    assert str(error) == "p\n  at:  a\n  fix: f"
