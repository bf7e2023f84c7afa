"""Each workload is a program that runs, learns, and is what its description says."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
import pytest

from autoshard.errors import InputError, UnknownNameError
from autoshard.experiments.arrays import structs
from autoshard.experiments.timing import Stepper
from autoshard.experiments.workloads import WORKLOADS, Workload, make
from autoshard.experiments.workloads.attention import attend, rope
from autoshard.experiments.workloads.dlrm import click_logits, look_up
from autoshard.experiments.workloads.llama import forward
from autoshard.experiments.workloads.moe import MoeConfig, route
from autoshard.experiments.workloads.training import Adam, TrainState

Compile = Callable[[Any], Any]
TRAINED = (
    *("mlp", "llama", "llama_unrolled", "moe", "flax_transformer", "resnet", "conformer"),
    *("moe_ragged", "dlrm", "equinox_mixer", "haiku_lstm"),
)
PUBLISHED = (
    *(("llama", "8b"), ("llama", "70b"), ("moe", "8x7b"), ("llama_decode", "8b")),
    *(("moe_ragged", "8x7b"), ("llama_prefill", "8b"), ("dlrm", "criteo1t")),
    *(("equinox_mixer", "b16"), ("haiku_lstm", "zaremba-large")),
)
LIBRARIES = {
    "flax_transformer": "flax",
    "equinox_mixer": "equinox",
    "haiku_lstm": "haiku",
}


def lowered(workload: Workload) -> Any:
    return jax.jit(workload.fn, donate_argnums=workload.donate_argnums).lower(*workload.args)


def structure(tree: Any) -> Any:
    return jax.tree.structure(tree)


def signature(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


@pytest.mark.parametrize(
    ("name", "size"), [*((name, "tiny") for name in WORKLOADS), ("llama", "small")], ids=str
)
def test_init_makes_exactly_what_args_declare(name: str, size: str) -> None:
    workload = make(name, size)
    assert signature(workload.init(3)) == signature(workload.args)


@pytest.mark.parametrize("name", WORKLOADS)
def test_init_is_the_same_for_the_same_seed_only(name: str) -> None:
    workload = make(name)
    first, again, other = (jax.tree.leaves(workload.init(seed)) for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("name", "size"), [*((name, "tiny") for name in WORKLOADS), *PUBLISHED], ids=str
)
def test_the_function_returns_what_results_declare(name: str, size: str) -> None:
    workload = make(name, size)
    result = jax.eval_shape(workload.fn, *workload.args)
    declared = structs(workload.results)
    assert structure(result) == structure(declared)
    assert signature(result) == signature(declared)


@pytest.mark.parametrize("name", WORKLOADS)
def test_each_donated_argument_is_replaced_by_a_result_of_its_kind(name: str) -> None:
    workload = make(name)
    results = structs(workload.results)
    for number, result in zip(workload.donate_argnums, results, strict=False):
        assert signature(workload.args[number]) == signature(result)


@pytest.mark.parametrize("name", TRAINED)
def test_the_loss_falls_over_five_steps_and_every_weight_learns(
    name: str, quick_compile: Compile
) -> None:
    workload = make(name)
    begin = workload.init(0)
    step = Stepper(quick_compile(lowered(workload)), workload.init(0), workload.donate_argnums)
    results = [step() for _ in range(4)]
    losses = [float(loss) for _, loss in results]
    state, last = step()
    losses.append(float(last))
    assert all(after < before for before, after in itertools.pairwise(losses)), losses
    for path, leaf in jax.tree.leaves_with_path(state):
        assert np.all(np.isfinite(leaf)), jax.tree_util.keystr(path)
    for (path, old), new in zip(
        jax.tree.leaves_with_path(begin[0]), jax.tree.leaves(state), strict=True
    ):
        assert not np.array_equal(old, new), jax.tree_util.keystr(path)


def test_scanned_and_unrolled_llama_make_the_same_step(quick_compile: Compile) -> None:
    scanned, unrolled = make("llama"), make("llama_unrolled")
    state, batch = scanned.init(0)

    def unstack(tree: Any) -> Any:
        layers = [
            jax.tree.map(lambda leaf, i=i: leaf[i], tree["layers"])
            for i in range(scanned.config.layers)
        ]
        return {**tree, "layers": layers}

    def as_list(state: TrainState) -> TrainState:
        params, m, v = (unstack(part) for part in (state.params, state.m, state.v))
        return TrainState(params, m, v, state.step)

    got, unrolled_loss = quick_compile(lowered(unrolled))(as_list(scanned.init(0)[0]), batch)
    expected, loss = quick_compile(lowered(scanned))(state, batch)
    assert float(unrolled_loss) == pytest.approx(float(loss), rel=1e-6)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(as_list(expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.max(jnp.abs(b))))


def test_decoding_a_sequence_gives_the_logits_of_the_whole_forward_pass(
    quick_compile: Compile,
) -> None:
    workload = make("llama_decode", batch=2, seq=6)
    params, cache, _, _ = workload.init(0)
    cache = jax.tree.map(jnp.zeros_like, cache)
    tokens = jax.random.randint(jax.random.key(0), (2, 6), 0, workload.config.vocab, jnp.int32)
    expected = jax.jit(forward, static_argnums=0)(workload.config, params, tokens)
    step = quick_compile(lowered(workload))
    for position in range(6):
        cache, logits = step(params, cache, tokens[:, position], jnp.int32(position))
        np.testing.assert_allclose(logits, expected[:, position], rtol=0, atol=1e-5)


def test_decoding_does_not_look_behind_its_position() -> None:
    workload = make("llama_decode")
    params, cache, tokens, position = workload.init(0)
    later = jnp.arange(workload.config.seq)[:, None, None] > position
    spoiled = jax.tree.map(lambda leaf: jnp.where(later, 1e6, leaf), cache)
    step = jax.jit(workload.fn)
    np.testing.assert_array_equal(
        step(params, cache, tokens, position)[1], step(params, spoiled, tokens, position)[1]
    )


def test_grouped_attention_agrees_with_that_of_jax() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (2, 5, 6, 4))
    k, v = (jax.random.normal(key, (2, 5, 3, 4)) for key in keys[1:])
    mask = jnp.tril(jnp.ones((5, 5), dtype=bool))
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(attend(q, k, v, mask), expected, rtol=1e-5, atol=1e-6)


def test_rotated_heads_know_their_distance_only() -> None:
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))

    def product(i: int, j: int) -> float:
        at_i, at_j = (rope(x, jnp.array([p]), 10_000.0) for x, p in ((q, i), (k, j)))
        return float(jnp.sum(at_i * at_j))

    assert product(7, 3) == pytest.approx(product(104, 100), rel=1e-4)
    assert product(7, 3) != pytest.approx(product(7, 5), rel=1e-2)


def test_adam_agrees_with_optax() -> None:
    params = {"w": jnp.array([1.0, -2.0, 0.5])}
    zero = jax.tree.map(jnp.zeros_like, params)
    state = TrainState(params, zero, zero, jnp.int32(0))
    adam = Adam(learning_rate=0.1)
    reference = optax.adam(0.1, b1=adam.beta1, b2=adam.beta2, eps=adam.epsilon)
    expected, expected_state = params, reference.init(params)
    for _ in range(4):
        state = adam.update(state, jax.tree.map(jnp.sin, state.params))
        updates, expected_state = reference.update(jax.tree.map(jnp.sin, expected), expected_state)
        expected = optax.apply_updates(expected, updates)
    np.testing.assert_allclose(state.params["w"], expected["w"], rtol=1e-5)


def test_routing_places_tokens_as_a_queue_at_each_expert_would() -> None:
    config = MoeConfig(experts=4, seq=16, capacity_factor=0.5, batch=2)
    gates = np.asarray(jax.nn.softmax(jax.random.normal(jax.random.key(1), (2, 16, 4))))
    expected = np.zeros((2, 16, 4, config.capacity))
    for b in range(2):
        waiting = [0] * 4
        best = np.argsort(-gates[b], axis=-1)[:, :2]
        for choice in range(2):
            for token in range(16):
                expert = best[token, choice]
                if waiting[expert] < config.capacity:
                    share = gates[b, token, expert] / gates[b, token, best[token]].sum()
                    expected[b, token, expert, waiting[expert]] = share
                waiting[expert] += 1
    combine, balance = route(config, jnp.asarray(gates))
    assert 0 < np.count_nonzero(expected) < 2 * 16 * 2  # some tokens were dropped
    np.testing.assert_allclose(combine, expected, rtol=1e-5)
    first = np.bincount(gates.argmax(-1).ravel(), minlength=4) / 32
    assert float(balance) == pytest.approx(4 * float(first @ gates.mean((0, 1))), rel=1e-5)


def test_experts_with_room_for_all_and_experts_of_sorted_tokens_agree(
    quick_compile: Compile,
) -> None:
    roomy, ragged = make("moe", layers=1, capacity_factor=4.0), make("moe_ragged", layers=1)
    state, batch = ragged.init(0)
    assert roomy.config.capacity >= roomy.config.seq  # no token can be dropped
    expected_state, expected_loss = quick_compile(jax.jit(roomy.fn).lower(state, batch))(
        state, batch
    )
    got_state, loss = quick_compile(lowered(ragged))(state, batch)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
    for a, b in zip(jax.tree.leaves(got_state.m), jax.tree.leaves(expected_state.m), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * float(jnp.max(jnp.abs(b))))


def test_prefill_and_then_decoding_give_the_logits_of_the_whole_forward_pass(
    quick_compile: Compile,
) -> None:
    filling = make("llama_prefill", batch=3, seq=8, prompt=6)
    decoding = make("llama_decode", batch=3, seq=8)
    params, cache, _, _ = filling.init(0)
    tokens = jax.random.randint(jax.random.key(0), (3, 8), 0, filling.config.vocab, jnp.int32)
    expected = jax.jit(forward, static_argnums=0)(filling.config, params, tokens)
    lengths = jnp.array([6, 2, 5], jnp.int32)
    cache, logits = quick_compile(lowered(filling))(params, cache, tokens[:, :6], lengths)
    at = expected[jnp.arange(3), lengths - 1]
    np.testing.assert_allclose(logits, at, rtol=0, atol=1e-5)
    step = quick_compile(lowered(decoding))
    for position in (6, 7):
        cache, logits = step(params, cache, tokens[:, position], jnp.int32(position))
        np.testing.assert_allclose(logits, expected[:, position], rtol=0, atol=1e-5)


def test_a_step_along_the_rows_named_is_that_along_the_whole_gradient(
    quick_compile: Compile,
) -> None:
    workload = make("dlrm", rows=16)  # so that rows are named more than once
    params, batch = workload.init(0)

    def loss_fn(params: Any) -> jax.Array:
        rows = look_up(params["large_tables"], batch["large_ids"])
        logits = click_logits(workload.config, params, rows, batch)
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, batch["clicks"]))

    expected_loss, grads = quick_compile(jax.jit(jax.value_and_grad(loss_fn)).lower(params))(params)
    moved, loss = quick_compile(jax.jit(workload.fn).lower(params, batch))(params, batch)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    for path, grad in jax.tree.leaves_with_path(grads):
        before, after = (dict(jax.tree.leaves_with_path(p))[path] for p in (params, moved))
        np.testing.assert_allclose(
            after, before - workload.config.learning_rate * grad, rtol=0, atol=1e-6
        )


@pytest.mark.parametrize(
    ("name", "size", "parameters"),
    [
        # The totals that the published checkpoints state.
        ("llama", "8b", 8_030_261_248),
        ("llama", "70b", 70_553_706_496),
        ("llama_unrolled", "8b", 8_030_261_248),
        ("llama_decode", "8b", 8_030_261_248),
        ("llama_prefill", "8b", 8_030_261_248),
        ("moe", "8x7b", 46_702_792_704),
        ("moe_ragged", "8x7b", 46_702_792_704),
    ],
)
def test_published_sizes_have_the_published_number_of_weights(
    name: str, size: str, parameters: int
) -> None:
    weights = make(name, size).args[0]
    weights = weights.params if isinstance(weights, TrainState) else weights
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(weights)) == parameters


@pytest.mark.parametrize(
    ("name", "size", "millions"),
    [("equinox_mixer", "b16", 59), ("haiku_lstm", "zaremba-large", 66)],
)
def test_published_sizes_have_about_as_many_weights_as_their_papers_say(
    name: str, size: str, millions: int
) -> None:
    weights = jax.tree.leaves(make(name, size).args[0]["params"])
    assert sum(math.prod(leaf.shape) for leaf in weights) // 1_000_000 == millions


def test_bfloat16_computation_stays_near_float32(quick_compile: Compile) -> None:
    workloads = [make("llama", layers=1, dtype=dtype) for dtype in ("float32", "bfloat16")]
    exact, rounded = (quick_compile(lowered(w))(*w.init(0))[1] for w in workloads)
    assert float(rounded) == pytest.approx(float(exact), rel=workloads[1].tolerance["bfloat16"])
    assert float(rounded) != float(exact)


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name not in LIBRARIES])
def test_our_own_models_do_without_implicit_promotion(name: str) -> None:
    workload = make(name)
    with jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(lambda *args: workload.fn(*args), *workload.args)


def test_a_workload_is_planned_at_a_published_size_without_its_arrays() -> None:
    args = make("flax_transformer", "gpt2-xl", layers=1).args
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args))


@pytest.mark.parametrize(
    ("name", "size", "options", "message"),
    [
        ("lama", "tiny", {}, "no workload is called 'lama'\n  fix: did you mean 'llama'"),
        ("llama", "huge", {}, "workload 'llama' has no size 'huge'\n  fix: known: tiny, small"),
        ("mlp", "tiny", {"layer": 1}, "workload 'mlp' has no option 'layer'\n  fix: known: feat"),
    ],
)
def test_an_unknown_name_is_refused_with_those_known(
    name: str, size: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnknownNameError) as caught:
        make(name, size, **options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama", {"kv_heads": 3}, "8 query heads are not a multiple of 3 key/value heads"),
        ("moe", {"experts": 1}, "a token cannot go to 2 of 1 experts"),
        ("llama_prefill", {"prompt": 64}, "prompts of 64 positions do not fit into a cache of 32"),
        ("equinox_mixer", {"patch": 5}, "an image of 32 pixels does not split into patches of 5"),
        ("flax_transformer", {"heads": 7}, "a width of 64 does not split into 7 heads"),
    ],
)
def test_a_contradictory_configuration_is_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        make(name, **options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "model", "library"),
    [
        ("flax_transformer", "flax_model", "flax"),
        ("flax_transformer", "flax_model", "optax"),
        ("equinox_mixer", "equinox_model", "equinox"),
        ("haiku_lstm", "haiku_model", "haiku"),
    ],
)
def test_a_missing_library_is_named_with_the_extra_that_brings_it(
    name: str, model: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"autoshard.experiments.workloads.{model}", raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(InputError, match=f"not installed: {library}") as caught:
        make(name)
    assert caught.value.fix == f"pip install 'autoshard[{LIBRARIES[name]}]'"
