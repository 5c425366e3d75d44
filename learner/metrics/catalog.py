"""The catalogue of all metrics: name, unit, meaning, and their names in verl, TRL and prime-rl.

`docs/reference/metrics.md` is generated from it. Another's name stands where that metric has the same meaning.
Sources: verl `verl/trainer/ppo/metric_utils.py`, its actor and its guide to asynchronous training; TRL 1.16
`grpo_trainer.py`; prime-rl `orchestrator.py`, `docs/`.
"""

# ruff: noqa: E501, RUF001  (one line for each metric, in the notation of papers)

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Final, Literal

Kind = Literal["step", "eval", "summary"]
Names = Literal["verl", "trl", "prime-rl"]


@dataclass(frozen=True)
class Metric:
    """One or more metrics that share unit and meaning; `<part>` in a name stands for any text."""

    names: tuple[str, ...]
    unit: str
    meaning: str
    elsewhere: Mapping[Names, tuple[str, ...]] = field(default_factory=dict)
    """Its names in other trainers, several where they have several for it; of a single metric only."""

    def matches(self, key: str) -> bool:
        """True if `key`, as it stands in a record, is one of these metrics."""
        patterns = (
            re.sub(r"<\w+>", ".+", re.escape(name).replace(r"\<", "<").replace(r"\>", ">")) for name in self.names
        )
        return any(re.fullmatch(pattern, key) for pattern in patterns)


def _metric(names: str, unit: str, meaning: str, *, verl: str = "", trl: str = "", prime_rl: str = "") -> Metric:
    elsewhere: dict[Names, tuple[str, ...]] = {
        "verl": tuple(verl.split()), "trl": tuple(trl.split()), "prime-rl": tuple(prime_rl.split()),
    }  # fmt: skip
    return Metric(tuple(names.split()), unit, meaning, {name: given for name, given in elsewhere.items() if given})


