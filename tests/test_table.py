from __future__ import annotations

import fractions
import sys

import pytest

from autoshard.errors import UnknownNameError
from autoshard.table import Table

TABLE: Table[object] = Table(
    "number", {"fraction": "fractions:Fraction", "absent": "no_such_module:x"}
)


def test_a_row_is_the_object_it_names() -> None:
    assert TABLE["fraction"] is fractions.Fraction


def test_a_row_is_loaded_on_first_use_only() -> None:
    assert list(TABLE) == ["fraction", "absent"]
    assert len(TABLE) == 2
    assert "absent" in TABLE
    assert "no_such_module" not in sys.modules
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        TABLE["absent"]


def test_a_misspelt_name_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(UnknownNameError) as caught:
        TABLE["fractoin"]
    assert str(caught.value) == (
        "no number is called 'fractoin'\n  fix: did you mean 'fraction'? known: fraction, absent"
    )


def test_a_name_like_no_other_is_answered_with_the_list() -> None:
    with pytest.raises(UnknownNameError) as caught:
        TABLE["qqq"]
    assert caught.value.fix == "known: fraction, absent"


def test_membership_asks_for_the_name_alone() -> None:
    assert "fraction" in TABLE
    assert "qqq" not in TABLE
