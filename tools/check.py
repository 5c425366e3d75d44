"""`slipstream check`: env, prompts, rewards and tools of a configuration, tried without an engine."""

import asyncio
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from slipstream.configs.arguments import read_run_arguments, run_parser
from slipstream.configs.images import ImageError
from slipstream.configs.models import initial_model, model_problems
from slipstream.configs.plugins import find_plugin
from slipstream.configs.runtime.errors import ConfigError, format_error
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.rollout import RolloutConfig
from slipstream.configs.schema.run import EnvConfig, RewardConfig
from slipstream.env.base import Env, Observation, Split, Task, has_sessions
from slipstream.env.images import separate_images
from slipstream.env.registry import BUILT_IN_TOOLS, build_env
from slipstream.rewards.base import Episode, EpisodeTurn, Failure
from slipstream.rewards.functions.by_source import BySource
from slipstream.rewards.functions.code import Code
from slipstream.rewards.registry import find_reward, find_rewards
from slipstream.rewards.runners.base import close_rewards
from slipstream.rewards.scorer import Scorer

SPLITS: Final[tuple[Split, ...]] = ("train", "eval")
WRONG: Final = "(this is a wrong answer)"
SESSION_S: Final = 60.0
"""Time for a session to give its first prompt."""
SHOWN_CHARACTERS: Final = 2000