STEP: Final = (
    _metric("time_s", "s", "since the start of the run, or of its part since a restart"),
    _metric("step steps", "steps", "steps done, of how many"),
    _metric("policy_version", "version", "latest published version after this step"),
    _metric(
        "reward",
        "",
        "mean of the episodes' rewards",
        verl="critic/rewards/mean critic/score/mean",
        trl="reward",
        prime_rl="reward/all/mean",
    ),
    _metric("reward_std", "", "their standard deviation", trl="reward_std", prime_rl="reward/all/std"),
    _metric(
        "groups_without_spread",
        "0–1",
        "share of groups whose episodes have equal rewards: nothing to learn from",
        trl="frac_reward_zero_std",
    ),
    _metric(
        "score/<reward>",
        "",
        "mean score by that reward, also at weight 0; `score/overlong`: the penalty of `rollout.overlong`",
        trl="rewards/<reward>/mean",
    ),
    _metric(
        "answer_tokens",
        "tokens",
        "actions per episode: mean",
        verl="response_length/mean",
        trl="completions/mean_length",
        prime_rl="decode_len/all/mean",
    ),
    _metric("answer_tokens_min", "tokens", "the same: least", verl="response_length/min", trl="completions/min_length"),
    _metric(
        "answer_tokens_max",
        "tokens",
        "the same: most",
        verl="response_length/max",
        trl="completions/max_length",
        prime_rl="decode_len/all/max",
    ),
    _metric(
        "answers_cut_off",
        "0–1",
        "share of episodes ended by `rollout.sampling.max_tokens` or `rollout.episode.tokens`",
        verl="response_length/clip_ratio",
        trl="completions/clipped_ratio",
        prime_rl="is_truncated/all/mean",
    ),
    _metric(
        "ended/done ended/stop ended/length ended/turns ended/tokens ended/wall",
        "0–1",
        "share of episodes ended by their session, by the end of a single answer, by `rollout.sampling.max_tokens`, or "
        "by that budget under `rollout.episode`",
    ),
    _metric("trajectories_per_episode", "", "more than 1 where the chat template rewrites earlier turns"),
    _metric(
        "staleness_mean",
        "versions",
        "publications between the stalest of a trajectory's actions and the step: mean",
        verl="training/off_policy/trajectory_staleness_worst/mean",
        prime_rl="off_policy/mean",
    ),
    _metric(
        "staleness_max",
        "versions",
        "the same: most",
        verl="training/off_policy/trajectory_staleness_worst/max",
        prime_rl="off_policy/max",
    ),
    _metric(
        "staleness_in_flight",
        "versions",
        "mean part that arose during generation: between stalest and freshest action",
        prime_rl="off_policy/in_flight/mean",
    ),
    _metric(
        "staleness_in_queue",
        "versions",
        "mean part that arose in the queue: staleness of the freshest action",
        verl="training/off_policy/trajectory_staleness/mean",
        prime_rl="off_policy/in_queue/mean",
    ),
    _metric(
        "loss",
        "",
        "loss under `learner.loss.aggregation`, mean over the step's updates, with further streams the weighted sum of all; "
        "of rows of files, mean over the terms",
        verl="actor/pg_loss",
        trl="loss",
        prime_rl="loss/mean",
    ),
    _metric(
        "rl_loss ce_loss ref_kl_loss",
        "",
        "part of each of `learner.streams` in it, without its weight; of `ce` in nats per token, of `ref_kl` an estimate of KL(π_θ‖π_ref) in nats",
    ),
    _metric("ce_tokens ref_kl_tokens", "tokens", "tokens of these streams"),
    _metric("ess", "0–1", "effective sample size of w = π_θ/μ, (Σw)²/(n·Σw²); 1 when all are equal"),
    _metric("weight_mean", "", "mean of w; 1 in expectation", trl="sampling/importance_sampling_ratio/mean"),
    _metric(
        "kl_k1",
        "nats",
        "KL(μ‖π_θ) by k1 = −log(π_θ/μ), unbiased; log ratios within ±20; verl's is from its old policy, which is μ there if nothing is scored again",
        verl="actor/ppo_kl",
    ),
    _metric("kl_k3", "nats", "the same by k3 = π_θ/μ − 1 − log(π_θ/μ), non-negative and less noisy"),
    _metric(
        "chi2_token",
        "",
        "χ²(π_θ‖μ) = E[w²] − 1 of the actions' ratios; log ratios within ±20",
        verl="rollout_corr/chi2_token",
    ),
    _metric("chi2_sequence", "", "the same of their products over a sequence", verl="rollout_corr/chi2_seq"),
    _metric(
        "clip_fraction",
        "0–1",
        "actions whose gradient the ratio's clip stopped",
        verl="actor/pg_clipfrac",
        trl="clip_ratio/region_mean",
    ),
    _metric("truncated_fraction", "0–1", "actions whose importance weight was capped, or set to 0 by a band"),
    _metric("masked_fraction", "0–1", "actions left out by the correction (rejections, second moment, veto)"),
    _metric(
        "masked/<reason>",
        "0–1",
        "the same by reason: `<level>_<estimator>` of a rejection, `veto`, `second_moment`; reasons may overlap",
    ),
    _metric("entropy", "nats", "mean entropy of the target policy", verl="actor/entropy", trl="entropy"),
    _metric(
        "mismatch_tokens",
        "actions",
        "actions generated by the learner's present version; the next metrics are over these, and absent without any",
    ),
    _metric(
        "mismatch_abs",
        "nats",
        "mean |log π_prox − log μ|: engine against learner at the same weights",
        trl="sampling/sampling_logp_difference/mean",
    ),
    _metric(
        "mismatch_probability",
        "0–1",
        "the same of the probabilities: mean |π_prox − μ|",
        verl="training/rollout_probs_diff_mean",
    ),
    _metric("mismatch_k1", "nats", "KL(μ‖π_prox) on them by k1"),
    _metric("mismatch_k3", "nats", "the same by k3", prime_rl="mismatch_kl/all/mean"),
    _metric("actions", "actions", "actions trained on"),
    _metric("tokens", "tokens", "input tokens trained on, prompts included", verl="perf/total_num_tokens"),
    _metric("answers", "episodes", "episodes trained on"),
    _metric("prefix_saving", "0–1", "share of `tokens` that is not computed again, because sequences share prefixes"),
    _metric(
        "flops",
        "FLOP",
        "forward and backward passes over those computed, by the model's shape (`learner/models/flops.py`)",
    ),
    _metric(
        "mfu",
        "0–1",
        "`flops` over `train_s` as share of the learner's GPUs' peak; in bfloat16, on a GPU whose peak is known",
        verl="perf/mfu/actor",
        prime_rl="perf/mfu",
    ),
    _metric("tokens_trained_per_s", "tokens/s", "`tokens` over `step_s`", prime_rl="perf/throughput"),
    _metric("tokens_per_gpu_s", "tokens/s", "the same, divided by `gpus`", verl="perf/throughput"),
    _metric("gpus", "GPUs", "of learner and rollout servers; shared ones count once"),
    _metric("power_w", "W", "mean power of rank 0's GPU since the step before"),
    _metric("cost_per_million_tokens", "", "of `gpus` for `step_s`; with `tracking.price_per_gpu_hour`"),
    _metric(
        "reference_kl",
        "nats",
        "estimate of KL(π_θ‖π_ref) by `learner.kl.estimator`; with `learner.kl`",
        verl="actor/kl_loss",
        trl="kl",
    ),
    _metric("kl_coefficient", "", "its coefficient", verl="actor/kl_coef"),
    _metric(
        "distill/kl",
        "nats",
        "mean divergence from the teacher per distilled action, by `learner.distill.loss`; with `advantage` log π_θ − log π_T",
    ),
    _metric("distill/agreement", "0–1", "share of these at which policy and teacher hold the same token likeliest"),
    _metric(
        "distill/share",
        "0–1",
        "share of all actions that is distilled; others have no teacher, or lack what its context names",
    ),
    _metric("value_loss", "", "the critic's loss; with `learner.critic`", verl="critic/vf_loss"),
    _metric("value_clip_fraction", "0–1", "share of clipped values", verl="critic/vf_clipfrac"),
    _metric(
        "value_explained",
        "≤ 1",
        "1 − (mean squared error of the values before the step) / variance of the returns",
        verl="critic/vf_explained_var",
    ),
    _metric("critic_lr", "", "as `lr`, of the critic", verl="critic/lr"),
    _metric("critic_grad_norm", "", "as `grad_norm`, of the critic", verl="critic/grad_norm"),
    _metric(
        "process_reward",
        "",
        "mean sum of an answer's implicit process rewards, in the update; with `learner.process_reward`",
        verl="reward_model/raw_reward",
    ),
    _metric("process_reward_loss", "", "its cross-entropy with the outcomes", verl="reward_model/dpo_loss"),
    _metric(
        "process_reward_accuracy", "0–1", "share of answers whose process reward is above 0 as their outcome is above ½"
    ),
    _metric("process_reward_lr process_reward_grad_norm", "", "as `lr` and `grad_norm`, of the process reward model"),
    _metric(
        "throttle/max_staleness throttle/lr_scale", "versions, 0–1", "state of the throttle; with `learner.throttle`"
    ),
    _metric(
        "experts/load_max",
        "≥ 1",
        "tokens of a layer's busiest expert over the mean of its experts, mean over the layers; 1: balanced; of a mixture of experts",
    ),
    _metric("experts/idle", "0–1", "share of experts without a token in the step, mean over the layers"),
    _metric(
        "experts/replayed experts/changed",
        "0–1",
        "share of input tokens with the engine's experts, and share of those, by token and layer, for which the learner's router would choose others; with `learner.router_replay`",
    ),
    _metric(
        "grad_norm",
        "",
        "global gradient norm before clipping, of the last update",
        verl="actor/grad_norm",
        trl="grad_norm",
        prime_rl="optim/grad_norm",
    ),
    _metric("skipped_updates", "updates", "updates skipped for a non-finite gradient, since the learner's start"),
    _metric("lr", "", "learning rate", verl="actor/lr", trl="learning_rate", prime_rl="optim/lr"),
    _metric("wait_s", "s", "time the learner waited for groups", verl="timing_s/gen", prime_rl="time/wait_for_batch"),
    _metric("train_s", "s", "proximal log-probs and all updates", verl="timing_s/update_actor"),
    _metric(
        "publish_s", "s", "ledger, reporting and handing over the weights, with the wait for the publication before"
    ),
    _metric(
        "step_s",
        "s",
        "the whole step, checkpoint included",
        verl="timing_s/step perf/time_per_step",
        trl="step_time",
        prime_rl="time/step",
    ),
    _metric("learner_idle_fraction", "0–1", "share of `wait_s` in `step_s`, over the last 2 s or this step"),
    _metric(
        "generator_idle_fraction",
        "0–1",
        "share of time without a running episode on the rollout servers, over about the last 2 s",
    ),
    _metric("tokens_generated_per_s", "actions/s", "all rollout servers, over the same time"),
    _metric(
        "kv_cache_use",
        "0–1",
        "used share of the engines' KV caches, mean over the rollout servers",
        prime_rl="inference/agg/kv_cache_usage_perc/mean",
    ),
    _metric(
        "prefix_hits",
        "0–1",
        "share of the prompts' tokens, those of earlier turns included, that the engines had in their KV caches; all rollout servers, over the same time as `tokens_generated_per_s`",
    ),
    _metric(
        "weight_sync_s",
        "s",
        "last publication, until the last server had installed it",
        verl="timing_s/update_weights",
    ),
    _metric("generation_stall_s", "s", "pause of a server's generation in the last update"),
    _metric("weights/members", "servers", "rollout servers that receive weights"),
    _metric("weights/evictions", "", "evictions since the learner's start"),
    _metric("weights/unreached", "servers", "members that broadcasts do not reach, which fetch instead"),
    _metric(
        "weights/deviation",
        "share",
        "sum of |Δ| over sum of |log-prob| of the last probe: engine against learner after an update",
    ),
    _metric(
        "groups_in_flight_limit",
        "groups",
        "that the rollout servers may have in flight now, see `rollout.groups_in_flight`",
    ),
    _metric("engine_deaths", "", "engine crashes, each followed by a restart"),
    _metric("requests_restarted", "", "requests that lost their tokens in a crash"),
    _metric("buffer/issued buffer/filtered buffer/expired buffer/reissued", "groups", "so far"),
    _metric("buffer/skipped_tasks", "tasks", "so far: no ticket in an epoch; with `buffer.curriculum`"),
    _metric("buffer/in_flight buffer/ready buffer/leased", "groups", "at the moment"),
    _metric("buffer/trained", "groups", "so far, durable ones included"),
    _metric("buffer/spilled_groups", "groups", "whose bytes are in spill files of the run folder, not in Redis"),
    _metric("buffer/spilled_bytes", "bytes", "of these groups"),
    _metric("buffer/spill_errors", "", "spill files that could not be written, and groups that could not be read"),
    _metric(
        "buffer/answers_dropped/<reason>",
        "answers",
        "so far, never trained on: not scored (`reward_timeout`, …), `unfinished`, removed by a filter, or of a dropped group",
    ),
    _metric(
        "buffer/length_bias/<reason>",
        "",
        "Kolmogorov-Smirnov distance of the lengths of trained answers (`trained`), or of those dropped for a reason, from all delivered; 0: alike, 1: no overlap",
    ),
    _metric(
        "buffer/tasks/<outcome>",
        "tasks",
        "`solved`, `unsolved`, `mixed`: tasks by their latest group; with the filter `dynamic_sampling` or `buffer.curriculum`",
    ),
)

