"""`slipstream check`: model, env, prompts, rewards and tools, tried without an engine; `try` and `up` do the same."""

import asyncio
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from slipstream.buffer.wire.auth import CLIENTS, client_keys, service_keys
from slipstream.configs.arguments import read_run_arguments, run_parser
from slipstream.configs.runtime.errors import ConfigError, format_error
from slipstream.configs.runtime.signals import heavy_imports
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.rollout import RolloutConfig
from slipstream.configs.schema.run import RewardConfig
from slipstream.configs.schema.trainers import SCALAR_TRAINERS
from slipstream.configs.schema.weights import SecurityConfig
from slipstream.env.base import Env, Observation, Split, Task, gives_rewards, has_sessions, offers_tools
from slipstream.env.images import separate_images
from slipstream.env.registry import TOOLS, add_tools, build_env
from slipstream.models.folder import initial_model, model_folder
from slipstream.models.folder import model_problems as missing_models
from slipstream.models.images import ImageError
from slipstream.rewards.base import Episode, EpisodeTurn, Failure, FailureReason
from slipstream.rewards.functions.by_source import BySource
from slipstream.rewards.functions.code import Code
from slipstream.rewards.registry import find_reward, find_rewards
from slipstream.rewards.runners.base import close_rewards
from slipstream.rewards.scorer import Scorer
from slipstream.rollout_servers.plugins import env_problems
from slipstream.tools.check_rows import RowsReport, check_rows

if TYPE_CHECKING:
    from slipstream.learner.models.load import ModelOptions
    from slipstream.rollout_servers.rollouts.conversation import ChatFormat

SPLITS: Final[tuple[Split, ...]] = ("train", "eval")
WRONG: Final = "(this is a wrong answer)"
SESSION_S: Final = 60.0
"""Time for a session to give its first prompt."""
SHOWN_CHARACTERS: Final = 2000
PASSING: Final[tuple[FailureReason, ...]] = ("reward_timeout", "reward_unavailable", "scoring_timeout")
"""Reasons of failures that may be over when the run needs the reward."""
NOT_CHECKED: Final = (
    "the engine's start (rollout.engine.options, memory)",
    "packed sequences, which the learner compares with single ones",
)
"""Checks that take an engine, or the weights in memory."""