@dataclass
class Report:
    """Findings of a check.

    Attributes:
        env: name, sizes and fingerprint.
        prompts: by split.
        rewards: score of the reference and of a wrong answer, by term; `sum` is the weighted sum.
        tools: schemas.
        problems: what would cost a run its groups, or can't be right.
    """

    env: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, dict[str, Any]] = field(default_factory=dict)
    rewards: dict[str, dict[str, float]] = field(default_factory=dict)
    tools: list[Mapping[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


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


def plugin_problems(env: EnvConfig, terms: Sequence[RewardConfig]) -> list[str]:
    """Reasons why an env, its tools or rewards can't be used, found without starting the tools."""
    steps: list[Callable[[], object]] = [lambda: build_env(env.model_copy(update={"tools": ()}))]
    steps += [partial(find_plugin, "tool", tool.name, BUILT_IN_TOOLS) for tool in env.tools]
    steps.append(lambda: find_rewards(terms))
    problems: list[str] = []
    for step in steps:
        try:
            step()
        except ConfigError as error:
            problems += error.problems
    return problems


def check(config: RunConfig) -> Report:
    """Tries all of it. Raises: ConfigError for what can't be built at all."""
    problems = [*model_problems(config.model, config.learner), *plugin_problems(config.env, reward_terms(config))]
    if problems:
        raise ConfigError(problems)
    env = build_env(config.env)
    report = Report(env={"name": config.env.name, "fingerprint": env.fingerprint()[:16]})
    report.env |= {split: env.size(split) for split in SPLITS}
    if config.eval.tasks and not env.size("eval"):
        report.problems.append(f"eval.tasks={config.eval.tasks}, but env {config.env.name} has no held-out tasks")
    with tempfile.TemporaryDirectory() as folder:
        paths = config.run.model_copy(update={"dir": Path(folder)})  # a built model must not leave a run's folder
        model = initial_model(config.model_copy(update={"run": paths}))
        asyncio.run(_check_tasks(config, env, model, report))
    return report


def reward_terms(config: RunConfig) -> list[RewardConfig]:
    """The terms of the reward, and those that are only evaluated with the weight 0."""
    trained = {term.name for term in config.rewards}
    evaluated = [term.model_copy(update={"weight": 0.0}) for term in config.evaluated if term.name not in trained]
    return [*config.rewards, *evaluated]


async def _check_tasks(config: RunConfig, env: Env, model: Path, report: Report) -> None:
    # Imported here: transformers takes seconds, and mistakes in names are reported before.
    from slipstream.rollout_servers.images import ImagePlaceholders
    from slipstream.rollout_servers.tokenizer import PromptError, Tokenizer

    tokenizer, placeholders = Tokenizer(model), ImagePlaceholders.of(model)
    for split in SPLITS:
        if not env.size(split):
            continue
        where = f"task 0 of {split}"
        try:
            task = env.task(split, 0)
            opening = await _opening(env, task)
            messages, images = separate_images(opening.messages, task.images)
            opening = replace(opening, messages=messages)
            token_ids = tokenizer.encode(messages, tools=opening.tools)
            if images and placeholders is None:
                raise PromptError("it has images, which this model does not take")
            tokens = len(placeholders.expand(token_ids, images)[0] if placeholders is not None else token_ids)
        except (PromptError, ImageError) as error:
            report.problems.append(f"{where}: its prompt can't be made: {error}")
            continue
        except TimeoutError:
            report.problems.append(f"{where}: its session gave no prompt within {SESSION_S:g} s")
            continue
        except Exception as error:  # noqa: BLE001  (an env's code may raise anything)
            report.problems.append(f"{where}: {format_error(error)}")
            continue
        text = tokenizer.decode_whole(token_ids)
        report.prompts[split] = {"text": text, "tokens": tokens, "reference": task.reference}
        report.tools = list(opening.tools)
        report.problems += _length_problems(where, tokens, config.rollout)
        if split == "train":
            await _check_rewards(config, env, task, opening, report)


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


async def _check_rewards(config: RunConfig, env: Env, task: Task, opening: Observation, report: Report) -> None:
    """Scores the reference, or where that is no answer an empty one, and a wrong answer."""
    right = "" if _reference_is_tests(config, task) else task.reference
    answers = {"reference" if right else "empty": right, "wrong": WRONG}
    workers = min(1, config.scoring.workers)
    scorer = Scorer(reward_terms(config), config.scoring.model_copy(update={"workers": workers}), retry_s=())
    try:
        for kind, answer in answers.items():
            (result,) = await scorer.score([_episode(task, opening, answer)])
            if isinstance(result, Failure):
                report.problems.append(f"rewards of task 0 of train: {result}")
                return
            for name, value in {**result.scores, "sum": result.reward}.items():
                report.rewards.setdefault(name, {})[kind] = value
    finally:
        scorer.close()
    total = report.rewards["sum"]
    if "empty" in total and total["empty"] > 0:
        report.problems.append(
            f"rewards: an empty answer scores {total['empty']:g}; where only the env's sessions give rewards, use "
            "rewards=[{name: none}]"
        )
    if not has_sessions(env) and "reference" in total and total["reference"] <= total["wrong"]:
        report.problems.append(
            f"rewards: the reference {task.reference!r} scores {total['reference']:g}, a wrong answer "
            f"{total['wrong']:g}: nothing would be learned; does the reward expect another form of the answer?"
        )


def _reference_is_tests(config: RunConfig, task: Task) -> bool:
    """True if the reward `code` takes the reference as the tests of a program."""
    for term in reward_terms(config):
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
    sizes = ", ".join(f"{report.env[split]:,} {split} tasks" for split in SPLITS)
    print(f"env {report.env['name']}: {sizes}, fingerprint {report.env['fingerprint']}")
    for split, prompt in report.prompts.items():
        text = prompt["text"]
        cut = "" if len(text) <= SHOWN_CHARACTERS else f"… ({len(text):,} characters)"
        print(f"\nprompt of task 0 of {split}: {prompt['tokens']:,} tokens, reference {prompt['reference'][:200]!r}")
        print("\n".join(f"  | {line}" for line in (text[:SHOWN_CHARACTERS] + cut).splitlines()))
    for schema in report.tools:
        print(f"\ntool {json.dumps(schema, ensure_ascii=False)}")
    if report.rewards:
        print("\nrewards")
    for name, scores in report.rewards.items():
        print(f"  {name:<24}" + ", ".join(f"{kind} {value:g}" for kind, value in scores.items()))
    for problem in report.problems:
        print(f"\nproblem: {problem}")
    if not report.problems:
        print("\nno problems")
