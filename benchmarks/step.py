"""Steps of a learner on a random model of any shape: time and peak memory.

`run_case` starts the ranks: `python -m benchmarks.step FOLDER`. They read `FOLDER/case.json`; rank 0 writes
`FOLDER/result.json`.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.workers import Workers, free_port
from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from slipstream.configs.runtime.logging import configure_logging
from slipstream.configs.runtime.processes import raise_malloc_thresholds
from slipstream.learner.cli import end_process
from slipstream.learner.data.balance import SequenceCost, Work, balance_groups
from slipstream.learner.data.buffer_feed import StepData, build_step
from slipstream.learner.models.layers import Checkpointing
from slipstream.learner.parallel.mesh import World, join_world, leave_world
from slipstream.learner.trainers.rl.parts import build_train_step

SHAPES = Path(__file__).parent / "shapes"
MATRIX_ON_GPU, MATRIX_ON_CPU = 8192, 1024
MATRIX_ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model's shape, and a step."""

    model: str
    """Folder with its weights."""
    lengths: list[int]
    """Tokens of the step's sequences, on all ranks together."""
    token_budget: int
    dtype: str = "float32"
    checkpointing: Checkpointing = "none"
    optimizer: str = "adamw"
    lora_rank: int | None = None
    """Of adapters, which alone are trained; None: all weights are."""
    offload: bool = False
    compile: bool = False
    logits_bytes: int = 1 << 29
    keep_freed: bool = False
    """Freed memory stays in the process, as in the learner's."""
    steps: int = 1
    """Measured, after a short one, which fills caches and the optimizer's state."""
    threads: int = 1
    """Of each rank."""

    def config(self, folder: Path) -> RunConfig:
        """The configuration of a run in a folder."""
        return RunConfig.model_validate(
            {
                "run": {"name": "bench", "dir": str(folder)},
                "model": {
                    "path": self.model,
                    "dtype": self.dtype,
                    "lora": None if self.lora_rank is None else {"rank": self.lora_rank},
                },
                "rollout": {"group_size": 1},
                "learner": {
                    "groups_per_step": len(self.lengths),
                    "token_budget": self.token_budget,
                    "logits_bytes": self.logits_bytes,
                    "advantage": "reinforce_plus_plus",
                    "optimizer": {"name": self.optimizer, "lr": 1e-6, "warmup_steps": 0},
                    "activation_checkpointing": self.checkpointing,
                    "offload": self.offload,
                    "compile": self.compile,
                },
            }
        )


@dataclass(frozen=True)
class Result:
    """Measurements of rank 0."""

    step_s: float
    """Median."""
    peak_bytes: float
    """Of tensors on a GPU; on a CPU of resident memory, less that before the model was loaded."""
    process_bytes: float
    """Peak of the process's resident memory."""
    tokens: int
    flops: float
    """Of a step, on all ranks together, without recomputation."""
    matrix_flops_per_s: float
    """Of one large matrix product, in the same dtype, on one rank."""
    ranks: int
    figures: dict[str, float] = field(default_factory=dict)
    """Of the last step."""

    @property
    def utilisation(self) -> float:
        """Share of the ranks' matrix speed (MFU)."""
        return self.flops / self.step_s / self.ranks / self.matrix_flops_per_s


def qwen3(*, vocabulary: int, hidden: int, layers: int, heads: int, kv_heads: int, **changes: Any) -> dict[str, Any]:
    """The config of a small Qwen3."""
    return {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": vocabulary, "hidden_size": hidden,
        "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 64, "max_position_embeddings": 65_536,
        "tie_word_embeddings": False, **changes,
    }  # fmt: skip


