"""Training steps of other loops for `slipstream bench learner`; needs torch and transformers, and TRL for `trl`.

Usage: learner_loops.py plain|trl FOLDER. `FOLDER/case.json` has the step (see `learner.py`), `FOLDER/model` the initial
model; writes `FOLDER/result.json`.
"""

import json
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

torch: Any = import_module("torch")
transformers: Any = import_module("transformers")

CLIP, CLIP_NORM = 0.2, 1.0


def plain_step(folder: Path, case: dict[str, Any]) -> Callable[[], None]:
    """PPO on packed micro-batches: sequences end to end, their boundaries in the positions, and all logits."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=case["lr"])
    batches = packed(case["sequences"], case["token_budget"])
    total = sum(len(tokens) - 1 for tokens in case["sequences"])

    def step() -> None:
        optimizer.zero_grad()
        for rows in batches:
            ids = torch.cat([torch.tensor(case["sequences"][row][:-1]) for row in rows])
            actions = torch.cat([torch.tensor(case["sequences"][row][1:]) for row in rows])
            positions = torch.cat([torch.arange(len(case["sequences"][row]) - 1) for row in rows])
            advantages = torch.cat(
                [torch.full((len(case["sequences"][row]) - 1,), case["advantages"][row]) for row in rows]
            )
            logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
            logprobs = logits.log_softmax(-1).gather(1, actions[:, None])[:, 0]
            ratio = (logprobs - logprobs.detach()).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            loss = -torch.minimum(ratio * advantages, clipped * advantages).sum() / total
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()

    return step


def packed(sequences: Sequence[Sequence[int]], budget: int) -> list[list[int]]:
    """Rows of each micro-batch, longest first, by first fit."""
    bins: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(sequences)), key=lambda row: -len(sequences[row])):
        tokens = len(sequences[row]) - 1
        place = next((index for index, left in enumerate(room) if left >= tokens), None)
        if place is None:
            bins.append([])
            room.append(budget)
            place = len(bins) - 1
        bins[place].append(row)
        room[place] -= tokens
    return bins


def trl_step(folder: Path, case: dict[str, Any]) -> Callable[[], None]:
    """The loss of TRL's GRPOTrainer on padded micro-batches, with its optimizer; generation is left out."""
    trl, datasets = import_module("trl"), import_module("datasets")
    trainer = trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=trl.GRPOConfig(
            output_dir=str(folder / "trl"),
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            learning_rate=case["lr"],
            beta=0.0,
            num_generations=2,
            per_device_train_batch_size=2,
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": "a"}] * 2),
        processing_class=tokenizer(folder / "model"),
    )
    trainer.create_optimizer()
    # As `train` sets it; the loss of each micro-batch is already a share of all tokens'.
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation
    model = trainer.model.train()
    batches = padded(case)

    def step() -> None:
        trainer.optimizer.zero_grad()
        for batch in batches:
            trainer.compute_loss(model, dict(batch)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        trainer.optimizer.step()

    return step


def tokenizer(folder: Path) -> Any:
    """A tokenizer of one word; the trainer wants one, though nothing is encoded."""
    words = import_module("tokenizers")
    own = words.Tokenizer(words.models.WordLevel({"a": 0, "<pad>": 1, "<eos>": 2}, unk_token="a"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="<pad>", eos_token="<eos>", name_or_path=str(folder)
    )


def padded(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Micro-batches of as many rows as fit the token budget when they have the mean length, in random order."""
    sequences, advantages = case["sequences"], case["advantages"]
    total = sum(len(tokens) - 1 for tokens in sequences)
    rows = max(1, case["token_budget"] * len(sequences) // total)
    order = random.Random(0).sample(range(len(sequences)), len(sequences))
    batches = []
    for first in range(0, len(order), rows):
        chosen = order[first : first + rows]
        width = max(len(sequences[row]) for row in chosen) - 1
        ids = torch.ones(len(chosen), width, dtype=torch.long)
        mask = torch.zeros(len(chosen), width, dtype=torch.long)
        for place, row in enumerate(chosen):
            answer = sequences[row][1:]
            ids[place, : len(answer)] = torch.tensor(answer)
            mask[place, : len(answer)] = 1
        prompts = torch.tensor([[sequences[row][0]] for row in chosen])
        batches.append(
            {
                "prompt_ids": prompts,
                "prompt_mask": torch.ones_like(prompts),
                "completion_ids": ids,
                "completion_mask": mask,
                "advantages": torch.tensor([advantages[row] for row in chosen]),
                "num_items_in_batch": torch.tensor(total),
            }
        )
    return batches


def peak_bytes() -> int:
    """Largest resident memory of this process so far."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None, "Linux lists it"
    return 1024 * int(found[1])


def measure(loop: str, folder: Path) -> dict[str, float]:
    """Median duration of a step after a first one, and the process's peak memory."""
    case = json.loads((folder / "case.json").read_text(encoding="utf-8"))
    torch.set_num_threads(case["threads"])
    step = {"plain": plain_step, "trl": trl_step}[loop](folder, case)
    durations_s = []
    for _ in range(1 + case["steps"]):
        began = time.perf_counter()
        step()
        durations_s.append(time.perf_counter() - began)
    return {"step_s": median(durations_s[1:]), "process_bytes": peak_bytes()}


if __name__ == "__main__":
    at = Path(sys.argv[2])
    (at / "result.json").write_text(json.dumps(measure(sys.argv[1], at)), encoding="utf-8")
