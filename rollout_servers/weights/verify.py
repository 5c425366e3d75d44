"""Verification that an engine holds the version that was installed."""

import asyncio
from dataclasses import dataclass

from slipstream.buffer.wire.weights import protocol as w
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.schema.weights import WeightsConfig
from slipstream.rollout_servers.engines.base import Engine, RequestRefused

log = get_log("rollout.weights")

TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}
"""Largest deviation of the engine's log-probs from the learner's, by dtype: rounding and the order of sums."""


class WrongWeights(SlipstreamError):
    """The engine generates with something else than the version that it was given."""


@dataclass(frozen=True)
class Verification:
    """The method of a verification, and the deviation of the probe's log-probs (`relative_deviation`)."""

    how: str
    deviation: float = 0.0


async def verify(engine: Engine, manifest: w.Manifest, config: WeightsConfig, *, dtype: str) -> Verification:
    """Compares what the engine holds with what was published.

    By checksums of its tensors where it shows them; by the log-probs that it gives to the learner's probe elsewhere.

    Raises: WrongWeights, EngineError.
    """
    if not config.verify:
        return Verification(w.NOT_VERIFIED)
    held = await engine.checksums()
    if held is not None and manifest.checksums:
        _compare(manifest, held)
        return Verification(w.BY_CHECKSUM)
    if manifest.probe is None:
        return Verification(w.NOT_VERIFIED)
    try:
        # An engine that is full may take a while until it gets to it; the learner waits for the answer.
        async with asyncio.timeout(config.deadline_s / 4):
            logprobs = await engine.score(manifest.probe.token_ids)
    except TimeoutError:
        log.warning("engine too busy to be probed: version not verified", version=manifest.version)
        return Verification(w.NOT_VERIFIED)
    except RequestRefused as error:  # some can't even say nan
        raise WrongWeights(
            f"the engine does not show that it holds version {manifest.version}: it refuses the probe: {error}"
        ) from error
    deviation = relative_deviation(logprobs, manifest.probe.logprobs)
    tolerance = TOLERANCES[dtype]
    # Not `deviation > tolerance`: nan must not pass.
    if not deviation <= tolerance:
        raise WrongWeights(
            f"the engine does not hold version {manifest.version}: its log-probs of the probe are off by "
            f"{deviation:.2g} of their size (at most {tolerance:g})"
        )
    return Verification(w.BY_PROBE, deviation)


def relative_deviation(found: list[float], expected: list[float]) -> float:
    """Sum of |Δ| of two lists of log-probs, as a share of the sum of |expected|; infinite if it can't be told.

    A share, because what is rounded grows with the logits: those of the probe's tokens, which no model finds likely.
    """
    size = sum(abs(logprob) for logprob in expected)
    if len(found) != len(expected) or not size:
        return float("inf")
    return sum(abs(one - other) for one, other in zip(found, expected, strict=True)) / size


def _compare(manifest: w.Manifest, held: dict[str, int]) -> None:
    published = dict(zip((tensor.name for tensor in manifest.tensors), manifest.checksums, strict=True))
    wrong = [name for name, checksum in published.items() if held.get(name) != checksum]
    if wrong:
        some = ", ".join(wrong[:3]) + (" and others" if wrong[3:] else "")
        raise WrongWeights(f"the engine does not hold version {manifest.version}: checksum of {some} differs")