EVAL: Final = (
    _metric("time_s", "s", "since the start, as above"),
    _metric("step", "steps", "steps done when the result was known"),
    _metric("policy_version", "version", "evaluated version"),
    _metric(
        "score",
        "",
        "mean reward, or score by `eval.reward`, over the answered tasks (mean@k with `eval.samples` = k); null if none was",
        verl="val-core/eval/reward/mean",
        trl="eval_reward",
    ),
    _metric("score_interval", "", "half the width of the score's 95 % interval, by the spread over tasks"),
    _metric(
        "pass_at_k pass_at_k_interval maj_at_k maj_at_k_interval",
        "",
        "mean over the tasks of the best of `eval.samples` answers, and of the one most agree on; with `eval.samples` > 1",
    ),
    _metric("lower_bound", "", "the same over all tasks, failed ones as 0"),
    _metric("coverage", "0–1", "share of the tasks that were answered"),
    _metric("tasks failed", "tasks", "held-out tasks that were answered; that were not"),
    _metric(
        "failed/<reason>",
        "tasks",
        "of these: `superseded` (newer weights during the answer), `unfinished` (at the next evaluation), or as for groups",
    ),
    _metric("eval_s", "s", "from the first ticket to the last result"),
    _metric(
        "mismatch_tokens mismatch_abs mismatch_k3",
        "",
        "as above, from the last evaluation's answers; only in its record",
    ),
)

