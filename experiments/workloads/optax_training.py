"""What the train steps under optax's AdamW share (needs the extra ``flax``, or another with optax).

Their state is a dictionary of ``params`` and ``optimizer``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax  # type: ignore[import-untyped]

from autoshard.experiments.arrays import ArraySpec, PyTree


def adamw(learning_rate: float) -> Any:
    """AdamW (arXiv:1711.05101) with the betas and epsilon of Llama 2 (arXiv:2307.09288)."""
    return optax.adamw(learning_rate, b2=0.95, eps=1e-5)


def optax_step(
    loss_fn: Callable[[PyTree, PyTree], jax.Array], optimizer: Any, state: PyTree, batch: PyTree
) -> tuple[PyTree, jax.Array]:
    """One step of ``optimizer`` along the gradient of ``loss_fn(params, batch)``, and the loss."""
    # optax relies on implicit promotion, which a user may have switched off.
    with jax.numpy_dtype_promotion("standard"):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, moved = optimizer.update(grads, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
    return {"params": params, "optimizer": moved}, loss


def optax_state_spec(optimizer: Any, abstract_params: PyTree, params_spec: PyTree) -> PyTree:
    """The specs of the state; the optimizer's arrays have the axes of their weights.

    Args:
        optimizer: An optax optimizer.
        abstract_params: The weights as a tree of ``jax.ShapeDtypeStruct``.
        params_spec: The same tree of :class:`~autoshard.experiments.arrays.ArraySpec`.
    """
    specs = optax.tree_map_params(
        optimizer,
        lambda _, weight: weight,
        jax.eval_shape(optimizer.init, abstract_params),
        params_spec,
        transform_non_params=lambda leaf: ArraySpec((), (), str(leaf.dtype)),
    )
    return {"params": params_spec, "optimizer": specs}
