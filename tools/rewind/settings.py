"""Settings in which two configurations differ, and the metrics on which a setting acts first."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel

from slipstream.configs import RunConfig
from slipstream.configs.runtime.passwords import redact
from slipstream.tools.launch.ports import unset_ports

_STALENESS: Final = ("staleness_mean", "staleness_max", "staleness_in_flight", "staleness_in_queue")
_ANSWERS: Final = ("reward", "answer_tokens", "score/", "reward_std", "entropy")
_NUMBERS: Final = ("loss", "grad_norm")
ANY: Final = ("",)
"""Acts on every metric."""
EFFECTS: Final[Mapping[str, Sequence[str]]] = {
    "learner.loss": ("loss", "clip_fraction", "grad_norm"),
    "learner.optimizer": ("lr", "kl_k1", "grad_norm"),
    "learner.advantage": _NUMBERS,
    "learner.correction": ("truncated_fraction", "masked_fraction", "masked/", *_NUMBERS),
    "learner.streams": ("loss", "ce_loss", "ref_kl_loss", "grad_norm"),
    "learner.kl": ("reference_kl", "kl_coefficient", *_NUMBERS),
    "learner.critic": ("value_loss", "critic_lr", "critic_grad_norm", *_NUMBERS),
    "learner.process_reward": (
        "process_reward_loss",
        "process_reward_lr",
        "process_reward_grad_norm",
        "process_reward",
        *_NUMBERS,
    ),
    "learner.updates_per_step": ("clip_fraction", "ess", *_NUMBERS),
    "learner.groups_per_step": ("answers", "actions", "tokens"),
    "learner.steps": ("lr",),
    "learner.throttle": ("throttle/", "lr", *_STALENESS),
    "learner.trainer": ANY,
    "model": ANY,
    "rewards": ("reward", "score/", "reward_std"),
    "env": _ANSWERS,
    "rollout.sampling": (*_ANSWERS, "answers_cut_off"),
    "rollout.episode": (*_ANSWERS, "ended/"),
    "rollout.overlong": ("reward", "score/overlong"),
    "rollout.group_size": ("answers", "actions", "reward_std"),
    "rollout.min_episodes": ("answers", "actions"),
    "rollout.skip_long_prompts": _ANSWERS,
    "buffer.filters": ("groups_without_spread", "reward", "reward_std"),
    "buffer.curriculum": ("groups_without_spread", "reward"),
    "buffer.sampler": ("reward", *_STALENESS),
    "buffer.limiter": _STALENESS,
    "buffer.max_staleness": _STALENESS,
    "weights.publish_every_steps": _STALENESS,
    "run.seed": ANY,
    # Below: no effect on the objective, but on the time at which groups arrive, and on rounding.
    "rollout.engine": ("mismatch_abs", *_STALENESS),
    "rollout": _STALENESS,
    "learner": _NUMBERS,
    "gpus": _STALENESS,
    "weights.rolling": _STALENESS,
    "weights.keep_stale_kv": ("mismatch_abs",),
}
"""Settings by prefix, those that act on training most directly first, and the metrics that they change first.

Those without a prefix here act on no metric of a step: names, places, ports, deadlines.
"""
FIRST_OF_TIMING: Final = "rollout.engine"
_WITHOUT_EFFECT: Final = ("learner.checkpoint", "learner.wait_deadline_s")


@dataclass(frozen=True)
class Difference:
    """A key whose values differ.

    Attributes:
        a: value in run A; None also where the section has no such key.
        default: value without the key in a file.
        acts_on: metrics that it changes first, or their prefixes; none for names, places, ports and deadlines.
        is_timing: it changes when groups arrive, and rounding, but not the objective.
    """

    key: str
    a: Any
    b: Any
    default: Any
    acts_on: Sequence[str]
    is_timing: bool


def differences(a: RunConfig, b: RunConfig) -> list[Difference]:
    """The keys that differ, those that act on training most directly first; without ports that neither has set."""
    values_a, values_b = dict(leaves(a)), dict(leaves(b))
    ports_a, ports_b = (
        unset_ports({key: value for key, (value, _) in values.items()}) for values in (values_a, values_b)
    )
    found = []
    for key in dict.fromkeys([*values_a, *values_b]):
        if key in ports_a & ports_b:
            continue
        (own, default), (other, other_default) = values_a.get(key, (None, None)), values_b.get(key, (None, None))
        if own != other:
            default = default if key in values_a else other_default
            prefix = effect_of(key)
            acts_on = EFFECTS[prefix] if prefix else ()
            is_timing = prefix is not None and _rank(prefix) >= _rank(FIRST_OF_TIMING)
            found.append(Difference(key, redacted(own), redacted(other), redacted(default), acts_on, is_timing))
    return sorted(found, key=lambda difference: _rank(effect_of(difference.key)))


def effect_of(key: str) -> str | None:
    """The longest prefix in EFFECTS; None for a key that acts on no metric."""
    if key.startswith(_WITHOUT_EFFECT) or key.endswith("_deadline_s"):
        return None
    known = [prefix for prefix in EFFECTS if key == prefix or key.startswith(f"{prefix}.")]
    return max(known, key=len, default=None)


def _rank(prefix: str | None) -> int:
    return len(EFFECTS) if prefix is None else list(EFFECTS).index(prefix)


def leaves(section: BaseModel, path: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Dotted keys of a section with value and default, both as JSON; entries of a list by their name or index."""
    for name, field in type(section).model_fields.items():
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        yield from _leaves(f"{path}{name}", getattr(section, name), default)


def _leaves(path: str, value: Any, default: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    if isinstance(value, BaseModel):
        yield from leaves(value, f"{path}.")
    elif isinstance(value, tuple) and value and all(isinstance(entry, BaseModel) for entry in value):
        for number, entry in enumerate(value):
            yield from leaves(entry, f"{path}.{getattr(entry, 'name', number)}.")
    else:
        yield path, (plain(value), plain(default))


def plain(value: Any) -> Any:
    """A value as JSON knows it."""
    if isinstance(value, BaseModel):
        return getattr(value, "name", value.model_dump(mode="json"))
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [plain(inner) for inner in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def redacted(value: Any) -> Any:
    """The value without passwords in texts."""
    if isinstance(value, Mapping):
        return {key: redacted(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [redacted(inner) for inner in value]
    return redact(value) if isinstance(value, str) else value
