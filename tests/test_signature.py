from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard import pins
from autoshard.errors import AutoshardError, InputError, UnknownNameError
from autoshard.signature import Convention, Leaf, Signature, call_key, split, ties

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def signature_of(
    fn: Callable[..., Any], *args: Any, options: dict[str, Any] | None = None, **kwargs: Any
) -> Signature:
    convention = Convention.of(fn, **(options or {}))
    return Signature.of(convention, split(convention, args, kwargs))


def key_of(*args: Any, **kwargs: Any) -> Any:
    def fn(*args: Any, **kwargs: Any) -> None: ...

    convention = Convention.of(fn)
    return call_key(convention, split(convention, args, kwargs))


@jax.tree_util.register_dataclass
@dataclass
class State:
    params: dict[str, Any]
    step: Any


def train(state: Any, batch: Any, lr: float = 0.1, *, mode: str = "a") -> Any:
    return state, batch, lr, mode


class TestNames:
    def test_a_leaf_has_its_keystr_path_and_a_name_for_people(self) -> None:
        state = State({"wq": jnp.ones((4, 2))}, 3)
        signature = signature_of(train, state, (jnp.ones(2), [None, 1.0]), lr=0.5)
        assert [(a.path, a.name) for a in signature.arguments] == [
            ("[0].params['wq']", "state.params['wq']"),
            ("[0].step", "state.step"),
            ("[1][0]", "batch[0]"),
            ("[1][1][1]", "batch[1][1]"),
            ("['lr']", "lr"),
        ]

    def test_positions_in_paths_count_static_arguments_too(self) -> None:
        signature = signature_of(train, "static", 1.0, options={"static_argnums": 0})
        assert [a.path for a in signature.arguments] == ["[1]"]
        assert signature.arguments[0].name == "batch"

    def test_variadic_arguments_are_named_by_their_place(self) -> None:
        def fn(x: Any, *rest: Any) -> None: ...

        names = [a.name for a in signature_of(fn, 1, 2, 3).arguments]
        assert names == ["x", "rest[0]", "rest[1]"]


class TestTypes:
    @pytest.mark.parametrize(
        "value",
        [
            1,
            0.5,
            True,
            2j,
            np.float64(2),
            np.int64(3),
            np.bool_(True),
            np.zeros(3),
            np.zeros((0, 8), np.float32),
            jnp.ones(2, jnp.bfloat16),
            jax.random.key(0),
            jax.random.split(jax.random.key(1), 4),
            jax.ShapeDtypeStruct((3,), jnp.float32),
        ],
    )
    def test_shape_and_type_are_what_jit_would_see(self, value: Any) -> None:
        (leaf,) = signature_of(lambda x: x, value).arguments
        (seen,) = jax.tree.leaves(jax.jit(lambda x: x).trace(value).in_avals)
        assert (leaf.shape, leaf.dtype, leaf.weak_type) == (seen.shape, seen.dtype, seen.weak_type)

    def test_keys_have_more_dimensions_in_a_module(self) -> None:
        (leaf,) = signature_of(lambda x: x, jax.random.split(jax.random.key(1), 4)).arguments
        assert (leaf.shape, leaf.module_rank) == ((4,), 2)

    def test_functions_inside_a_module_are_fixed_and_come_back(self) -> None:
        model = eqx.nn.MLP(2, 2, 4, 1, activation=jax.nn.silu, key=jax.random.key(0))
        signature = signature_of(train, model, None)
        assert jax.nn.silu in [value for _, value in signature.fixed]
        (back, batch), _ = signature.arguments_of([0] * len(signature.arguments))
        assert back.activation is model.activation
        assert batch is None

    def test_a_leaf_that_is_neither_array_nor_hashable_is_named(self) -> None:
        convention = Convention.of(train)
        call = split(convention, (1, {"names": [np.array(["a"], object)]}), {})
        with pytest.raises(InputError, match=r"batch\['names'\]\[0\].*not a valid JAX type"):
            call_key(convention, call)