@dataclass
class Report:
    """Findings of a check.

    Attributes:
        env: name, sizes and fingerprint.
        prompts: by split.
        rewards: score of the reference and of a wrong answer, by term; `sum` is the weighted sum.
        tools: schemas.
        problems: reasons why a run can't start, or would lose every group.
        warnings: what costs a run some groups, or may be a mistake.
        not_checked: parts of a start that are only tried by starting.
        rows: findings about the rows of files, of trainings on these, which have neither env nor rewards.
    """

    env: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, dict[str, Any]] = field(default_factory=dict)
    rewards: dict[str, dict[str, float]] = field(default_factory=dict)
    tools: list[Mapping[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=lambda: [*NOT_CHECKED])
    rows: RowsReport | None = None


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream check`; returns 0, or 1 if there are problems. Raises: ConfigError for unusable plug-ins."""
    parser = run_parser(
        "Try a configuration without an engine: its env, one prompt of each split with its tokens, its rewards on a "
        "right and a wrong answer, and its tools.",
        prog="slipstream check",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    arguments, config = read_run_arguments(parser, argv)
    report = check(config)
    if arguments.json:
        print(json.dumps(asdict(report), indent=2, ensure_ascii=False, default=str))
    else:
        _print(report)
    return 1 if report.problems else 0


def check(config: RunConfig, *, weights: bool = True) -> Report:
    """Tries all of it.

    Args:
        weights: whether a model's weights and the engine are needed, and are checked.

    Raises: ConfigError for what can't be built at all.
    """
    if not config.uses_buffer:
        return _check_learner(config)
    env = _build(config)
    report = Report(env={"name": config.env.name, "fingerprint": env.fingerprint()[:16]})
    report.env |= {split: env.size(split) for split in SPLITS}
    report.problems += env_problems(config, env)
    if config.eval.tasks and not env.size("eval"):
        report.warnings.append(f"env {config.env.name} has no held-out tasks, so there are no evaluations (eval.tasks)")
    if config.rollout.skip_long_prompts:
        report.not_checked.append("the prompts of all tasks (rollout.skip_long_prompts)")
    with tempfile.TemporaryDirectory() as folder:
        model = _model(config, Path(folder))
        if weights:
            report.problems += _model_problems(config, model)
        asyncio.run(_check_tasks(config, env, model, report))
    return report


def _check_learner(config: RunConfig) -> Report:
    """Tries model and rows of a training that is a learner alone. Raises: ConfigError as `check`."""
    if problems := missing_models(config.model):
        raise ConfigError(problems)
    report = Report(not_checked=[NOT_CHECKED[-1]])
    with tempfile.TemporaryDirectory() as folder:
        model = _model(config, Path(folder))
        from slipstream.learner.models.load import ModelOptions, check_model
        from slipstream.learner.trainers.assemble import find_trainer

        trainer, options = config.learner.trainer, ModelOptions.of(config.model, config.learner)
        language_head = trainer.name not in SCALAR_TRAINERS
        report.problems += find_trainer(trainer).problems(config)
        report.problems += _found_by(
            [
                partial(check_model, model, options, language_head=language_head),
                *(_teacher_checks(config, options) if trainer.name == "distill" else ()),
            ]
        )
        report.rows = check_rows(config, model)
    report.problems += report.rows.problems
    report.warnings += report.rows.warnings
    return report


def _model(config: RunConfig, folder: Path) -> Path:
    """The model's folder; one that is built is in `folder`, as the run has no folder yet. Raises: ConfigError."""
    try:
        return initial_model(config.model_copy(update={"run": config.run.model_copy(update={"dir": folder})}))
    except OSError as error:
        raise ConfigError(
            f"the model can't be built in {folder}: {error}; see that its disk has room, or set TMPDIR to another"
        ) from error


def _model_problems(config: RunConfig, model: Path) -> list[str]:
    """Reasons why the learner can't train `model`, or the engine can't serve it; no weight is read."""
    # Imported here: transformers and torch take seconds, and mistakes in names are reported before.
    from slipstream.learner.algorithms.registry import Algorithm
    from slipstream.learner.models.load import ModelOptions, check_model
    from slipstream.rollout_servers.engines.registry import engine_problems

    learner, options = config.learner, ModelOptions.of(config.model, config.learner)
    steps: list[Callable[[], object]] = [
        lambda: check_model(model, options),
        *(partial(Algorithm.of, each) for each in config.algorithms.values()),
    ]
    if learner.kl is not None and learner.kl.reference is not None:
        reference = model_folder("learner.kl.reference", learner.kl.reference)
        steps.append(lambda: check_model(reference, replace(options, lora=None)))
    steps += _teacher_checks(config, options)
    return [*engine_problems(config.rollout.engine, config.weights, model), *_found_by(steps)]


def _teacher_checks(config: RunConfig, options: "ModelOptions") -> list[Callable[[], object]]:
    """Checks of the teachers that are models in the learner."""
    from slipstream.learner.models.load import check_model

    def check_teacher(number: int, path: Path) -> None:
        check_model(model_folder(f"learner.distill.teachers.{number}.model", path), replace(options, lora=None))

    teachers = () if config.learner.distill is None else config.learner.distill.teachers
    return [
        partial(check_teacher, number, teacher.model)
        for number, teacher in enumerate(teachers)
        if teacher.model is not None
    ]


def _found_by(steps: Sequence[Callable[[], object]]) -> list[str]:
    """The problems of all steps."""
    problems: list[str] = []
    for step in steps:
        try:
            step()
        except ConfigError as error:
            problems += error.problems
    return problems


def check_apart(config: RunConfig) -> Report:
    """As `check`, in a process of its own: neither torch nor an env's code stays in this one. Raises: ConfigError."""
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            report, problems = pool.submit(_attempt, config).result()
    except BrokenProcessPool:
        raise ConfigError("the check of the configuration crashed; `slipstream check` shows where") from None
    except OSError as error:
        raise ConfigError(f"the configuration can't be checked: {error}; see that the disk has room") from error
    if report is None:
        raise ConfigError(problems)
    return report


def _attempt(config: RunConfig) -> tuple[Report | None, Sequence[str]]:
    try:
        with heavy_imports():
            return check(config), ()
    except ConfigError as error:
        return None, error.problems


def _build(config: RunConfig) -> Env:
    """The env with its tools. Raises: ConfigError with all problems of names, files and options."""
    problems = [*missing_models(config.model, config.learner), *key_problems(config.security)]
    envs = list[Env]()
    steps: list[Callable[[], object]] = [
        lambda: envs.append(build_env(config.env.model_copy(update={"tools": ()}))),
        *(partial(TOOLS.load, tool.name) for tool in config.env.tools),
        lambda: find_rewards(config.scored),
    ]
    for step in steps:
        try:
            step()
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return add_tools(envs[0], config.env)


def key_problems(security: SecurityConfig) -> Sequence[str]:
    """Reasons why the keys of the run's connections can't be used."""
    try:
        for service, clients in CLIENTS.items():
            service_keys(security, service)
            for client in clients:
                client_keys(security, client, service=service)
    except ConfigError as error:
        return error.problems
    return []


async def _check_tasks(config: RunConfig, env: Env, model: Path, report: Report) -> None:
    # Imported here, as above.
    from slipstream.models.tokenizer import Tokenizer
    from slipstream.rollout_servers.rollouts.conversation import ChatFormat

    try:
        format = ChatFormat.of(Tokenizer(model), config.rollout.episode)
        if gives_rewards(env):
            format.check(tools=offers_tools(env))
    except ConfigError as error:
        report.problems += error.problems
        return
    check = _TaskCheck(config, env, format, report)
    for split in SPLITS:
        of_tasks = list[list[str]]()
        for index in _sampled(env.size(split)):
            of_tasks.append(await check.problems(split, index))
            if not of_tasks[-1]:
                break
        if of_tasks and of_tasks[-1] and (split == "train" or config.eval.tasks):
            report.problems += of_tasks[0]
        else:
            report.warnings += chain(*of_tasks)


def _sampled(size: int) -> list[int]:
    """Indices of the first task and, in case it can't be played, of others: a run does not need every task."""
    return sorted({0, size // 2, size - 1}) if size else []


@dataclass(frozen=True)
class _TaskCheck:
    """Makes prompts of tasks and scores answers to them, into a report."""

    config: RunConfig
    env: Env
    format: "ChatFormat"
    report: Report

    async def problems(self, split: Split, index: int) -> list[str]:
        """Makes the prompt of a task and scores answers to it; returns the problems."""
        from slipstream.models.tokenizer import PromptError
        from slipstream.rollout_servers.placeholders import ImagePlaceholders

        where, tokenizer = f"task {index} of {split}", self.format.tokenizer
        try:
            task = self.env.task(split, index)
            opening = await _opening(self.env, task)
            messages, images = separate_images(opening.messages, task.images)
            opening = replace(opening, messages=messages)
            self.format.require_visible(opening)
            shown = self.format.for_template(opening)
            token_ids = tokenizer.encode(shown.messages, tools=shown.tools)
            placeholders = ImagePlaceholders.of(tokenizer.model)
            if images and placeholders is None:
                raise PromptError("it has images, which this model does not take")
            tokens = len(placeholders.expand(token_ids, images)[0] if placeholders is not None else token_ids)
        except ConfigError as error:
            return [*error.problems]
        except (PromptError, ImageError) as error:
            return [f"{where}: its prompt can't be made: {error}"]
        except TimeoutError:
            self.report.warnings.append(f"{where}: its session gave no prompt within {SESSION_S:g} s")
            return []
        except Exception as error:  # noqa: BLE001  (an env's code may raise anything)
            return [f"{where}: {format_error(error)}"]
        text = tokenizer.decode_whole(token_ids)
        self.report.prompts[split] = {"task": index, "text": text, "tokens": tokens, "reference": task.reference}
        self.report.tools = list(opening.tools)
        problems = _length_problems(where, tokens, self.config.rollout)
        if self.config.rollout.skip_long_prompts:
            self.report.warnings += problems
            problems = []
        if split == "train":
            problems += await self._reward_problems(task, opening, where)
        return problems

    async def _reward_problems(self, task: Task, opening: Observation, where: str) -> list[str]:
        """Scores the reference, or where that is no answer an empty one, and a wrong answer; returns the problems."""
        config, report = self.config, self.report
        right = "" if _reference_is_tests(config.scored, task) else task.reference
        answers = {"reference" if right else "empty": right, "wrong": WRONG}
        workers = min(1, config.scoring.workers)
        scorer = Scorer(config.scored, config.scoring.model_copy(update={"workers": workers}), backoff_s=None)
        try:
            scorer.require_time(generation_s=config.rollout.group_deadline_s, ticket_s=config.buffer.ticket_deadline_s)
            for kind, answer in answers.items():
                (result,) = await scorer.score([_episode(task, opening, answer)])
                if isinstance(result, Failure):
                    problem = f"rewards of {where}: {result}"
                    if result.reason not in PASSING:
                        return [problem]
                    report.warnings.append(problem)
                    return []
                for name, value in {**result.scores, "sum": result.reward}.items():
                    report.rewards.setdefault(name, {})[kind] = value
        except ConfigError as error:
            return list(error.problems)
        finally:
            scorer.close()
        total = report.rewards["sum"]
        if "empty" in total and total["empty"] > 0:
            report.warnings.append(
                f"rewards: an empty answer scores {total['empty']:g}; where only the env's sessions give rewards, use "
                "rewards=[{name: none}]"
            )
        if not gives_rewards(self.env) and "reference" in total and total["reference"] <= total["wrong"]:
            report.warnings.append(
                f"rewards: the reference {task.reference!r} scores {total['reference']:g}, a wrong answer "
                f"{total['wrong']:g}: does the reward expect another form of the answer? If so, nothing is learned"
            )
        return []


async def _opening(env: Env, task: Task) -> Observation:
    """The prompt of an episode of the task, with its tools."""
    if not has_sessions(env):
        return Observation(task.prompt)
    session = env.session(task)
    try:
        async with asyncio.timeout(SESSION_S):
            opening = await session.reset()
        return opening if isinstance(opening, Observation) else Observation(opening)
    finally:
        await session.close()


def _length_problems(where: str, tokens: int, rollout: RolloutConfig) -> list[str]:
    room = rollout.engine.max_model_len - rollout.sampling.max_tokens
    if not tokens:
        return [f"{where}: its prompt has no tokens"]
    if tokens > room:
        return [
            f"{where}: its prompt has {tokens} tokens; rollout.engine.max_model_len - rollout.sampling.max_tokens "
            f"leaves {room}"
        ]
    return []


def _reference_is_tests(terms: Sequence[RewardConfig], task: Task) -> bool:
    """True if the reward `code` takes the reference as the tests of a program."""
    for term in terms:
        if (term.function or term.name) not in ("code", "by_source"):
            continue
        reward = find_reward(term)
        function = reward.function
        try:
            if isinstance(function, BySource):
                function = function.reward_of(task.info)[1].function
            if isinstance(function, Code) and not function.has_tests(task.info):
                return True
        except ValueError:  # a source without a reward, which scoring reports
            continue
        finally:
            close_rewards([reward])
    return False


def _episode(task: Task, opening: Observation, answer: str) -> Episode:
    turn = EpisodeTurn(text=answer, tokens=1, end=1)
    return Episode(
        prompt=opening.messages,
        reference=task.reference,
        info=task.info,
        turns=[turn],
        prompt_tokens=1,
        finish_reason="stop",
    )


def _print(report: Report) -> None:
    if report.rows is None:
        _print_tasks(report)
    else:
        print("\n".join(report.rows.lines()))
    print(f"\nnot checked: {'; '.join(report.not_checked)}")
    for warning in report.warnings:
        print(f"\nwarning: {warning}")
    for problem in report.problems:
        print(f"\nproblem: {problem}")
    if not report.problems:
        print("\nno problems")


def _print_tasks(report: Report) -> None:
    sizes = ", ".join(f"{report.env[split]:,} {split} tasks" for split in SPLITS)
    print(f"env {report.env['name']}: {sizes}, fingerprint {report.env['fingerprint']}")
    for split, prompt in report.prompts.items():
        text = prompt["text"]
        cut = "" if len(text) <= SHOWN_CHARACTERS else f"… ({len(text):,} characters)"
        where = f"task {prompt['task']} of {split}"
        print(f"\nprompt of {where}: {prompt['tokens']:,} tokens, reference {prompt['reference'][:200]!r}")
        print("\n".join(f"  | {line}" for line in (text[:SHOWN_CHARACTERS] + cut).splitlines()))
    for schema in report.tools:
        print(f"\ntool {json.dumps(schema, ensure_ascii=False)}")
    if report.rewards:
        print("\nrewards")
    for name, scores in report.rewards.items():
        print(f"  {name:<24}" + ", ".join(f"{kind} {value:g}" for kind, value in scores.items()))
