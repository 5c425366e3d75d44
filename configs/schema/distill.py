"""Distillation: teachers, and the loss that brings the policy closer to them."""

from string import Formatter
from typing import Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from slipstream.configs.schema.base import Seconds, Section, UserPath
from slipstream.configs.schema.rollout import SamplingConfig

CONTEXT_FIELDS: Final = ("prompt", "reference", "solution", "feedback")
"""Names in the template of a teacher's context."""


class TeacherConfig(Section):
    """A teacher: a model in the learner (`model`), an engine of its own (`url`), or else the policy's own weights."""

    env: str | None = None
    """Label of the env in a mixture whose answers it scores (MOPD); unset: all that no other teacher does."""
    model: UserPath | None = None
    """Folder of a model with the policy's tokenizer, sharded over the learner's ranks."""
    url: str | None = None
    """Address of an inference server with the policy's tokenizer, such as `http://127.0.0.1:8000`; the rollout servers
    ask it when they score a group, and a group that it can't score is dropped and counted (`teacher_unavailable`)."""
    server: Literal["vllm", "sglang"] = "vllm"
    """Of `url`: the program that serves, whose requests differ."""
    concurrency: int = Field(default=32, ge=1)
    """Of `url`: requests that each rollout server may have open."""
    timeout_s: Seconds = 60.0
    """Of `url`: time of a try; there are four."""
    weights: Literal["initial", "present", "average"] | None = None
    """Without `model` and `url`: the policy's initial weights, its present ones, or their running average, a further
    copy in memory. Unset: `initial`."""
    average_rate: float = Field(default=0.05, gt=0, le=1)
    """Of `weights: average`: share of the present weights in each update (SDPO, arXiv 2601.20802: 0.05)."""
    context: str | None = None
    """Prompt of the teacher, as a template of `{prompt}` and what only the teacher is given: `{reference}`, the task's;
    `{solution}`, another answer of the group with a reward of at least `solution_reward`; `{feedback}`, what
    rewards say of the answer. Of a chat it replaces the last message of the user. Answers for which one of these is
    missing are not distilled. Unset: the policy's own prompt."""
    solution_reward: float = Field(default=1.0, allow_inf_nan=False)
    """Of `{solution}`: least reward of a solution."""

    @property
    def is_policy(self) -> bool:
        """True if the teacher has the policy's weights, those of some step."""
        return self.model is None and self.url is None

    @property
    def context_fields(self) -> tuple[str, ...]:
        """Fields that the context names."""
        return () if self.context is None else tuple(name for _, name, _, _ in Formatter().parse(self.context) if name)

    @field_validator("context")
    @classmethod
    def _names_fields(cls, context: str | None) -> str | None:
        if context is None:
            return None
        try:
            names = {name for _, name, _, _ in Formatter().parse(context) if name is not None}
        except ValueError as error:
            raise ValueError(f"is no template: {error}; write {{{{ and }}}} for braces") from None
        unknown = sorted(names.difference(CONTEXT_FIELDS))
        if unknown:
            raise ValueError(f"has the field {{{unknown[0]}}}; there are {', '.join(map(_braced, CONTEXT_FIELDS))}")
        if not names.difference({"prompt"}):
            raise ValueError(f"has nothing but the prompt; name one of {', '.join(map(_braced, CONTEXT_FIELDS[1:]))}")
        return context

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if self.model is not None and self.url is not None:
            raise ValueError("model and url exclude each other; give one, or neither for the policy's own weights")
        if self.is_policy and self.weights == "present" and self.context is None:
            raise ValueError("weights: present without a context is the policy itself, from which nothing is learnt")
        if not self.is_policy and self.weights is not None:
            raise ValueError("weights are the policy's; leave them out with model or url")
        return self


def _braced(name: str) -> str:
    return f"{{{name}}}"


class DistillConfig(Section):
    """Distillation on the policy's own answers: the stream `ref_kl`, with the weight `learner.streams.ref_kl`.

    With `learner.streams.rl: 0` it is alone, and needs no rewards.
    """

    teachers: tuple[TeacherConfig, ...] = Field(min_length=1)
    """One for all answers, or several by `env`."""
    loss: Literal["reverse_kl", "forward_kl", "jsd", "advantage"] = "reverse_kl"
    """KL(π_θ‖π_T), KL(π_T‖π_θ), or a divergence between them (GKD, arXiv 2306.13649), at each action over the
    vocabulary; or a policy gradient with the advantage log π_T - log π_θ of the action (MOPD)."""
    beta: float = Field(default=0.5, gt=0, lt=1)
    """Of `jsd`: weight of the teacher in the mixture; near 0 it is like forward KL, near 1 like reverse."""
    top_k: int | None = Field(default=None, ge=1)
    """Likeliest tokens of the teacher that are compared alone; unset: all of the vocabulary. A `url` needs it, for a
    loss other than `advantage`, and vLLM gives at most its `--max-logprobs` (20)."""
    tail: bool = True
    """Of `top_k`: all other tokens count as one more; else both distributions are renormalised without them."""

    @property
    def over_vocabulary(self) -> bool:
        """True if distributions are compared, not only the log-probs of the actions."""
        return self.loss != "advantage"

    @property
    def engines(self) -> tuple[TeacherConfig, ...]:
        """Teachers that rollout servers ask."""
        return tuple(teacher for teacher in self.teachers if teacher.url is not None)

    @property
    def holds_models(self) -> bool:
        """True if the learner has a model beside the policy."""
        return any(teacher.url is None and teacher.weights != "present" for teacher in self.teachers)

    def of_env(self, label: str | None) -> TeacherConfig | None:
        """The teacher of answers of an env by its label in the mixture; None if it has none."""
        others = (teacher for teacher in self.teachers if teacher.env is None)
        return next((teacher for teacher in self.teachers if teacher.env == label), next(others, None))

    @model_validator(mode="after")
    def _teachers(self) -> Self:
        envs = [teacher.env for teacher in self.teachers]
        twice = next((env for env in envs if envs.count(env) > 1), "")
        if twice != "":
            of = "without an env" if twice is None else f"of the env {twice!r}"
            raise ValueError(f"there are several teachers {of}; give one")
        if self.engines and self.over_vocabulary and self.top_k is None:
            raise ValueError(f"loss: {self.loss} with a teacher by url needs top_k: it returns no whole distributions")
        if not self.over_vocabulary and self.top_k is not None:
            raise ValueError("top_k is of the other losses; loss: advantage needs the log-prob of the action alone")
        return self

    def problems(self, sampling: SamplingConfig, *, context_parallel: int) -> list[str]:
        """Combinations with other settings that can't work."""
        problems, temperature = [], sampling.temperature
        if sampling.top_k is not None:
            problems.append(
                f"learner.distill: a teacher's distribution is over all tokens, and rollout.sampling.top_k="
                f"{sampling.top_k} leaves the policy some of them; leave top_k and top_p out"
            )
        if self.engines and temperature != 1:
            problems.append(
                f"learner.distill.teachers: a url gives log-probs at temperature 1, and rollout.sampling.temperature="
                f"{temperature:g}; set it to 1, or give the teacher as model"
            )
        special = any(teacher.context is not None or teacher.env is not None for teacher in self.teachers)
        if special and context_parallel > 1:
            problems.append(
                f"learner.distill.teachers: with a context or an env they need learner.parallel.cp=1, not "
                f"{context_parallel}: their sequences are others than the policy's"
            )
        return problems