SUMMARY: Final = (
    _metric(
        "steps",
        "steps",
        "training steps; a repeated step counts once, an undone one not at all, nor in the means below",
    ),
    _metric("policy_version", "version", "last published version"),
    _metric("reward_first reward_last", "", "mean reward of the first and of the last 10 steps, of a third at most"),
    _metric("eval_reward", "", "`eval.reward`; null if evaluations score the trained reward"),
    _metric(
        "eval_score_first eval_score",
        "",
        "score of the first finished evaluation, and of the last version's; null without",
    ),
    _metric(
        "eval_score_interval eval_pass_at_k eval_maj_at_k",
        "",
        "of the last version's evaluation: half of the 95 % interval, best and agreed of k answers; null without",
    ),
    _metric(
        "eval_lower_bound eval_coverage", "", "of the last version's evaluation: failed tasks as 0; share answered"
    ),
    _metric(
        "time_to_eval_0.9_s",
        "s",
        "training time (sum of `step_s`) until an evaluation's `lower_bound` is at least 0.9; null if none",
    ),
    _metric("staleness_mean staleness_max", "versions", "over all steps"),
    _metric("wall_s", "s", "from start to end; after a restart, of the last part"),
    _metric("startup_s", "s", "of it, until the first training step has its groups"),
    _metric("step_s_median", "s", "median of `step_s`"),
    _metric("eval_s", "s", "sum over the evaluations, which run beside training"),
    _metric("tokens_generated", "actions", "in groups that reached the buffer, without evaluations"),
    _metric("tokens_trained", "tokens", "input tokens trained on, prompts included"),
    _metric("tokens_trained_per_s tokens_per_gpu_s", "tokens/s", "mean over the time of all steps; null without a GPU"),
    _metric("mfu power_w cost_per_million_tokens", "", "mean over all steps, as above; null where it is unknown"),
    _metric(
        "groups.<state>",
        "groups",
        "the ledger at the end: `issued` equals the sum of the others; `reasons`: `filtered:<reason>` and `expired:<reason>`",
    ),
    _metric("learner_idle_fraction", "0–1", "share of `wait_s` in `step_s`, over all steps"),
    _metric("generator_idle_fraction", "0–1", "share of the servers' time without a running episode"),
    _metric("weight_sync_s.mean weight_sync_s.max", "s", "per publication, until the last server had installed it"),
    _metric("generation_stall_s.mean generation_stall_s.max", "s", "per update and server"),
    _metric("ess_mean", "0–1", "mean of the steps' `ess`"),
    _metric("engine_mismatch_abs", "nats", "mean |log π_prox − log μ| over all tokens where it was measured"),
    _metric("engine_mismatch_kl", "nats", "KL of the same, by k3"),
    _metric("engine_mismatch_tokens", "actions", "number of these tokens"),
    _metric(
        "uploads.completed uploads.given_up",
        "",
        "copies to `learner.checkpoint.upload` since the learner's last start; a given up one was late, or is missing",
    ),
    _metric(
        "placement.cores placement.gpus placement.processes.<process>",
        "",
        "of `slipstream up`: cores and GPUs of the machine, and each process's threads, cores and GPUs (empty: not bound)",
    ),
    _metric(
        "restarts.<process>", "", "further starts of a process that failed under `slipstream up`, in its last part"
    ),
)

