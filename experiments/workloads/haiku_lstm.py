"""A train step of a Haiku model: an LSTM language model, under optax's AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.experiments.arrays import ArraySpec, PyTree, fill
from autoshard.experiments.experts import TRAIN_RULES, experts_of
from autoshard.experiments.workloads.llama import batch_spec
from autoshard.experiments.workloads.workload import TOLERANCE, Workload, configured, missing


@dataclass(frozen=True, slots=True)
class LstmConfig:
    """Sizes of the language model.

    Attributes:
        width: Width of the embeddings and of each LSTM.
        layers: Number of LSTMs, one on top of the other.
        vocab: Number of tokens.
        batch: Sequences in a step.
        seq: Positions of a sequence.
        learning_rate: AdamW's step size.
        source: Where the figures come from.
    """

    width: int = 64
    layers: int = 2
    vocab: int = 256
    batch: int = 16
    seq: int = 16
    learning_rate: float = 1e-3
    source: str = "sizes chosen here, in the proportions of the published models"


SIZES: Mapping[str, LstmConfig] = {
    "tiny": LstmConfig(),
    "small": LstmConfig(width=256, vocab=2048, batch=64, seq=32),
    "zaremba-large": LstmConfig(
        width=1500,
        vocab=10_000,
        batch=20,
        seq=35,
        source="The large model of arXiv:1409.2329, section 4.1",
    ),
}

LSTM_TOLERANCE: Mapping[str, float] = {**TOLERANCE, "float32": 1e-3}
"""Biases begin at zero: after the first step they are Adam's normalised gradient and nothing else,
which shows the rounding of gradients as small as Adam's epsilon."""


def haiku_lstm(size: str = "tiny", **overrides: object) -> Workload:
    """A train step ``(state, batch) -> (state, loss)``, the state donated.

    Raises:
        InputError: Haiku or optax is not installed.
        UnknownNameError: There is no such size or field.
    """
    config = configured("haiku_lstm", SIZES, size, overrides)
    try:
        # Here, not at the top: these libraries are an extra.
        from autoshard.experiments.workloads.haiku_model import Program
    except ImportError as error:
        raise missing("haiku_lstm", "haiku", error) from error
    program = Program(config)
    state, batch = program.state_spec(), batch_spec(config.batch, config.seq, config.vocab)
    arguments, results = (state, batch), (state, ArraySpec((), ()))

    def make_arguments(seed: int) -> tuple[PyTree, ...]:
        return program.init_state(seed), fill(batch, seed)

    return Workload(
        name="haiku_lstm",
        size=size,
        config=config,
        fn=program.train_step,
        arguments=arguments,
        results=results,
        donate_argnums=(0,),
        experts=experts_of(TRAIN_RULES, arguments, results),
        description="AdamW step of a Haiku LSTM language model, a loop over time",
        source=config.source,
        tolerance=LSTM_TOLERANCE,
        make_arguments=make_arguments,
    )
