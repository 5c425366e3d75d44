"""What is compared: the lines of a study, over which lags, and under which learning rate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slipstream.configs import RunConfig, load
from slipstream.configs.load import load_config

DEMO: Final = Path(load.__file__).parent / "demo.yaml"

SETTINGS: Final = (
    "learner.groups_per_step=32",
    "learner.updates_per_step=2",  # with a single one, target and proximal policy are one, and so are their losses
    "rollout.group_size=8",
    "learner.optimizer.lr=7.0e-4",
    "learner.optimizer.warmup_steps=20",
    # The demo's bonus pushes on where all answers are right and no advantage is left to hold against it: at long lags
    # it unsettles objectives after they have learned, which would be taken for the lag's doing.
    "learner.loss.entropy_bonus=0",
)
"""Beside the demo's task and model."""

_NO_DECAY: Final = "learner.optimizer.final_lr_fraction=1"
_DECOUPLED: Final = "learner.correction={proximal: recompute, weight: token, cap: 2}"
_NO_WEIGHT: Final = "learner.correction={proximal: recompute, weight: none}"


@dataclass(frozen=True)
class Line:
    """One line of the plot, one row of the table."""

    title: str
    overrides: tuple[str, ...]
    """Of the configuration."""


OBJECTIVES: Final[Mapping[str, Line]] = {
    "behaviour-clipped": Line(
        "PPO clipped against the behaviour policy", ("learner.correction={proximal: behaviour, weight: none}",)
    ),
    "decoupled": Line("decoupled PPO, weight capped at 2", (_DECOUPLED,)),
    # The weight is that of the policy at the step's start: what the first update changes, the second does not weigh.
    "tis": Line("truncated importance sampling, cap 2", ("learner.loss.name=reinforce", _DECOUPLED)),
    "icepop": Line(
        "IcePop, band 0.5 to 5", ("learner.correction={proximal: recompute, weight: token, band: [0.5, 5]}",)
    ),
    "proximal-only": Line("proximal recomputed, no weight", (_NO_WEIGHT,)),
    "reinforce": Line("plain REINFORCE", ("learner.loss.name=reinforce", _NO_WEIGHT)),
}

_WITH_AND_WITHOUT: Final[Mapping[str, Line]] = {
    "behaviour-clipped": OBJECTIVES["behaviour-clipped"],
    "decoupled": OBJECTIVES["decoupled"],
    "decoupled-lag": Line("decoupled PPO, throttle of the lag", (_DECOUPLED, "learner.throttle={}")),
    "decoupled-lag-rate": Line(
        "decoupled PPO, throttle of lag and learning rate", (_DECOUPLED, "learner.throttle={learning_rate: true}")
    ),
    "reinforce": OBJECTIVES["reinforce"],
    "reinforce-lag-rate": Line(
        "plain REINFORCE, throttle of lag and learning rate",
        (*OBJECTIVES["reinforce"].overrides, "learner.throttle={learning_rate: true}"),
    ),
}


@dataclass(frozen=True)
class Study:
    """A comparison."""

    title: str
    lines: Mapping[str, Line]
    lags: tuple[int, ...]
    overrides: tuple[str, ...] = ()


STUDIES: Final[Mapping[str, Study]] = {
    "decay": Study("learning rate decays to 0", OBJECTIVES, (0, 4, 16, 64)),
    "constant": Study("constant learning rate", OBJECTIVES, (0, 16, 64), (_NO_DECAY,)),
    "throttle": Study(
        "constant learning rate, with and without the throttle", _WITH_AND_WITHOUT, (16, 64), (_NO_DECAY,)
    ),
}


@dataclass(frozen=True)
class Run:
    """One run of a study."""

    line: str
    lag: int
    seed: int
    config: RunConfig


def plan(
    study: Study, *, lines: Sequence[str], lags: Sequence[int], seeds: Sequence[int], steps: int, folder: Path
) -> list[Run]:
    """The runs of a study, one line's beside another's; those of one seed share their initial weights in `folder`.

    Raises: KeyError when the study has no such line.
    """
    return [
        Run(line, lag, seed, _config(study, study.lines[line], lag=lag, seed=seed, steps=steps, folder=folder))
        for seed in seeds
        for lag in lags
        for line in lines
    ]


def _config(study: Study, line: Line, *, lag: int, seed: int, steps: int, folder: Path) -> RunConfig:
    own = (f"run.dir={folder}", f"run.name=seed{seed}", f"run.seed={seed}", f"learner.steps={steps}")
    return load_config(DEMO, (*SETTINGS, *study.overrides, *own, f"buffer.max_staleness={lag}", *line.overrides))
