"""The networks that convolve, normalise over the batch or draw noise are what they say they are."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.errors import InputError
from autoshard.experiments.workloads import make
from autoshard.experiments.workloads.batch_norm import batch_norm
from autoshard.experiments.workloads.conformer import depthwise
from autoshard.experiments.workloads.diffusion_transformer import patchify
from autoshard.experiments.workloads.resnet import convolve, max_pool


def count(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def test_batch_norm_agrees_with_that_of_flax() -> None:
    x = 3 + 2 * jax.random.normal(jax.random.key(0), (8, 4, 4, 5))
    scale, bias = jnp.linspace(0.5, 2, 5), jnp.linspace(-1, 1, 5)
    running = {"mean": jnp.ones(5), "variance": 2 * jnp.ones(5)}
    ours, kept = batch_norm(x, scale, bias, running)
    variables = {
        "params": {"scale": scale, "bias": bias},
        "batch_stats": {"mean": running["mean"], "var": running["variance"]},
    }
    reference = nn.BatchNorm(use_running_average=False, momentum=0.9)
    theirs, state = reference.apply(variables, x, mutable=["batch_stats"])
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    np.testing.assert_allclose(kept["mean"], state["batch_stats"]["mean"], rtol=1e-5)
    np.testing.assert_allclose(kept["variance"], state["batch_stats"]["var"], rtol=1e-5)


def test_pooling_and_convolution_agree_with_those_of_flax() -> None:
    x = jax.random.normal(jax.random.key(0), (2, 8, 8, 3))
    pooled = nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
    np.testing.assert_array_equal(max_pool(x), pooled)
    kernel = jax.random.normal(jax.random.key(1), (3, 3, 3, 4))
    layer = nn.Conv(4, (3, 3), (2, 2), ((1, 1), (1, 1)), use_bias=False)
    expected = np.asarray(layer.apply({"params": {"kernel": kernel}}, x))
    np.testing.assert_allclose(convolve(x, kernel, 2), expected, rtol=1e-5, atol=1e-5)


def test_each_channel_is_convolved_with_its_own_kernel() -> None:
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(2, 9, 4)), rng.normal(size=(3, 1, 4))
    expected = np.stack(
        [
            [np.convolve(x[b, :, c], kernel[::-1, 0, c], mode="same") for c in range(4)]
            for b in range(2)
        ]
    ).swapaxes(1, 2)
    ours = depthwise(jnp.asarray(x, jnp.float32), jnp.asarray(kernel, jnp.float32))
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


def test_a_patch_holds_neighbours() -> None:
    images = jnp.arange(2 * 4 * 4 * 3).reshape(2, 4, 4, 3)
    patches = patchify(images, 2)
    assert patches.shape == (2, 4, 12)
    np.testing.assert_array_equal(patches[1, 2], images[1, 2:, :2].reshape(-1))


def test_resnet_50_has_the_published_number_of_weights() -> None:
    # As the checkpoints for transformers and torchvision state it.
    assert count(make("resnet", "resnet50").args[0].params) == 25_557_032


def test_conformer_and_diffusion_transformer_are_near_the_published_numbers_of_weights() -> None:
    # arXiv:2005.08100, table 1 counts subsampling, relative positions and a decoder too.
    assert count(make("conformer", "l").args[0].train.params) == pytest.approx(118.8e6, rel=0.15)
    # arXiv:2212.09748, table 1 and 4: 675 million with the learned covariance and biases.
    weights = make("diffusion_transformer", "xl").args[0].train.params
    assert count(weights) == pytest.approx(675e6, rel=0.01)


def test_the_noise_is_another_one_in_every_step_and_the_loss_falls() -> None:
    workload = make("diffusion_transformer", batch=32, layers=1, learning_rate=1e-2)
    step = jax.jit(workload.fn)
    state, batch = workload.init(0)
    begin, losses, keys = state, [], set()
    for _ in range(30):
        state, loss = step(state, batch)
        losses.append(float(loss))
        keys.add(tuple(np.asarray(state.key).tolist()))
    assert len(keys) == 30
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    for (path, old), new in zip(
        jax.tree.leaves_with_path(begin), jax.tree.leaves(state), strict=True
    ):
        assert not np.array_equal(old, new), jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet", {"image": 20}, "an image of 20 rows cannot be halved 3 times"),
        ("diffusion_transformer", {"patch": 3}, "an image of 8 rows is not a number of patches"),
    ],
)
def test_a_contradictory_configuration_is_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        make(name, **options)
    assert str(caught.value).startswith(message)
