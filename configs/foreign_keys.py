"""Keys of verl and TRL, and ours in their place. `docs/reference/foreign-keys.md` is generated from this table."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

VERL: Final[Mapping[str, str]] = {
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.lora_rank": "model.lora.rank",
    "actor_rollout_ref.model.lora_alpha": "model.lora.alpha",
    "actor_rollout_ref.model.target_modules": "model.lora.targets",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "learner.activation_checkpointing: full",
    "actor_rollout_ref.actor.optim.lr": "learner.optimizer.lr",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "learner.optimizer.warmup_steps",
    "actor_rollout_ref.actor.optim.weight_decay": "learner.optimizer.weight_decay",
    "actor_rollout_ref.actor.grad_clip": "learner.optimizer.clip_norm",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "learner.updates_per_step (a number of updates, not of prompts)",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "learner.token_budget (in tokens)",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "learner.token_budget",
    "actor_rollout_ref.actor.clip_ratio": "learner.loss.clip_low and learner.loss.clip_high",
    "actor_rollout_ref.actor.clip_ratio_low": "learner.loss.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "learner.loss.clip_high",
    "actor_rollout_ref.actor.entropy_coeff": "learner.loss.entropy_bonus",
    "actor_rollout_ref.actor.loss_agg_mode": "learner.loss.aggregation",
    "actor_rollout_ref.actor.use_kl_loss": "learner.kl.place: loss",
    "actor_rollout_ref.actor.kl_loss_coef": "learner.kl.coefficient",
    "actor_rollout_ref.actor.kl_loss_type": "learner.kl.estimator",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "learner.parallel.cp",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "learner.offload",
    "actor_rollout_ref.rollout.name": "rollout.engine.name",
    "actor_rollout_ref.rollout.n": "rollout.group_size",
    "actor_rollout_ref.rollout.temperature": "rollout.sampling.temperature",
    "actor_rollout_ref.rollout.top_k": "rollout.sampling.top_k",
    "actor_rollout_ref.rollout.top_p": "rollout.sampling.top_p",
    "actor_rollout_ref.rollout.max_model_len": "rollout.engine.max_model_len",
    "actor_rollout_ref.rollout.max_num_seqs": "rollout.engine.max_sequences",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.engine.options.tensor_parallel_size",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "rollout.engine.options.gpu_memory_utilization",
    "actor_rollout_ref.rollout.multi_turn": "env.tools and rollout.episode",
    "algorithm.adv_estimator": "learner.advantage.name",
    "algorithm.gamma": "learner.advantage.gamma",
    "algorithm.lam": "learner.advantage.lam",
    "algorithm.use_kl_in_reward": "learner.kl.place: reward",
    "algorithm.kl_ctrl.kl_coef": "learner.kl.coefficient",
    "critic.model.path": "learner.critic.path",
    "critic.optim.lr": "learner.critic.optimizer.lr",
    "custom_reward_function": "rewards, with module:attribute as name",
    "data.train_files": "env.options.path (env rows)",
    "data.val_files": "env.options.eval_path (env rows)",
    "data.train_batch_size": "learner.groups_per_step",
    "data.max_prompt_length": "rollout.engine.max_model_len (prompt and answer) and rollout.skip_long_prompts",
    "data.max_response_length": "rollout.sampling.max_tokens",
    "reward_model": "rewards, with reward_model as name",
    "trainer.total_epochs": "learner.steps (a number of steps)",
    "trainer.total_training_steps": "learner.steps",
    "trainer.save_freq": "learner.checkpoint.every_steps",
    "trainer.test_freq": "eval.every_steps",
    "trainer.logger": "tracking",
    "trainer.project_name": "tracking",
    "trainer.experiment_name": "run.name",
    "trainer.default_local_dir": "run.dir",
    "trainer.resume_mode": "nothing: `slipstream up` continues an unfinished run, `--fresh` starts over",
    "trainer.n_gpus_per_node": "nothing: the number of ranks that torchrun starts",
    "trainer.nnodes": "nothing: the number of ranks that torchrun starts",
}  # fmt: skip
"""Keys of verl, by dotted path."""
TRL: Final[Mapping[str, str]] = {
    "model_name_or_path": "model.path",
    "dataset_name": "env.options.path (env rows)",
    "output_dir": "run.dir",
    "run_name": "run.name",
    "report_to": "tracking",
    "reward_funcs": "rewards",
    "reward_weights": "rewards, with a weight each",
    "num_generations": "rollout.group_size",
    "max_completion_length": "rollout.sampling.max_tokens",
    "max_prompt_length": "rollout.engine.max_model_len (prompt and answer) and rollout.skip_long_prompts",
    "temperature": "rollout.sampling.temperature",
    "top_k": "rollout.sampling.top_k",
    "top_p": "rollout.sampling.top_p",
    "use_vllm": "rollout.engine.name: vllm",
    "vllm_mode": "rollout.engine.core",
    "vllm_gpu_memory_utilization": "rollout.engine.options.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "rollout.engine.options.tensor_parallel_size",
    "learning_rate": "learner.optimizer.lr",
    "weight_decay": "learner.optimizer.weight_decay",
    "warmup_steps": "learner.optimizer.warmup_steps",
    "lr_scheduler_type": "learner.optimizer.final_lr_fraction (the decay is linear; 1: none)",
    "max_grad_norm": "learner.optimizer.clip_norm",
    "optim": "learner.optimizer.name",
    "max_steps": "learner.steps",
    "num_train_epochs": "learner.steps (a number of steps)",
    "per_device_train_batch_size": "learner.groups_per_step (in groups, of all ranks) and learner.token_budget",
    "gradient_accumulation_steps": "learner.token_budget (a step is split by tokens)",
    "num_iterations": "learner.updates_per_step",
    "beta": "learner.kl.coefficient",
    "use_bias_correction_kl": "learner.kl.estimator: k3*",
    "off_policy_mask_threshold": "learner.correction.rejections, with only_bad and low = e^-threshold",
    "top_entropy_quantile": "learner.loss.top_entropy (1 less the quantile)",
    "epsilon": "learner.loss.clip_low",
    "epsilon_high": "learner.loss.clip_high",
    "loss_type": "learner.loss.name and learner.loss.aggregation",
    "scale_rewards": "learner.advantage.name (dr_grpo: unscaled)",
    "mask_truncated_completions": "buffer.filters, with length and drop_truncated: true",
    "importance_sampling_level": "learner.loss.name: gspo (sequences)",
    "gradient_checkpointing": "learner.activation_checkpointing: full",
    "bf16": "model.dtype: bfloat16",
    "seed": "run.seed",
    "save_steps": "learner.checkpoint.every_steps",
    "save_total_limit": "learner.checkpoint.keep",
    "eval_steps": "eval.every_steps",
    "peft_config": "model.lora",
}  # fmt: skip
"""Settings of TRL, by name."""
_VERL_ONLY: Final = frozenset({"actor_rollout_ref", "algorithm", "trainer"})
"""Sections that nobody writes by mistake for one of this project."""


def foreign_key(path: str, value: Any) -> list[str]:
    """Answers to an unknown key of another framework, one for each key below it; empty for other keys.

    Args:
        path: dotted, without the index of a list's entry.
        value: what the user gave.
    """
    of_verl = path.partition(".")[0] in _VERL_ONLY
    answers = []
    for key in _paths(path, value):
        framework, ours = ("verl", VERL[key]) if key in VERL else ("TRL", TRL.get(key.rpartition(".")[2], ""))
        if ours:
            answers.append(f"{key}: a key of {framework}; here it is {ours}")
        elif of_verl:
            answers.append(f"{key}: {path.partition('.')[0]} is a section of verl; docs/coming-from.md has its keys")
    return answers


def _paths(path: str, value: Any) -> Iterator[str]:
    """The path itself if it is known, else those below it."""
    if path in VERL or not isinstance(value, Mapping) or not value:
        yield path
        return
    for key, below in value.items():
        yield from _paths(f"{path}.{key}", below)
