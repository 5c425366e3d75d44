"""Which log-probs of a probe show that an engine holds a version."""

import pytest

from slipstream.buffer.wire.weights import protocol as w
from slipstream.configs import RunConfig
from slipstream.rollout_servers.weights.verify import WrongWeights, verify
from tests.rollout_servers.scripted import ScriptedEngine

OF_SMOLLM2 = [-15.0] * 31
"""What SmolLM2-135M thinks of random tokens, on average."""


async def probed(dtype: str, *, off: float, expected: list[float]) -> None:
    """Verifies a version whose probe's log-probs an engine finds larger and smaller by `off`, in turn."""
    config = RunConfig.model_validate({"model": {"build": "digits", "dtype": dtype}})
    engine = ScriptedEngine(logprobs=[each + off * (-1) ** place for place, each in enumerate(expected)])
    probe = w.Probe(token_ids=list(range(len(expected) + 1)), logprobs=expected)
    manifest = w.Manifest(version=1, tensors=[], bucket_bytes=1, evaluate=False, probe=probe)
    assert (await verify(engine, manifest, config.weights, dtype=config.model.dtype_here)).how == w.BY_PROBE


@pytest.mark.parametrize(("dtype", "rounding"), [("bfloat16", 0.087), ("float32", 3e-5)])
async def test_rounding_of_unlikely_tokens_passes_verification(dtype: str, rounding: float) -> None:
    await probed(dtype, off=rounding, expected=OF_SMOLLM2)


@pytest.mark.parametrize(
    ("dtype", "off"),
    # One layer without its queries; the version before, at a learning rate of 1e-5.
    [("bfloat16", 0.38), ("float32", 0.013)],
)
async def test_wrong_weights_of_a_large_model_are_found_out(dtype: str, off: float) -> None:
    with pytest.raises(WrongWeights, match=rf"off by {off / 15:.2g} of their size"):
        await probed(dtype, off=off, expected=OF_SMOLLM2)


@pytest.mark.parametrize("expected", [[], [0.0], [float("nan")]])
async def test_a_probe_that_says_nothing_verifies_nothing(expected: list[float]) -> None:
    with pytest.raises(WrongWeights):
        await probed("bfloat16", off=0.0, expected=expected)
