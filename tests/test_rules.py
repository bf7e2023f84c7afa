"""Rules that the caller gives: how they are read, and that they change what runs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard import InputError, UnknownOpWarning, autoshard, register_rule
from autoshard.cost_models.attention import flash_attention_flops
from autoshard.cost_models.topology import Topology
from autoshard.rules import fitted, parse
from tests.lowering import mesh_of


@pytest.fixture(scope="module", autouse=True)
def lapack() -> None:
    """JAX loads its LAPACK kernels when it first lowers one of its own calls to them."""
    jnp.linalg.cholesky(jnp.eye(2))


def factor(matrices: Any, *, target: str = "lapack_spotrf_ffi") -> Any:
    """Cholesky factors by a call of which nobody knows how it may be split."""
    layout = (*range(matrices.ndim - 2), matrices.ndim - 1, matrices.ndim - 2)
    made = jax.ffi.ffi_call(
        target,
        (
            jax.ShapeDtypeStruct(matrices.shape, matrices.dtype),
            jax.ShapeDtypeStruct(matrices.shape[:-2], np.int32),
        ),
        input_layouts=[layout],
        output_layouts=[layout, tuple(range(matrices.ndim - 2))],
        input_output_aliases={0: 0},
        vmap_method="expand_dims",
    )(matrices, uplo=np.uint8(ord("L")))
    return jnp.tril(made[0])


def solve(a: Any, w: Any) -> Any:
    return factor(a @ a.swapaxes(1, 2) + 16 * jnp.eye(8)) @ w


def inputs() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    a, w = rng.normal(size=(16, 8, 8)), rng.normal(size=(8, 8))
    return a.astype(np.float32), w.astype(np.float32)


def called(fn: Callable[..., Any], *args: Any, target: str) -> list[str]:
    """Types of what a compiled program gets from a custom call, on one device."""
    text = autoshard(fn, mesh_of(4, 2)).compile(*args).as_text()
    return re.findall(rf"= (\S+?)(?:\{{\S*\}})?,? .*custom-call\(.*\"{target}\"", text)


class TestReading:
    def test_a_dimension_in_an_operand_and_every_result_may_be_split(self) -> None:
        rule = fitted(parse("b i, i -> b j, b"), [(8, 4), (4,)], [(8, 2), (8,)])
        assert rule.sizes == (8, 4, 2)
        assert rule.kinds == ("pass", "replicated", "replicated")
        assert rule.operands == (((0,), (1,)), ((1,),))
        assert rule.results == (((0,), (2,)), ((0,),))

    def test_what_only_some_results_have_stays_whole(self) -> None:
        assert fitted(parse("b i -> b i, b"), [(8, 4)], [(8, 4), (8,)]).kinds == (
            "pass",
            "replicated",
        )

    def test_clauses_say_what_is_summed_and_what_stays_whole(self) -> None:
        rule = fitted(parse("i j, j k -> i k; sum j; whole i"), [(2, 3), (3, 4)], [(2, 4)])
        assert rule.kinds == ("replicated", "reduction", "pass")

    def test_leading_dimensions_may_be_any(self) -> None:
        rule = fitted(parse("... n -> ... k"), [(2, 3, 4)], [(2, 3, 1)])
        assert rule.kinds == ("pass", "pass", "replicated", "replicated")
        assert fitted(parse("... n -> ... n"), [(4,)], [(4,)]).kinds == ("pass",)

    def test_scalars_and_missing_sides_are_written_as_nothing(self) -> None:
        assert fitted(parse("i, -> i"), [(4,), ()], [(4,)]).operands == (((0,),), ())
        assert fitted(parse("-> i"), [], [(4,)]).kinds == ("replicated",)
        assert fitted(parse("i ->"), [(4,)], []).results == ()

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("i j", "one '->'"),
            ("i -> j -> k", "one '->'"),
            ("i 2 -> i", "'2' is no name"),
            ("i i -> i", "'i' names two dimensions"),
            ("i ... -> i", "'...' must come first"),
            ("i j -> i; sum", "'sum' is neither"),
            ("i j -> i; keep j", "'keep j' is neither"),
            ("i j -> i; sum k", "'k' names no dimension"),
            ("i j -> i j; sum j", "'j' is summed, yet a result has it"),
        ],
    )
    def test_what_cannot_be_read_is_refused_with_the_reason(self, text: str, why: str) -> None:
        with pytest.raises(InputError, match=re.escape(why)):
            register_rule("never_called", text)

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("i j, k -> i", "2 operands, the op 1"),
            ("i j -> i, j", "2 results, the op 1"),
            ("i -> i", "operand 0 has 2 dimensions"),
            ("i j k -> i", "operand 0 has 2 dimensions"),
            ("i j -> j", "'j' is 4 here and 8 there"),
        ],
    )
    def test_what_does_not_fit_is_refused_with_the_reason(self, text: str, why: str) -> None:
        with pytest.raises(InputError, match=re.escape(why)):
            fitted(parse(text), [(8, 4)], [(8,)])

    @pytest.mark.parametrize(
        ("target", "rule", "why"),
        [
            ("", "i -> i", "no name of an op"),
            ("stablehlo.while", "i -> i", "cannot have a rule"),
            ("sdy.manual_computation", "i -> i", "cannot have a rule"),
            ("xla_ffi_python_cpu_callback", "i -> i", "calls back into Python"),
            ("my_kernel", 3, "is a int"),
        ],
    )
    def test_what_cannot_have_a_rule_is_refused(self, target: str, rule: Any, why: str) -> None:
        with pytest.raises(InputError, match=why):
            register_rule(target, rule)


class TestRegistering:
    def test_the_same_rule_twice_is_once(self) -> None:
        with register_rule("my_kernel", "i -> i") as first:
            assert register_rule("my_kernel", "i -> i") is first

    def test_a_later_rule_takes_the_place_of_an_earlier_one_until_it_is_removed(self) -> None:
        a, w = inputs()
        with register_rule("lapack_spotrf_ffi", "b i j -> b x y, b; whole b"):
            with register_rule("lapack_spotrf_ffi", "b i j -> b x y, b"):
                assert called(solve, a, w, target="lapack_spotrf_ffi") == ["(f32[2,8,8]"]
            assert called(solve, a, w, target="lapack_spotrf_ffi") == ["(f32[16,8,8]"]

    def test_an_earlier_rule_that_was_removed_does_not_come_back(self) -> None:
        a, w = inputs()
        first = register_rule("lapack_spotrf_ffi", "b i j -> b x y, b")
        with register_rule("lapack_spotrf_ffi", "b i j -> b x y, b; whole b"):
            first.remove()
            assert called(solve, a, w, target="lapack_spotrf_ffi") == ["(f32[16,8,8]"]
        with pytest.warns(UnknownOpWarning):
            assert called(solve, a, w, target="lapack_spotrf_ffi") == ["(f32[16,8,8]"]


class TestStatedWork:
    def planned(self, flops: Any) -> Any:
        def attend(q: Any, k: Any) -> Any:
            return jax.ffi.ffi_call("my_flash", jax.ShapeDtypeStruct(q.shape, q.dtype))(q, k)

        mesh = Topology("v5e:2x2").mesh({"data": 4})
        shapes = [jax.ShapeDtypeStruct((8, 4096, 128), "bfloat16")] * 2
        with register_rule("my_flash", "b q d, b k d -> b q d; whole q k d", flops=flops):
            return autoshard(attend, mesh).plan(*shapes)

    def test_devices_share_the_work_that_is_stated_of_a_call(self) -> None:
        def flops(operands: Any, results: Any) -> float:
            batch, queries, width = operands[0]
            return flash_attention_flops(batch, 1, queries, queries, width)

        stated = flash_attention_flops(8, 1, 4096, 4096, 128)
        longer = self.planned(flops).predicted.compute_s
        assert longer == pytest.approx(stated / 4 / (197e12 * 0.97), rel=0.1)
        assert self.planned(None).predicted.compute_s < longer / 2

    @pytest.mark.parametrize(
        ("flops", "why"),
        [
            (lambda operands, results: "many", "returned 'many'"),
            (lambda operands, results: -1.0, "returned -1.0"),
            (lambda operands, results: 1 / 0, "raised ZeroDivisionError"),
            (7, "is a int"),
        ],
    )
    def test_work_that_is_no_number_is_refused(self, flops: Any, why: str) -> None:
        with pytest.raises(InputError, match=why):
            self.planned(flops)


class TestAnUnknownCall:
    def test_it_runs_whole_with_one_warning_that_names_line_and_price(self) -> None:
        def twice(a: Any, w: Any) -> Any:
            return solve(a, w) + solve(a * 2, w)

        with pytest.warns(UnknownOpWarning) as caught:
            report = autoshard(twice, mesh_of(4, 2)).validate(*inputs(), repeats=1)
        assert len(caught) == 1
        text = str(caught[0].message)
        assert "lapack_spotrf_ffi runs whole on every device" in text
        assert re.search(r"at:  test_rules\.py:\d+", text)
        assert re.search(r"costs in a call: \S+ \w?s on each device, \S+ KiB of memory", text)
        assert 'autoshard.register_rule("lapack_spotrf_ffi", "b d0 d1 -> b d2 d3, b")' in text
        assert report.max_relative_error is not None
        assert report.max_relative_error < 1e-5

    def test_the_warning_is_given_for_the_line_of_the_user(self) -> None:
        with pytest.warns(UnknownOpWarning) as caught:
            autoshard(solve, mesh_of(4, 2)).plan(*inputs())
        assert caught[0].filename == __file__

    def test_a_rule_splits_it_and_silences_the_warning(self) -> None:
        with register_rule("lapack_spotrf_ffi", "b i j -> b x y, b"):
            report = autoshard(solve, mesh_of(4, 2)).validate(*inputs(), repeats=1)
            assert called(solve, *inputs(), target="lapack_spotrf_ffi") == ["(f32[2,8,8]"]
        assert report.max_relative_error is not None
        assert report.max_relative_error < 1e-5
        assert report.unnamed_collectives == report.absent_collectives == ()
        assert report.predicted.flops == report.compiled.flops

    def test_a_rule_may_be_a_function_of_the_shapes(self) -> None:
        seen = []

        def rule(operands: tuple[tuple[int, ...], ...], results: Any) -> str | None:
            seen.append((operands, results))
            return "b i j -> b x y, b" if operands[0][0] > 4 else None

        a, w = inputs()
        with register_rule("lapack_spotrf_ffi", rule):
            assert called(solve, a, w, target="lapack_spotrf_ffi") == ["(f32[2,8,8]"]
            with pytest.warns(UnknownOpWarning):
                assert called(solve, a[:4], w, target="lapack_spotrf_ffi") == ["(f32[4,8,8]"]
        assert seen[0] == (((16, 8, 8),), ((16, 8, 8), (16,)))

    def test_a_function_that_returns_no_text_is_refused(self) -> None:
        with (
            register_rule("lapack_spotrf_ffi", cast(Any, lambda operands, results: 3)),
            pytest.raises(InputError, match="returned a int"),
        ):
            autoshard(solve, mesh_of(4, 2)).plan(*inputs())

    def test_a_rule_that_does_not_fit_names_the_line(self) -> None:
        with (
            register_rule("lapack_spotrf_ffi", "b i -> b i, b"),
            pytest.raises(InputError, match=r"operand 0 has 3 dim(.|\n)*at:  .*test_rules\.py:\d+"),
        ):
            autoshard(solve, mesh_of(4, 2)).plan(*inputs())

    def test_it_is_split_inside_a_loop_too(self) -> None:
        def loop(a: Any, w: Any) -> Any:
            return lax.scan(lambda c, _: (solve(c, w) / 8, c[0, 0]), a, None, length=3)

        with register_rule("lapack_spotrf_ffi", "b i j -> b x y, b"):
            report = autoshard(loop, mesh_of(4, 2)).validate(*inputs(), repeats=1)
        assert report.max_relative_error is not None
        assert report.max_relative_error < 1e-4
        assert report.unnamed_collectives == ()


class TestAnOpOfStableHLO:
    def test_partial_sums_are_added_up_where_the_rule_says_so(self) -> None:
        rng = np.random.default_rng(0)
        x, w = rng.normal(size=(4, 64)), rng.normal(size=(64, 4))
        pins = {"x": jax.sharding.PartitionSpec(None, ("a", "b"))}

        def product(x: Any, w: Any) -> Any:
            return lax.dot(x, w)

        with register_rule("stablehlo.dot_general", "i j, j k -> i k; sum j"):
            step = autoshard(product, mesh_of(4, 2), in_shardings=pins)
            text = step.lower(x.astype(np.float32), w.astype(np.float32)).as_text()
            report = step.validate(x.astype(np.float32), w.astype(np.float32), repeats=1)
        assert "sdy.manual_computation" in text
        assert report.max_relative_error is not None
        assert report.max_relative_error < 1e-5
        assert report.predicted.flops == report.compiled.flops
        assert report.predicted.collective_bytes == report.compiled.collective_bytes
        assert report.predicted.collective_bytes
        assert report.unnamed_collectives == ()

    def test_attributes_that_name_a_split_dimension_are_refused(self) -> None:
        x = np.ones((16, 32), np.float32)
        pins = {"x": jax.sharding.PartitionSpec("a")}
        with (
            register_rule("stablehlo.slice", "i j -> i k"),
            pytest.raises(InputError, match="cannot run on pieces"),
        ):
            autoshard(lambda x: x[:, 4:8] * 2, mesh_of(4, 2), in_shardings=pins).compile(x)

    def test_a_plan_made_under_a_rule_is_refused_without_it(self) -> None:
        x = np.ones((16, 32), np.float32)
        with register_rule("stablehlo.tanh", "i j -> i j"):
            plan = autoshard(jnp.tanh, mesh_of(4, 2)).plan(x)
        with pytest.raises(ValueError, match="piecewise"), warnings.catch_warnings():
            autoshard(jnp.tanh, mesh_of(4, 2), plan=plan).plan(x)
