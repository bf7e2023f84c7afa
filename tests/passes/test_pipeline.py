from __future__ import annotations

import contextlib
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.mlir import ir

from autoshard.errors import AutoshardError, InputError, UnknownNameError
from autoshard.passes.context import PassContext
from autoshard.passes.manager import run_pipeline
from autoshard.passes.option_values import Bytes
from autoshard.passes.pipeline import Pipeline
from autoshard.passes.registry import Pass, lookup, register_pass, registered


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@register_pass("test-options", summary="Has an option of every type")
@dataclass(frozen=True, slots=True)
class EveryOption:
    steps: int = 4
    rate: float = 0.5
    name: str = "x"
    fast: bool = False
    memory: Bytes | None = None
    mode: Literal["one", "two"] = "one"
    colour: Colour = Colour.RED
    words: tuple[str, ...] = ()
    nested: tuple[tuple[int, ...], ...] = ()

    def run(self, module: ir.Module, context: PassContext) -> None:
        context.publish("test-options", self.steps)


@register_pass("test-function", summary="Is a function", preserves=())
def function_pass(module: ir.Module, context: PassContext, *, steps: int) -> None:
    context.publish("test-function", steps)


texts = st.text(st.characters(codec="utf-8"), max_size=8)
options = st.fixed_dictionaries(
    {},
    optional={
        "steps": st.integers(-(2**40), 2**40),
        "rate": st.floats(allow_nan=False, allow_infinity=False),
        "name": texts,
        "fast": st.booleans(),
        "memory": st.none() | st.integers(1, 2**60),
        "mode": st.sampled_from(["one", "two"]),
        "colour": st.sampled_from(Colour),
        "words": st.lists(texts, max_size=3),
        "nested": st.lists(st.lists(st.integers(0, 9), max_size=2), max_size=2),
    },
)
passes = (
    st.builds(lambda given: lookup("test-options", **given), options)
    | st.builds(lambda steps: lookup("test-function", steps=steps), st.integers(0, 9))
    | st.sampled_from([lookup("flatten-calls"), lookup("mlir:cse")])
    | st.just(lookup("mlir:canonicalize", options="top-down=false max-iterations=2"))
)


@given(st.lists(passes, max_size=4))
def test_a_pipeline_is_read_back_from_its_text(made: list[Pass]) -> None:
    pipeline = Pipeline(tuple(made))
    assert Pipeline.parse(str(pipeline)) == pipeline


@given(st.text('ab-,{}[]="\\ :0.5', max_size=30) | texts)
def test_no_text_is_answered_by_a_traceback(text: str) -> None:
    with contextlib.suppress(AutoshardError):
        Pipeline.parse(text)


@pytest.mark.parametrize(
    ("text", "kind", "place", "says"),
    [
        ("flatten-calls,flaten-calls", UnknownNameError, 15, "did you mean flatten-calls"),
        ("test-options{stps=4}", UnknownNameError, 14, "did you mean steps"),
        ("test-options{steps=4.5}", InputError, 20, '"4.5" is no integer'),
        ("test-options{memory=14GuB}", InputError, 21, "is no bytes or none"),
        ("test-options{mode=three}", InputError, 19, "is no one | two"),
        ("test-options{colour=green}", InputError, 21, "is no red | blue"),
        ("test-options{fast=yes}", InputError, 19, "is no true | false"),
        ("test-options{words=[a,b}", InputError, 24, "a comma or ] expected"),
        ("test-options{steps=1,steps=2}", InputError, 22, "there twice"),
        ("test-options{steps=1", InputError, 21, "a comma or } expected"),
        ("test-function", InputError, 1, "needs the option steps"),
        ("mlir:nonsense", UnknownNameError, 1, "no pass called 'nonsense'"),
        ("mlir:canonicalize{no=1}", InputError, 1, "no such option no"),
        ("mlir:cse{a", InputError, 9, "the brace is not closed"),
        ("flatten-calls flatten-calls", InputError, 15, "a comma and the next pass expected"),
        (",", InputError, 1, "the name of a pass is expected"),
    ],
)
def test_an_error_names_the_place_in_the_text(
    text: str, kind: type[AutoshardError], place: int, says: str
) -> None:
    with pytest.raises(kind) as caught:
        Pipeline.parse(text)
    assert caught.value.at.startswith(f"character {place}: ")
    assert says in str(caught.value)


def test_bytes_may_be_given_as_text_or_number() -> None:
    made: Any = lookup("test-options", memory="14GiB")
    assert made == lookup("test-options", memory=14 * 2**30)
    assert made.memory == 14 * 2**30


def test_two_passes_of_one_name_are_refused() -> None:
    with pytest.raises(InputError, match="two passes are called test-options"):
        register_pass("test-options", summary="")(lambda module: None)


def test_an_option_that_no_text_can_give_is_refused() -> None:
    def takes(module: ir.Module, *, array: list[int]) -> None:
        raise AssertionError(array)

    with pytest.raises(InputError, match="option array"):
        register_pass("test-list", summary="")(takes)


def test_every_pass_says_what_it_does() -> None:
    for info in registered():
        assert info.summary
        assert info.to_json()["name"] == info.name


def test_passes_run_in_order_and_publish_results() -> None:
    lowered = jax.jit(lambda x: jax.jit(jnp.sin)(x) + 1.0).lower(jnp.ones(4))
    module = lowered.compiler_ir("stablehlo")
    assert module is not None
    context = run_pipeline(
        "flatten-calls,test-options,test-function{steps=3},mlir:loop-invariant-code-motion", module
    )
    assert context.result("test-options", int) == 4
    assert context.result("test-function", int) == 3
    assert context.result("test-function", str) is None
    assert "call" not in str(module)
    assert jnp.allclose(lowered.compile()(jnp.ones(4)), jnp.sin(1.0) + 1.0)
