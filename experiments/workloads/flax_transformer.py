"""A train step on other people's libraries: a Flax NNX transformer under optax's AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.errors import InputError
from autoshard.experiments.arrays import ArraySpec, PyTree, fill
from autoshard.experiments.experts import TRAIN_RULES, experts_of
from autoshard.experiments.workloads.llama import batch_spec
from autoshard.experiments.workloads.workload import TOLERANCE, Workload, configured, missing


@dataclass(frozen=True, slots=True)
class FlaxConfig:
    """Sizes of the transformer.

    Attributes:
        width: Model width.
        layers: Number of blocks.
        heads: Attention heads; divides ``width``.
        hidden: Width inside the MLP.
        vocab: Number of tokens.
        batch: Sequences in a step.
        seq: Positions of a sequence.
        learning_rate: AdamW's step size.
        source: Where the figures come from.
    """

    width: int = 64
    layers: int = 2
    heads: int = 8
    hidden: int = 256
    vocab: int = 256
    batch: int = 8
    seq: int = 32
    learning_rate: float = 1e-3
    source: str = "sizes chosen here, in the proportions of the published models"

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise InputError(
                f"a width of {self.width} does not split into {self.heads} heads",
                fix="choose heads that divides width",
            )


SIZES: Mapping[str, FlaxConfig] = {
    "tiny": FlaxConfig(),
    "small": FlaxConfig(width=256, layers=4, hidden=1024, vocab=2048, seq=128),
    "gpt2-xl": FlaxConfig(
        width=1600,
        layers=48,
        heads=25,
        hidden=6400,
        vocab=50_257,
        batch=512,
        seq=1024,
        source='GPT-2 XL: Radford et al. 2019, "Language Models are Unsupervised Multitask '
        'Learners", table 2 and section 2.3; 25 heads from the published model',
    ),
}

FLAX_TOLERANCE: Mapping[str, float] = {**TOLERANCE, "float32": 1e-3}
"""Biases begin at zero: after the first step they are Adam's normalised gradient and nothing else,
which shows the rounding of gradients as small as Adam's epsilon."""


def flax_transformer(size: str = "tiny", **overrides: object) -> Workload:
    """A train step ``(state, batch) -> (state, loss)``, the state donated.

    Raises:
        InputError: Flax or optax is not installed.
        UnknownNameError: There is no such size or field.
    """
    config = configured("flax_transformer", SIZES, size, overrides)
    try:
        # Here, not at the top: these libraries are an extra.
        from autoshard.experiments.workloads.flax_model import Program
    except ImportError as error:
        raise missing("flax_transformer", "flax", error) from error
    program = Program(config)
    state, batch = program.state_spec(), batch_spec(config.batch, config.seq, config.vocab)
    arguments, results = (state, batch), (state, ArraySpec((), ()))

    def make_arguments(seed: int) -> tuple[PyTree, ...]:
        return program.init_state(seed), fill(batch, seed)

    return Workload(
        name="flax_transformer",
        size=size,
        config=config,
        fn=program.train_step,
        arguments=arguments,
        results=results,
        donate_argnums=(0,),
        experts=experts_of(TRAIN_RULES, arguments, results),
        description="AdamW step of a Flax NNX transformer with tied embeddings",
        source=config.source,
        tolerance=FLAX_TOLERANCE,
        make_arguments=make_arguments,
    )
