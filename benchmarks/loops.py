"""Other loops on the same tasks; runs in an environment with torch, transformers and (but for `plain`) TRL.

Usage: loops.py plain|trl|demo|answers|sft|dpo FOLDER. `FOLDER/case.json` has the step of `plain` and `trl` (see
`learner.py`), the tasks and settings of `demo` (see `demo.py`) and `answers` (see `pipeline_trl.py`) or the rows and
settings of `sft` and `dpo` (see `trainings.py`), `FOLDER/model` the initial model; writes `FOLDER/result.json`.
"""

import json
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

torch: Any = import_module("torch")
transformers: Any = import_module("transformers")

CLIP, CLIP_NORM = 0.2, 1.0
Case = dict[str, Any]


def load(folder: Path) -> Any:
    """The initial model, in fp32."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)


def plain_step(folder: Path, case: Case) -> Callable[[], None]:
    """PPO on packed micro-batches: sequences end to end, their boundaries in the positions, and all logits."""
    model = load(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=case["lr"])
    sequences, batches = case["sequences"], packed(case["sequences"], case["token_budget"])
    total = sum(len(tokens) - 1 for tokens in sequences)

    def step() -> None:
        optimizer.zero_grad()
        for rows in batches:
            lengths = [len(sequences[row]) - 1 for row in rows]
            ids = torch.cat([torch.tensor(sequences[row][:-1]) for row in rows])
            actions = torch.cat([torch.tensor(sequences[row][1:]) for row in rows])
            positions = torch.cat([torch.arange(length) for length in lengths])
            own = torch.tensor([case["advantages"][row] for row in rows])
            advantages = own.repeat_interleave(torch.tensor(lengths))
            logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
            logprobs = logits.log_softmax(-1).gather(1, actions[:, None])[:, 0]
            ratio = (logprobs - logprobs.detach()).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            (-torch.minimum(ratio * advantages, clipped * advantages).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()

    return step


def packed(sequences: Sequence[Sequence[int]], budget: int) -> list[list[int]]:
    """Rows of each micro-batch, longest first, by first fit."""
    bins: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(sequences)), key=lambda row: -len(sequences[row])):
        tokens = len(sequences[row]) - 1
        index = next((index for index, left in enumerate(room) if left >= tokens), len(bins))
        if index == len(bins):
            bins.append([])
            room.append(budget)
        bins[index].append(row)
        room[index] -= tokens
    return bins


def grpo_trainer(model: Any, processing: Any, rows: list[dict[str, str]], reward: Any, **settings: Any) -> Any:
    """TRL's GRPOTrainer on a CPU in fp32."""
    trl, datasets = import_module("trl"), import_module("datasets")
    usual = {"report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "beta": 0.0}
    return trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=trl.GRPOConfig(**usual, **settings),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=processing,
    )


