"""Activation checkpointing and compilation of layers: gradients stay, work and memory change."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.configs import RunConfig
from slipstream.learner.data.packing import MicroBatch, all_actions, pack
from slipstream.learner.models.load import load_model
from slipstream.learner.models.scoring import score_actions
from slipstream.learner.parallel.mesh import World
from tests.contract.families import write_family
from tests.learner.recorded import VOCABULARY, options_of, run_config

MakeConfig = Callable[..., RunConfig]


def batch_of(*lengths: int) -> MicroBatch:
    rng = np.random.default_rng(sum(lengths))
    (batch,) = pack([all_actions(rng.integers(0, VOCABULARY, length)) for length in lengths], token_budget=64)
    return batch


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch lacks types here
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **(kwargs or {}))


def gradients(config: RunConfig, world: World, *batches: MicroBatch) -> tuple[dict[str, Tensor], int]:
    """Gradients of the sum of all log-probs, and the number of matrix products."""
    assert config.model.path is not None
    model = load_model(config.model.path, options_of(config), world)
    with Products() as products:
        for batch in batches:
            score_actions(model, batch, temperature=1.0).logprobs_A.sum().backward()
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    assert len(found) == len(list(model.named_parameters()))
    return found, products.count


def test_checkpointing_keeps_gradients_and_recomputes(world: World, make_config: MakeConfig) -> None:
    counts = Counter[str]()
    exact, counts["none"] = gradients(make_config(), world, batch_of(9, 14))
    for mode in ("selective", "full"):
        found, counts[mode] = gradients(make_config(activation_checkpointing=mode), world, batch_of(9, 14))
        for name, gradient in exact.items():
            assert torch.equal(found[name], gradient), name
    # A layer has 7 products; the backward pass needs the output of the last for nothing.
    assert counts["full"] - counts["none"] == 2 * 6
    assert counts["selective"] - counts["none"] == 2 * 3


def test_selective_checkpointing_takes_experts_with_a_bias(world: World, tmp_path: Path) -> None:
    write_family(tmp_path, "gpt-oss")
    (exact, _), (found, _) = (
        gradients(run_config(tmp_path, tmp_path, activation_checkpointing=mode), world, batch_of(9, 14))
        for mode in ("none", "selective")
    )
    for name, gradient in exact.items():
        assert torch.equal(found[name], gradient), name


def test_offloaded_weights_have_the_same_gradients(world: World, make_config: MakeConfig) -> None:
    exact, _ = gradients(make_config(), world, batch_of(9, 14))
    found, _ = gradients(make_config(offload=True), world, batch_of(9, 14))
    for name, gradient in exact.items():
        whole: Any = found[name]
        torch.testing.assert_close(whole.full_tensor(), gradient, msg=name)


def test_selective_checkpointing_excludes_compilation(make_config: MakeConfig) -> None:
    with pytest.raises(ValidationError, match=r"learner\.activation_checkpointing.*learner\.compile"):
        make_config(activation_checkpointing="selective", compile=True)
