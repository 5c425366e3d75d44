"""The demo's training with TRL's GRPOTrainer. Runs in an environment that has TRL and not slipstream.

Usage: demo_trl.py FOLDER. `FOLDER/task.json` has tasks and settings (see `demo.py`), `FOLDER/model` the initial model;
writes `FOLDER/result.json`.
"""

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

trl: Any = import_module("trl")
datasets: Any = import_module("datasets")
torch: Any = import_module("torch")
transformers: Any = import_module("transformers")

Pair = tuple[str, str]
"""Prompt and reference."""


def digit_match(completions: list[str], reference: list[str], **_: object) -> list[float]:
    """Share of right digits, as the demo's reward."""
    return [
        sum(given == right for given, right in zip(text, wanted, strict=False)) / len(wanted)
        for text, wanted in zip(completions, reference, strict=True)
    ]


def train(folder: Path, task: dict[str, Any]) -> dict[str, float]:
    """Trains and evaluates; returns time and CPU time of a step, and the greedy score on the held-out tasks."""
    settings, tokens = task["settings"], task["answer_tokens"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    arguments = trl.GRPOConfig(
        output_dir=str(folder / "trl"),
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        lr_scheduler_type="linear",
        beta=0.0,
        max_completion_length=tokens,
        generation_kwargs={"min_new_tokens": tokens},  # no end of sequence, as with the demo's ignore_eos
        **settings,
    )
    rows = [{"prompt": prompt, "reference": reference} for prompt, reference in task["train"]]
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=digit_match,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[StepClock()],
    )
    trainer.train()
    (clock,) = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, StepClock)]
    return clock.means() | {"score": evaluate(model, tokenizer, task["eval"], tokens)}


class StepClock(transformers.TrainerCallback):  # type: ignore[misc]
    """Times of the training steps."""

    def __init__(self) -> None:
        self._began: tuple[float, float] | None = None
        self._steps = 0

    def on_step_begin(self, *_: object, **__: object) -> None:
        """Called by the trainer."""
        if self._began is None:
            self._began = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: object, **__: object) -> None:
        """Called by the trainer."""
        self._steps += 1
        self._ended = time.perf_counter(), time.process_time()

    def means(self) -> dict[str, float]:
        """Seconds and CPU seconds of a step."""
        assert self._began is not None, "no step was made"
        wall_s, cpu_s = (end - begin for begin, end in zip(self._began, self._ended, strict=True))
        return {"step_s": wall_s / self._steps, "cpu_s": cpu_s / self._steps}


def evaluate(model: Any, tokenizer: Any, pairs: list[Pair], tokens: int) -> float:
    """Share of tasks with an exact greedy answer."""
    inputs = tokenizer([prompt for prompt, _ in pairs], return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    with torch.inference_mode():
        ids = model.eval().generate(**inputs, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens)
    answers = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [answer == reference for answer, (_, reference) in zip(answers, pairs, strict=True)]
    return right.count(True) / len(right)


if __name__ == "__main__":
    at = Path(sys.argv[1])
    result = train(at, json.loads((at / "task.json").read_text(encoding="utf-8")))
    (at / "result.json").write_text(json.dumps(result), encoding="utf-8")