def trl_step(folder: Path, case: Case) -> Callable[[], None]:
    """The loss of TRL's GRPOTrainer on padded micro-batches, with its optimizer; generation is left out."""
    trainer = grpo_trainer(
        load(folder),
        one_word_tokenizer(folder / "model"),
        [{"prompt": "a"}] * 2,
        lambda completions, **_: [0.0] * len(completions),
        output_dir=str(folder / "trl"),
        learning_rate=case["lr"],
        num_generations=2,
        per_device_train_batch_size=2,
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


def one_word_tokenizer(folder: Path) -> Any:
    """The trainer wants a tokenizer, though nothing is encoded."""
    words = import_module("tokenizers")
    own = words.Tokenizer(words.models.WordLevel({"a": 0, "<pad>": 1, "<eos>": 2}, unk_token="a"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="<pad>", eos_token="<eos>", name_or_path=str(folder)
    )


def padded(case: Case) -> list[Case]:
    """Micro-batches of as many rows as fit the token budget when they have the mean length, in random order."""
    sequences, advantages = case["sequences"], case["advantages"]
    total = sum(len(tokens) - 1 for tokens in sequences)
    rows = max(1, case["token_budget"] * len(sequences) // total)
    order = random.Random(0).sample(range(len(sequences)), len(sequences))
    batches = []
    for first in range(0, len(order), rows):
        chosen = order[first : first + rows]
        answers = [torch.tensor(sequences[row][1:]) for row in chosen]
        pad = torch.nn.utils.rnn.pad_sequence
        prompts = torch.tensor([[sequences[row][0]] for row in chosen])
        batches.append(
            {
                "prompt_ids": prompts,
                "prompt_mask": torch.ones_like(prompts),
                "completion_ids": pad(answers, batch_first=True, padding_value=1),
                "completion_mask": pad([torch.ones_like(answer) for answer in answers], batch_first=True),
                "advantages": torch.tensor([advantages[row] for row in chosen]),
                "num_items_in_batch": torch.tensor(total),
            }
        )
    return batches


def measure_step(step: Callable[[], None], case: Case) -> dict[str, float]:
    """Median duration of a step after a first one, and the process's peak memory."""
    durations_s = []
    for _ in range(1 + case["steps"]):
        began = time.perf_counter()
        step()
        durations_s.append(time.perf_counter() - began)
    return {"step_s": median(durations_s[1:]), "process_bytes": peak_bytes()}


def peak_bytes() -> int:
    """Peak memory of this process."""
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert peak is not None, "Linux lists it"
    return 1024 * int(peak[1])


def digit_match(completions: list[str], reference: list[str], **_: object) -> list[float]:
    """Share of right digits, as the demo's reward."""
    return [
        sum(given == right for given, right in zip(text, wanted, strict=False)) / len(wanted)
        for text, wanted in zip(completions, reference, strict=True)
    ]


class StepClock(transformers.TrainerCallback):  # type: ignore[misc]
    """Wall clock and CPU time of the training steps."""

    def __init__(self) -> None:
        self._began: tuple[float, float] | None = None
        self._steps = 0
        self.durations_s: list[float] = []

    def on_step_begin(self, *_: object, **__: object) -> None:
        """Called by the trainer."""
        self._step_began = time.perf_counter()
        if self._began is None:
            self._began = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: object, **__: object) -> None:
        """Called by the trainer."""
        self._steps += 1
        self.durations_s.append(time.perf_counter() - self._step_began)
        self._ended = time.perf_counter(), time.process_time()

    def means(self) -> dict[str, float]:
        """Seconds and CPU seconds of a step."""
        assert self._began is not None, "no step was made"
        wall_s, cpu_s = (end - begin for begin, end in zip(self._began, self._ended, strict=True))
        return {"step_s": wall_s / self._steps, "cpu_s": cpu_s / self._steps}


def train_demo(folder: Path, case: Case) -> dict[str, float]:
    """Trains as the demo does and evaluates: time and CPU time of a step, and the greedy score on held-out tasks."""
    tokens = case["answer_tokens"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    model, clock = load(folder), StepClock()
    trainer = grpo_trainer(
        model,
        tokenizer,
        [{"prompt": prompt, "reference": reference} for prompt, reference in case["train"]],
        digit_match,
        output_dir=str(folder / "trl"),
        save_strategy="no",
        lr_scheduler_type="linear",
        max_completion_length=tokens,
        generation_kwargs={"min_new_tokens": tokens},  # no end of sequence, as with the demo's ignore_eos
        **case["settings"],
    )
    trainer.add_callback(clock)
    trainer.train()
    inputs = tokenizer([prompt for prompt, _ in case["eval"]], return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    with torch.inference_mode():
        ids = model.eval().generate(**inputs, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens)
    answers = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [answer == reference for answer, (_, reference) in zip(answers, case["eval"], strict=True)]
    return clock.means() | {"score": right.count(True) / len(right)}


def favoured_share(answer: str, reference: str, info: Any) -> float:
    """Reward: share of the words with a plus sign."""
    return answer.count("+") / max(1, len(answer.split()))


class AnswersMeter(transformers.TrainerCallback):  # type: ignore[misc]
    """Time, answers and CPU time of each training step; ends the training when its time is up.

    Attributes:
        steps: of each step its seconds, those of generation, the answers' tokens and their mean reward.
        cpu_s: CPU time of the measured steps.
    """

    def __init__(self, *, warm_up_steps: int, seconds: float) -> None:
        self.steps: list[dict[str, float]] = []
        self.cpu_s = 0.0
        self._warm_up_steps, self._seconds = warm_up_steps, seconds
        self._generate_s = 0.0
        self._lengths: list[int] = []
        self._rewards: list[float] = []

    def attach(self, trainer: Any) -> None:
        """Measures a trainer, whose reward function is `reward`."""
        self._generate = trainer._generate_single_turn
        trainer._generate_single_turn = self._timed
        trainer.add_callback(self)

    def _timed(self, *arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        answers = self._generate(*arguments, **options)
        self._generate_s += time.perf_counter() - began
        return answers

    def reward(self, completions: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
        """The reward function, called once with all answers of a step."""
        self._lengths = [len(ids) for ids in completion_ids]
        self._rewards = [favoured_share(text, "", {}) for text in completions]
        return self._rewards

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Called by the trainer."""
        self._ended = time.perf_counter()

    def on_step_end(self, _: object, __: object, control: Any, **___: object) -> None:
        """Called by the trainer."""
        before, self._ended = self._ended, time.perf_counter()
        step = {
            "step_s": self._ended - before,
            "wait_s": self._generate_s,
            "tokens": sum(self._lengths),
            "reward": sum(self._rewards) / len(self._rewards),
        }
        self.steps.append(step)
        self._generate_s = 0.0
        if len(self.steps) == self._warm_up_steps:
            self._began = self._ended, time.process_time()
        elif len(self.steps) > self._warm_up_steps:
            began, cpu_began = self._began
            self.cpu_s = time.process_time() - cpu_began
            control.should_training_stop |= self._ended - began >= self._seconds


def enable_vllm_on_a_cpu() -> None:
    """Lets TRL's colocated vLLM run here: vLLM's own function loads the weights, where TRL's loads them into layers
    that vLLM has packed for the CPU and fails. In float32 as the learner; vLLM would choose bfloat16.
    """
    torch.cpu._init_amx()  # without this permission vLLM's attention can end the process by SIGILL
    generation: Any = import_module("trl.generation.vllm_generation")

    def sync_weights(self: Any) -> None:
        worker = self.llm.llm_engine.model_executor.driver_worker
        worker.model_runner.reload_weights(weights_iterator=self._iter_named_params())
        self.llm.reset_prefix_cache()

    generation.VLLMGeneration.sync_weights = sync_weights
    generation.LLM = partial(generation.LLM, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=1 << 30)


def train_answers(folder: Path, case: Case) -> dict[str, Any]:
    """Trains on answers of many lengths until the time is up: each step, and CPU time of the measured ones."""
    settings, meter = dict(case["settings"]), AnswersMeter(warm_up_steps=case["warm_up_steps"], seconds=case["seconds"])
    if case["engine"] == "vllm":
        enable_vllm_on_a_cpu()
        # As if the log-probs of vLLM and the model were equal: TRL would compute them once more.
        settings |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_importance_sampling_correction": False}
        settings |= {"vllm_max_model_length": case["model_length"]}
    trainer = grpo_trainer(
        load(folder),
        transformers.AutoTokenizer.from_pretrained(folder / "model", padding_side="left"),
        [{"prompt": prompt} for prompt in case["prompts"]],
        meter.reward,
        output_dir=str(folder / "trl"),
        save_strategy="no",
        lr_scheduler_type="constant",
        **settings,
    )
    meter.attach(trainer)
    trainer.train()
    return {"steps": meter.steps, "cpu_s": {"TRL": meter.cpu_s}}


def train_rows(kind: str, folder: Path, case: Case) -> dict[str, Any]:
    """Trains by SFT or DPO on the case's rows in their order: median time of a step, peak memory, loss of each step."""
    trl, datasets = import_module("trl"), import_module("datasets")
    config, trainer_class = {"sft": (trl.SFTConfig, trl.SFTTrainer), "dpo": (trl.DPOConfig, trl.DPOTrainer)}[kind]
    clock = StepClock()
    trainer = trainer_class(
        model=load(folder),
        args=config(
            output_dir=str(folder / "trl"),
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            lr_scheduler_type="constant",
            train_sampling_strategy="sequential",
            max_length=None,
            logging_steps=1,
            **case["settings"],
        ),
        train_dataset=datasets.Dataset.from_list(case["rows"]),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / "model"),
    )
    trainer.add_callback(clock)
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    return {"step_s": median(clock.durations_s[1:]), "process_bytes": peak_bytes(), "losses": losses}


def main(loop: str, folder: Path) -> None:
    """Runs a loop and writes its result."""
    case = json.loads((folder / "case.json").read_text(encoding="utf-8"))
    torch.set_num_threads(case["threads"])
    result: dict[str, Any]
    if loop in ("demo", "answers"):
        result = {"demo": train_demo, "answers": train_answers}[loop](folder, case)
    elif loop in ("sft", "dpo"):
        result = train_rows(loop, folder, case)
    else:
        result = measure_step({"plain": plain_step, "trl": trl_step}[loop](folder, case), case)
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
