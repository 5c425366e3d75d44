"""Stands where torchvision would, whose published wheels need CUDA: text models only import its names."""

import sys
from unittest.mock import MagicMock

__version__ = "0.28.0"  # transformers asks; that of torch 2.13

for _name in ("io", "ops", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    sys.modules[f"{__name__}.{_name}"] = MagicMock()
io, ops, transforms = (sys.modules[f"{__name__}.{_name}"] for _name in ("io", "ops", "transforms"))