CATALOG: Final[dict[Kind, tuple[Metric, ...]]] = {"step": STEP, "eval": EVAL, "summary": SUMMARY}


def translate(numbers: Mapping[str, float], kind: Literal["step", "eval"], names: str) -> dict[str, float]:
    """Numbers of a record under the names of another trainer.

    Args:
        kind: of the record; numbers of an evaluation without another name begin with `eval/`.
        names: `native`, or whose names: see `Names`. What has none there keeps its own.
    """
    prefix = "eval/" if kind == "eval" else ""
    translated = {}
    for key, value in numbers.items():
        for name in _elsewhere(key, kind, names) or (prefix + key,):
            translated[name] = value
    return translated


@cache
def _elsewhere(key: str, kind: Kind, names: str) -> tuple[str, ...]:
    """Another trainer's names of a metric; none if it has none."""
    for metric in CATALOG[kind]:
        if metric.matches(key):
            given = next((found for name, found in metric.elsewhere.items() if name == names), ())
            part = _part(metric.names[0], key)
            return tuple(re.sub(r"<\w+>", part.replace("\\", ""), name) for name in given)
    return ()


def _part(name: str, key: str) -> str:
    """The text in `key` in place of the `<part>` of a metric's name; empty if it has none."""
    before, _, after = re.sub(r"<\w+>", "\0", name).partition("\0")
    return key.removeprefix(before).removesuffix(after)