def write_model(config: Mapping[str, Any], folder: Path, *, dtype: str, device: str = "cpu") -> Path:
    """Writes a model with random weights; returns its folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    return folder


def shape(name: str) -> dict[str, Any]:
    """The config of a published model, such as Qwen3-8B."""
    values: dict[str, Any] = json.loads((SHAPES / name / "config.json").read_text(encoding="utf-8"))
    return values


def run_case(workers: Workers, case: Case, *, ranks: int, environment: Mapping[str, str] = {}) -> Result:
    """Measures a case in processes of its own. Raises: SlipstreamError when one fails."""
    folder = workers.folder / "case"
    folder.mkdir(exist_ok=True)
    (folder / "case.json").write_text(json.dumps(asdict(case)), encoding="utf-8")
    module = ["--module", __name__] if ranks > 1 else ["-m", __name__]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    command = [sys.executable, *(torchrun if ranks > 1 else []), *module, str(folder)]
    threads = {"OMP_NUM_THREADS": str(case.threads)}
    with workers.command("learner", command, {**threads, **environment}) as child:
        workers.wait(child)
    return Result(**json.loads((folder / "result.json").read_text(encoding="utf-8")))


def _measure(folder: Path) -> None:
    case = Case(**json.loads((folder / "case.json").read_text(encoding="utf-8")))
    torch.set_num_threads(case.threads)
    if case.keep_freed:
        raise_malloc_thresholds()
    config = case.config(folder)
    world = join_world()
    matrix = matrix_flops_per_s(world.device, getattr(torch, case.dtype))
    before = _resident_bytes("VmRSS")
    train_step = build_train_step(config, Path(case.model), world)
    cost = SequenceCost.of_model(Path(case.model))
    data = [step_data(lengths, config, cost, world) for lengths in ([8] * len(case.lengths), case.lengths)]
    train_step.run(data[0], unpublished_steps=0)
    _reset_peak(world.device)
    durations_s, figures = [], dict[str, float]()
    for _ in range(case.steps):
        began = time.perf_counter()
        figures = train_step.run(data[1], unpublished_steps=0)
        durations_s.append(time.perf_counter() - began)
    on_gpu = world.device.type == "cuda"
    result = Result(
        step_s=median(durations_s),
        peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else _resident_bytes("VmHWM") - before,
        process_bytes=_resident_bytes("VmHWM"),
        tokens=sum(case.lengths),
        flops=figures["flops"],
        matrix_flops_per_s=matrix,
        ranks=world.size,
        figures=figures,
    )
    if world.is_root:
        (folder / "result.json").write_text(json.dumps(asdict(result)), encoding="utf-8")
    leave_world()


def step_data(lengths: Sequence[int], config: RunConfig, cost: SequenceCost, world: World) -> StepData:
    """This rank's sequences, shared out as the feed does."""
    rng = np.random.default_rng(0)
    learner, model = config.learner, config.model.path
    assert model is not None, "a case has a model"
    vocabulary = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    groups = [_group(rng.integers(4, vocabulary, length), number) for number, length in enumerate(lengths)]
    shares, plan = balance_groups(
        [[Work.of_length(length - 1)] for length in lengths], world.size, budget=learner.token_budget, cost=cost
    )
    return build_step(
        [[(groups[index], 1.0) for index in shares[world.rank]]],
        algorithms=config.algorithms,
        rewards=[],
        step=1,
        consuming_version=0,
        plans=[plan] if world.size > 1 else None,
    )


def _group(tokens: Any, number: int) -> m.Group:
    mask = (np.arange(len(tokens)) > 0).astype(m.MASK_DTYPE)
    trajectory = m.Trajectory(
        token_ids=tokens.astype(m.TOKEN_DTYPE).tobytes(),
        action_mask=mask.tobytes(),
        behaviour_logprobs=(-10.0 * mask).astype(m.LOGPROB_DTYPE).tobytes(),
        spans=[m.VersionSpan(version=0, start=1, end=len(tokens))],
        reward=float(number % 2),
        scores={},
        finish_reason="length",
    )
    return m.Group(id=str(number), kind=m.TRAIN, epoch=0, indices=[number], trajectories=[trajectory])


def matrix_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of one large matrix product."""
    size = MATRIX_ON_GPU if device.type == "cuda" else MATRIX_ON_CPU
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    durations_s = []
    for _ in range(MATRIX_ROUNDS):
        _synchronise(device)
        began = time.perf_counter()
        torch.mm(left, right)
        _synchronise(device)
        durations_s.append(time.perf_counter() - began)
    return float(2 * size**3 / min(durations_s))


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_of(call: Callable[[], None]) -> float:
    """Peak of the process's resident memory during a call, less that before it."""
    before = _resident_bytes("VmRSS")
    _reset_peak(torch.device("cpu"))
    call()
    return _resident_bytes("VmHWM") - before


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _resident_bytes(name: str) -> float:
    """Resident memory of this process: VmRSS, or its peak VmHWM."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None, "Linux lists it"
    return 1024.0 * int(found[1])


if __name__ == "__main__":
    configure_logging("bench", level="warning", folder=None)
    _measure(Path(sys.argv[1]))
    end_process(0)
