"""A train step of an Equinox model: MLP-Mixer on images, under optax's AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.errors import InputError
from autoshard.experiments.arrays import ArraySpec, PyTree, fill, integers, normal
from autoshard.experiments.experts import TRAIN_RULES, experts_of
from autoshard.experiments.workloads.workload import TOLERANCE, Workload, configured, missing


@dataclass(frozen=True, slots=True)
class MixerConfig:
    """Sizes of MLP-Mixer, in its paper's words.

    Attributes:
        image: Height and width of an image.
        patch: Height and width of a patch; divides ``image``.
        channels: Channels of an image.
        width: Channels of a patch's embedding (C).
        tokens_hidden: Width inside the MLP that mixes patches (D_S).
        channels_hidden: Width inside the MLP that mixes channels (D_C).
        layers: Number of blocks.
        classes: Number of labels.
        batch: Images in a step.
        learning_rate: AdamW's step size.
        source: Where the figures come from.
    """

    image: int = 32
    patch: int = 8
    channels: int = 3
    width: int = 64
    tokens_hidden: int = 32
    channels_hidden: int = 256
    layers: int = 2
    classes: int = 16
    batch: int = 16
    learning_rate: float = 1e-3
    source: str = "sizes chosen here, in the proportions of the published models"

    def __post_init__(self) -> None:
        if self.image % self.patch:
            raise InputError(
                f"an image of {self.image} pixels does not split into patches of {self.patch}",
                fix="choose a patch that divides image",
            )


SIZES: Mapping[str, MixerConfig] = {
    "tiny": MixerConfig(),
    "small": MixerConfig(
        image=64,
        width=256,
        tokens_hidden=128,
        channels_hidden=1024,
        layers=4,
        classes=1024,
        batch=64,
    ),
    "b16": MixerConfig(
        image=224,
        patch=16,
        width=768,
        tokens_hidden=384,
        channels_hidden=3072,
        layers=12,
        classes=1000,
        batch=4096,
        source="Mixer-B/16: arXiv:2105.01601, table 1; ImageNet-1k's classes; batch from section "
        "3 of the same",
    ),
}

MIXER_TOLERANCE: Mapping[str, float] = {**TOLERANCE, "float32": 1e-3}
"""Some biases begin at zero: after the first step they are Adam's normalised gradient and nothing
else, which shows the rounding of gradients as small as Adam's epsilon."""


def equinox_mixer(size: str = "tiny", **overrides: object) -> Workload:
    """A train step ``(state, batch) -> (state, loss)``, the state donated.

    Raises:
        InputError: Equinox or optax is not installed, or the sizes contradict each other.
        UnknownNameError: There is no such size or field.
    """
    config = configured("equinox_mixer", SIZES, size, overrides)
    try:
        # Here, not at the top: these libraries are an extra.
        from autoshard.experiments.workloads.equinox_model import Program
    except ImportError as error:
        raise missing("equinox_mixer", "equinox", error) from error
    program = Program(config)
    state = program.state_spec()
    image = (config.batch, config.channels, config.image, config.image)
    batch = {
        "images": ArraySpec(image, ("batch", "channels", "height", "w"), fill=normal(1.0)),
        "labels": ArraySpec((config.batch,), ("batch",), "int32", integers(config.classes)),
    }
    arguments, results = (state, batch), (state, ArraySpec((), ()))

    def make_arguments(seed: int) -> tuple[PyTree, ...]:
        return program.init_state(seed), fill(batch, seed)

    return Workload(
        name="equinox_mixer",
        size=size,
        config=config,
        fn=program.train_step,
        arguments=arguments,
        results=results,
        donate_argnums=(0,),
        experts=experts_of(TRAIN_RULES, arguments, results),
        description="AdamW step of MLP-Mixer written with Equinox",
        source=config.source,
        tolerance=MIXER_TOLERANCE,
        make_arguments=make_arguments,
    )