class TestConvention:
    """jax.jit is the oracle: which arguments reach the trace, and which are donated."""

    @pytest.mark.parametrize(
        ("options", "args", "kwargs"),
        [
            ({"static_argnums": 0}, (1, 2), {}),
            ({"static_argnums": -1}, (1, 2, 3), {}),
            ({"static_argnums": (0, 2)}, (1, 2), {"lr": 3}),
            ({"static_argnames": "lr"}, (1, 2, 3), {}),
            ({"static_argnames": ("mode", "lr")}, (1, 2), {"lr": 3, "mode": "b"}),
            ({"static_argnums": (0,), "static_argnames": ("mode",)}, (1, 2), {"mode": "b"}),
            ({"donate_argnums": 0}, (1, 2), {}),
            ({"donate_argnums": -1}, (1, 2), {}),
            ({"donate_argnames": "batch"}, (1, 2), {}),
            ({"donate_argnames": "batch"}, (1,), {"batch": 2}),
            ({"donate_argnums": 1}, (1,), {"batch": 2}),
            ({"donate_argnums": (0,), "static_argnums": 1}, (1, 2, 3), {}),
            ({"donate_argnums": 2, "static_argnums": 0}, (1, 2, 3), {}),
        ],
    )
    def test_static_and_donated_arguments_are_those_of_jit(
        self, options: dict[str, Any], args: Any, kwargs: dict[str, Any]
    ) -> None:
        def fn(state: Any, batch: Any, lr: Any = 0.1, *, mode: str = "a") -> Any:
            del mode
            return [x for x in (state, batch, lr) if isinstance(x, jax.core.Tracer)]

        info = jax.tree.leaves(
            jax.jit(fn, **options).trace(*args, **kwargs).args_info,
            is_leaf=lambda x: hasattr(x, "donated"),
        )
        signature = signature_of(fn, *args, options=options, **kwargs)
        assert [a.donated for a in signature.arguments] == [i.donated for i in info]

    def test_the_whole_call_comes_back(self) -> None:
        signature = signature_of(
            train, "s", 2, 3, mode="m", options={"static_argnums": 0, "static_argnames": "mode"}
        )
        assert signature.arguments_of([20, 30]) == (("s", 20, 30), {"mode": "m"})

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"static_argnames": "mod"}, "static_argnames has 'mod'"),
            ({"donate_argnums": 7}, "donate_argnums has 7, but the function takes 3"),
            ({"donate_argnums": 0, "static_argnums": 0}, "both static and donated"),
        ],
    )
    def test_options_that_fit_no_parameter_are_refused(
        self, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(InputError, match=message):
            Convention.of(train, **options)

    def test_an_unhashable_static_argument_is_named(self) -> None:
        convention = Convention.of(train, static_argnames="mode")
        call = split(convention, (1, 2), {"mode": ["a"]})
        with pytest.raises(InputError, match="static argument mode is a list"):
            call_key(convention, call)


class TestKey:
    def test_equal_calls_have_equal_keys(self) -> None:
        assert key_of(jnp.ones((2, 3)), a=1.0) == key_of(np.zeros((2, 3), np.float32), a=2.0)

    @pytest.mark.parametrize(
        "other",
        [
            jnp.ones((3, 2)),
            jnp.ones((2, 3), jnp.bfloat16),
            [jnp.ones((2, 3))],
            jnp.broadcast_to(1.0, (2, 3)),  # weakly typed
            None,
        ],
    )
    def test_another_shape_type_or_tree_has_another_key(self, other: Any) -> None:
        assert key_of(jnp.ones((2, 3))) != key_of(other)

    def test_fixed_leaves_are_part_of_the_key(self) -> None:
        assert key_of({"act": jnp.tanh}) != key_of({"act": jnp.sin})

    def test_static_values_of_different_type_differ(self) -> None:
        convention = Convention.of(train, static_argnames="mode")
        keys = {
            call_key(convention, split(convention, (1, 2), {"mode": m})) for m in (1, True, 1.0)
        }
        assert len(keys) == 3

    def test_settings_of_jax_that_change_the_program_are_part_of_the_key(self) -> None:
        plain = key_of(jnp.ones(2))
        with jax.default_matmul_precision("highest"):
            assert key_of(jnp.ones(2)) != plain
        with jax.enable_x64(True):
            assert key_of(jnp.ones(2)) != plain


def leaf(path: str, shape: tuple[int, ...] = (4, 4), donated: bool = True) -> Leaf:
    return Leaf(path, path, shape, np.dtype(np.float32), donated=donated)


class TestTies:
    def test_a_state_is_paired_with_the_part_of_the_result_that_has_its_structure(self) -> None:
        arguments = [leaf("[0]['m']['w']"), leaf("[0]['p']['w']"), leaf("[1]", donated=False)]
        results = [leaf("[0]"), leaf("[1]['p']['w']"), leaf("[1]['m']['w']")]
        assert ties(arguments, results) == ((0, 2), (1, 1))

    def test_a_leaf_without_partner_takes_the_first_free_result_of_its_type(self) -> None:
        arguments = [leaf("[0]", (2,)), leaf("[1]")]
        results = [leaf("['a']"), leaf("['b']", (2,))]
        assert ties(arguments, results) == ((0, 1), (1, 0))

    def test_shapes_must_agree(self) -> None:
        assert ties([leaf("[0]['w']", (2, 3))], [leaf("[0]['w']", (3, 2))]) == ()

    @given(st.permutations(range(4)), st.integers(0, 4))
    @settings(max_examples=30, deadline=None)
    def test_no_result_replaces_two_arguments(self, order: list[int], missing: int) -> None:
        arguments = [leaf(f"[0][{i}]") for i in range(4)]
        results = [leaf(f"['s'][{i}]") for i in order[missing:]]
        found = ties(arguments, results)
        assert len({r for _, r in found}) == len(found) == len(results)


class TestPins:
    leaves = (leaf("[0]['w1']", (8, 4)), leaf("[0]['w2']", (4, 6)), leaf("[1]", (8,)))
    whole = ({"w1": 0, "w2": 1}, 2)

    def resolve(self, given: Any) -> Any:
        return pins.resolve(given, self.leaves, self.whole, MESH, "in_shardings")

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            (None, (None, None, None)),
            (P("model"), ((("model",), ()), (("model",), ()), (("model",),))),
            (({"w1": P("data"), "w2": None}, None), ((("data",), ()), None, None)),
            ((None, P(("data", "model"))), (None, None, (("data", "model"),))),
            ((P(None, "model"), None), (((), ("model",)), ((), ("model",)), None)),
            ({"[0]['w2']": P(None, "model")}, (None, ((), ("model",)), None)),
            ({"[0]": P("model"), "[0]['w1']": P()}, (((), ()), (("model",), ()), None)),
            ((NamedSharding(MESH, P("model")), None), ((("model",), ()), (("model",), ()), None)),
        ],
    )
    def test_pins_come_as_a_prefix_or_by_path(self, given: Any, expected: Any) -> None:
        assert self.resolve(given) == expected

    @pytest.mark.parametrize(
        ("given", "error", "message"),
        [
            ({"[0]['w3']": P()}, UnknownNameError, r"(?s)\[0\]\['w3'\], but.*did you mean.*w2"),
            ({"[1]": P("modl")}, UnknownNameError, r"(?s)'modl'.*did you mean 'model'"),
            ({"[0]['w2']": P(None, "data")}, InputError, "dimension 1 of .*size 6.* 4 ways"),
            ({"[1]": P("data", "model")}, InputError, "has 1 dimensions"),
            ({"[0]['w1']": P("data", "data")}, InputError, "split twice by mesh axis 'data'"),
            ({"[0]['w1']": P(P.UNCONSTRAINED)}, InputError, "unconstrained"),
            ({"[0]['w1']": "data"}, InputError, "pinned to a str"),
            (({"w1": P()}, None), InputError, "no prefix"),
            (
                {"[1]": NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))},
                InputError,
                "another mesh",
            ),
        ],
    )
    def test_a_pin_that_cannot_be_kept_names_its_array(
        self, given: Any, error: type[AutoshardError], message: str
    ) -> None:
        with pytest.raises(error, match=message) as caught:
            self.resolve(given)
        assert "in_shardings" in str(caught.value)
