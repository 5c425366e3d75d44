"""How much smaller the differences between versions are than the versions, and how fast they are made and applied.

`python -m slipstream.tools.bench.delta MODEL_FOLDER --lr 1e-6 --steps 3 --dtype bfloat16`

A model is trained for a few steps: AdamW on fp32 master weights, next-token loss on random tokens, gradients clipped to
1. Weights that were trained before lie anywhere between two bfloat16 numbers; those of a model that was loaded from
bfloat16 lie exactly on one, and fewer of them leave it in the first steps: `--spread` moves them about first.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from slipstream.buffer.wire.weights import delta
from slipstream.buffer.wire.weights.protocol import TensorInfo
from slipstream.learner.weights.snapshot import Snapshot, SnapshotTaker

BATCH, TOKENS = 2, 64


def main() -> None:
    """Prints a row for each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a Hugging Face model folder")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--spread", action="store_true", help="as if the model had been trained for long")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    if arguments.spread:
        _spread(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.99), weight_decay=0.0)
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    taker = SnapshotTaker(model, dtype=dtype, bucket_bytes=1 << 20, device=torch.device("cpu"))
    print("step   full MB   delta MB   share of it   changed   encode GB/s   apply GB/s")
    old = _taken(taker, 0)
    for step in range(1, arguments.steps + 1):
        _train(model, optimizer)
        new = _taken(taker, step)
        _row(old, new)
        old = new


def _row(old: Snapshot, new: Snapshot) -> None:
    tensors, step = new.manifest.tensors, new.manifest.version
    before, after = old.data.numpy(), new.data.numpy()
    began = time.perf_counter()
    frame = delta.encode(before, after, tensors, base=step - 1, version=step)
    encoded = time.perf_counter()
    applied = before.copy()
    copied = time.perf_counter()
    delta.apply(frame, applied, tensors, held=step - 1)
    done = time.perf_counter()
    size = after.nbytes
    print(
        f"{step:4}  {size / 1e6:8.2f}   {len(frame) / 1e6:8.3f}   {len(frame) / size:11.2%}   "
        f"{_changed(before, after, tensors):7.2%}   {size / (encoded - began) / 1e9:11.2f}   "
        f"{size / (done - copied) / 1e9:10.2f}"
    )


def _changed(before: delta.Bytes, after: delta.Bytes, tensors: list[TensorInfo]) -> float:
    item = f"<u{tensors[0].item_bytes}"
    return float(np.mean(before.view(item) != after.view(item)))


def _taken(taker: SnapshotTaker, version: int) -> Snapshot:
    snapshot = taker.take(version, evaluate=False, keep=True)
    assert snapshot is not None, "kept"
    return snapshot


def _train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.randint(0, model.config.vocab_size, (BATCH, TOKENS))
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _spread(model: nn.Module) -> None:
    """Moves every weight to somewhere between the bfloat16 numbers halfway to its neighbours."""
    with torch.no_grad():
        for parameter in model.parameters():
            rounded = parameter.to(torch.bfloat16)
            next_ = (rounded.view(torch.int16) + 1).view(torch.bfloat16)
            parameter.add_((torch.rand_like(parameter) - 0.5) * (next_.float() - rounded.float()))


if __name__ == "__main__":
    main()
