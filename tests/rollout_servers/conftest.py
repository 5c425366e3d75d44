"""The digits model's folder."""

from pathlib import Path

import pytest
import torch

from slipstream.configs.tiny_model import build_digits_model

# More threads only get in each other's way in models of this size, as in the processes of a run.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the digits tokenizer; not to be written to."""
    folder = tmp_path_factory.mktemp("digits") / "model"
    build_digits_model(folder, seed=0)
    return folder
