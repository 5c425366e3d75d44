"""`slipstream try`: plays one episode of an env, and shows each token, turn, tool call and part of the reward."""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table
from rich.text import Text

from slipstream.buffer.wire.codec import action_mask, behaviour_logprobs, token_ids
from slipstream.buffer.wire.messages import Trajectory
from slipstream.configs import RunConfig
from slipstream.configs.load import load_config
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.yaml_text import write_yaml
from slipstream.env.base import Env, Split
from slipstream.env.registry import build_env, check_env_options, env_factory
from slipstream.models.folder import Decode, initial_model, text_decoder
from slipstream.models.tiny import CHATML_TOOLS
from slipstream.rewards.base import Episode
from slipstream.rewards.registry import REWARDS
from slipstream.rewards.scorer import Scorer
from slipstream.tools.check import check
from slipstream.tools.cli import at_least, printable, table_console
from slipstream.tools.play_gateway import PlayedByHand, account_of, call_table
from slipstream.tools.plugins import listed, options_of
from slipstream.tools.transcript import Stretch, stretches

if TYPE_CHECKING:
    from slipstream.models.tokenizer import Tokenizer
    from slipstream.rollout_servers.engines.base import Engine

GAMES: Final = ("gymnasium", "openenv", "skyrl_gym", "textarena")
"""Envs whose tasks have no reference."""
BY_HAND: Final = (
    "rollout.group_deadline_s=86400",
    "rollout.episode.wall_s=null",
    "buffer.ticket_deadline_s=90000",
    "learner.wait_deadline_s=90000",
)
"""Settings of an episode that waits for its user."""
KEYBOARD_CONTEXT: Final = 1 << 20
"""Tokens of an episode without a model: they are bytes."""
BYTES_MODEL: Final = "bytes"
"""Name of the folder with its tokenizer."""
MIN_COLUMNS: Final = 100
SHOWN_TOKENS: Final = 16
"""Tokens that are shown of a longer stretch, half of them at either end."""
SHOWN_LINES: Final = 12
"""Lines that are shown of a longer text, half of them at either end."""
SHOWN_LINE: Final = 400
"""Characters of a line."""


@dataclass(frozen=True)
class PlayedTask:
    """One scored episode."""

    env: str
    split: Split
    index: int
    view: Episode
    trajectories: Sequence[Trajectory]
    session: Mapping[str, Any] | None = None
    """The tree of calls, with --gateway."""


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream try`; returns 0.

    Raises: ConfigError for what can't be built, SlipstreamError when the episode fails.
    """
    arguments = _parser().parse_intermixed_args(argv)
    if arguments.list:
        _print_choices(arguments.target)
        return 0
    if arguments.keyboard == (arguments.model is not None) and not (arguments.model is None and _is_file(arguments)):
        raise ConfigError(
            "give --keyboard to type the actions yourself, or --model PATH for a model that generates them"
        )
    with tempfile.TemporaryDirectory() as folder:
        config, model = _prepare(arguments, Path(folder))
        _check(config, weights=not arguments.keyboard)
        played = asyncio.run(_play(config, model, arguments))
        # A keyboard's tokens without a model are bytes, of no interest.
        decode = None if model.parent == Path(folder) and arguments.keyboard else text_decoder(model)
        if arguments.json:
            print(json.dumps(_record(played, text_decoder(model)), indent=2, ensure_ascii=False, default=str))
        else:
            _print(played, decode, full=arguments.full)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slipstream try",
        description="Play one episode of an env and show the turns with their tool calls, the parts of the reward, and "
        "the tokens with their masks.",
    )
    parser.add_argument("target", metavar="ENV|CONFIG", help="name of an env, or YAML file of a run")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key.path=value", help="change one key, such as env.options.path=…"
    )
    parser.add_argument("--task", type=at_least(0), default=0, metavar="N", help="index of the task; default: 0")
    parser.add_argument("--eval", action="store_true", help="a held-out task; its actions are greedy")
    parser.add_argument("--model", type=Path, metavar="PATH", help="model folder; default: the configuration's model")
    parser.add_argument("--keyboard", action="store_true", help="the lines of the standard input are the actions")
    parser.add_argument(
        "--gateway", action="store_true", help="your agent plays it: shows the address and the key that it needs"
    )
    parser.add_argument("--list", action="store_true", help="show the env's options, and what its package offers")
    parser.add_argument("--full", action="store_true", help="show all tokens, and long texts to their end")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _check(config: RunConfig, *, weights: bool) -> None:
    """Prints what `slipstream check` warns of. Raises: ConfigError with the problems that it finds."""
    if not config.uses_buffer:
        raise ConfigError(f"learner.trainer={config.learner.trainer.name} has no env to play: name one, or a run of RL")
    report = check(config, weights=weights)
    if report.problems:
        raise ConfigError(report.problems)
    for warning in report.warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _is_file(arguments: argparse.Namespace) -> bool:
    return Path(arguments.target).suffix in (".yaml", ".yml")


def _prepare(arguments: argparse.Namespace, folder: Path) -> tuple[RunConfig, Path]:
    """The configuration, with `hf` as engine and its files in `folder`, and the model's folder. Raises: ConfigError."""
    settings = [f"run.dir={folder}", "rollout.engine.name=hf", "rollout.engine.kv_cache_bytes=null"]
    if arguments.model is not None:
        settings += [f"model.path={arguments.model}", "model.build=null"]
    if _is_file(arguments):
        waits = BY_HAND if arguments.gateway else ()
        config = load_config(Path(arguments.target), [*settings, *waits, *arguments.overrides])
        return config, initial_model(config)
    env_factory(arguments.target)  # a misspelt name is reported before anything is loaded
    tree: dict[str, Any] = {"env": {"name": arguments.target}, "model": {"dtype": "float32"}}
    # A session's rewards are added anyway; without sessions the answer is compared with the reference.
    if arguments.target in REWARDS.built_in:
        tree["rewards"] = [{"name": arguments.target}]
    elif arguments.target in GAMES:
        tree["rewards"] = [{"name": "none"}]
    if arguments.model is None:
        tree["model"]["path"] = str(folder / BYTES_MODEL)
        tree["rollout"] = {
            "engine": {"max_model_len": KEYBOARD_CONTEXT},
            "sampling": {"max_tokens": KEYBOARD_CONTEXT // 2},
        }
    file = folder / "config.yaml"
    file.write_text(write_yaml(tree), encoding="utf-8")
    waits = BY_HAND if arguments.gateway or arguments.model is None else ()
    config = load_config(file, [*settings, *waits, *arguments.overrides])
    check_env_options(config.env)
    if config.model.path == folder / BYTES_MODEL:
        build_bytes_model(config.model.path)
    return config, initial_model(config)


def _print_choices(env: str) -> None:
    """Prints the options of an env, and the values of one that its package has. Raises: ConfigError."""
    factory = env_factory(env)
    print(f"env {env}, options: {listed(options_of('env', factory)) or 'none'}")
    choices = getattr(factory, "choices", None)
    if choices is None:
        print(f"`slipstream try {env} 'env.options={{…}}' --keyboard` plays an episode")
        return
    option, values = choices()
    print(f"env.options.{option}, one of {len(values):,}:")
    for value in values:
        print(f"  {printable(value)}")


def build_bytes_model(folder: Path) -> None:
    """Writes a tokenizer with a token for each byte and a plain chat template, and a configuration without weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = CHATML_TOOLS
    fast.save_pretrained(folder)
    Qwen2Config(vocab_size=len(fast), eos_token_id=fast.eos_token_id).save_pretrained(folder)


async def _play(config: RunConfig, model: Path, arguments: argparse.Namespace) -> PlayedTask:
    # Imported here: transformers takes seconds.
    from transformers.utils.logging import disable_progress_bar

    from slipstream.models.tokenizer import Tokenizer
    from slipstream.rollout_servers.engines.registry import start_engine
    from slipstream.rollout_servers.rollouts.gateway.listener import serving
    from slipstream.rollout_servers.rollouts.player import Player

    split: Split = "eval" if arguments.eval else "train"
    env: Env = build_env(config.env)
    if arguments.task >= env.size(split):
        raise ConfigError(f"--task {arguments.task}: env {config.env.name} has {env.size(split)} {split} tasks")
    scoring = config.scoring.model_copy(update={"workers": min(1, config.scoring.workers)})
    scorer = Scorer(config.rewards, scoring, evaluated=config.evaluated, backoff_s=None)
    try:
        tokenizer = Tokenizer(model)
        if arguments.keyboard:
            engine = _keyboard(tokenizer)
        else:
            disable_progress_bar()  # of the weights' loading
            engine = await start_engine(config, model, eos_token_ids=tokenizer.eos_token_ids)
        try:
            by_hand = PlayedByHand(env) if arguments.gateway else None
            player = Player.from_config(config, by_hand or env, tokenizer, engine, scorer)
            async with serving(player.gateway, config, "try"):
                if by_hand is not None:
                    by_hand.gateway = player.gateway
                unscored = await player.generate(split, arguments.task, samples=1)
                scored = await player.score(unscored)
            view, session = unscored.played.episodes[0].view, None if by_hand is None else by_hand.described()
            return PlayedTask(config.env.name, split, arguments.task, view, scored.trajectories, session)
        finally:
            await engine.close()
    finally:
        scorer.close()


def _keyboard(tokenizer: "Tokenizer") -> "Engine":
    from slipstream.tools.keyboard import KeyboardEngine

    return KeyboardEngine(tokenizer, sys.stdin, sys.stderr)


# --- output -----------------------------------------------------------------------------------------------------------


def _tokens(trajectory: Trajectory, decode: Decode) -> list[dict[str, Any]]:
    """One record for each token."""
    mask, logprobs = action_mask(trajectory), behaviour_logprobs(trajectory)
    versions = {position: span.version for span in trajectory.spans for position in range(span.start, span.end)}
    turn, records = 0, []
    for position, token in enumerate(token_ids(trajectory).tolist()):
        turn += bool(mask[position] and not (position and mask[position - 1]))
        records.append(
            {
                "index": position,
                "id": token,
                "text": decode([token]),
                "mask": int(mask[position]),
                "turn": turn,
                "version": versions.get(position),
                "logprob": float(logprobs[position]) if mask[position] else None,
            }
        )
    return records


def _record(played: PlayedTask, decode: Decode) -> dict[str, Any]:
    view = played.view
    return {
        "env": played.env,
        "split": played.split,
        "task": played.index,
        "reference": view.reference,
        "ended": view.ended,
        "messages": view.messages,
        "turns": [_turn(turn) for turn in view.turns],
        "trajectories": [
            {
                "reward": trajectory.reward,
                "scores": trajectory.scores,
                "rewards": [{"end": reward.end, "value": reward.value} for reward in trajectory.rewards],
                "tokens": _tokens(trajectory, decode),
            }
            for trajectory in played.trajectories
        ],
        **({} if played.session is None else {"session": played.session}),
    }


def _turn(turn: Any) -> Mapping[str, Any]:
    return {
        "text": turn.text,
        "tokens": turn.tokens,
        "tool_calls": list(turn.tool_calls),
        "observation": turn.observation,
    }


def _print(played: PlayedTask, decode: Decode | None, *, full: bool) -> None:
    """Prints the turns first: the tokens may be thousands."""
    console = table_console(min_width=MIN_COLUMNS)
    if played.session is None:
        console.print(_turn_table(played.view, full=full))
    else:
        console.print(call_table(played.session))
    console.print(_reward_table(played.trajectories[0]))
    if decode is not None:
        for trajectory in played.trajectories:
            console.print(_token_table(trajectory, decode, full=full))
    if played.session is not None:
        print(account_of(played.session))
    print(
        f"env {played.env}, {played.split} task {played.index}: ended by {played.view.ended}, reference "
        f"{played.view.reference[:200]!r}" + ("" if full else "; --full shows all tokens and texts")
    )


def _turn_table(view: Episode, *, full: bool) -> Table:
    turns = Table(title="turns", title_justify="left", border_style="cyan")
    for name in ("turn", "tokens", "action", "tool calls", "observation"):
        turns.add_column(name, overflow="fold")
    prompt = view.prompt if isinstance(view.prompt, str) else _contents(view.prompt)
    turns.add_row("prompt", str(view.prompt_tokens), "", "", Text(_lines(prompt, full=full)))
    for number, turn in enumerate(view.turns, start=1):
        calls = "\n".join(
            f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)}) {call.get('error', '')}".strip()
            for call in turn.tool_calls
        )
        observation = turn.observation if isinstance(turn.observation, str) else _contents(turn.observation)
        cells = str(number), str(turn.tokens), turn.text, calls, observation
        turns.add_row(*(Text(_lines(cell, full=full)) for cell in cells))
    return turns


def _reward_table(first: Trajectory) -> Table:
    rewards = Table(title="reward", title_justify="left", border_style="cyan")
    rewards.add_column("part")
    rewards.add_column("value", justify="right")
    for name, value in first.scores.items():
        rewards.add_row(Text(printable(name)), f"{value:.6g}")
    rewards.add_row("reward", f"{first.reward:.6g}", style="bold")
    return rewards


def _token_table(trajectory: Trajectory, decode: Decode, *, full: bool) -> Table:
    table = Table(border_style="cyan", title="tokens", title_justify="left")
    for name in ("token", "id", "text", "mask", "turn", "version", "log-prob"):
        table.add_column(name, justify="left" if name == "text" else "right")
    parts = stretches(trajectory, decode)
    sections = {stretch.start for stretch in parts}
    left_out = {} if full else dict(_left_out(stretch) for stretch in parts if _is_long(stretch))
    end = 0
    for record in _tokens(trajectory, decode):
        if record["index"] in sections:
            table.add_section()
        if record["index"] in left_out:
            end = left_out[record["index"]]
            table.add_row("…", "", f"{end - record['index']:,} tokens more", style="dim")
        if record["index"] < end:
            continue
        logprob, version = record["logprob"], record["version"]
        table.add_row(
            str(record["index"]),
            str(record["id"]),
            Text(repr(record["text"])[1:-1]),
            str(record["mask"]),
            str(record["turn"]),
            "" if version is None else str(version),
            "" if logprob is None else f"{logprob:.3f}",
            style="bold" if record["mask"] else "dim",
        )
    return table


def _contents(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in messages)


def _is_long(stretch: Stretch) -> bool:
    return stretch.end - stretch.start > SHOWN_TOKENS


def _left_out(stretch: Stretch) -> tuple[int, int]:
    """First of the tokens in the middle that are not shown, and the first after them."""
    return stretch.start + SHOWN_TOKENS // 2, stretch.end - SHOWN_TOKENS // 2


def _cut(line: str) -> str:
    return line if len(line) <= SHOWN_LINE else f"{line[:SHOWN_LINE]} … ({len(line):,} characters)"


def _lines(text: str, *, full: bool) -> str:
    """Printable lines; of a long text its begin and end."""
    lines = text.split("\n")
    if not full:
        lines = [
            line if len(line) <= SHOWN_LINE else f"{line[:SHOWN_LINE]} … ({len(line):,} characters)" for line in lines
        ]
        if (more := len(lines) - SHOWN_LINES) > 0:
            half = SHOWN_LINES // 2
            lines = [*lines[:half], f"… {more:,} lines more …", *lines[-half:]]
    return "\n".join(printable(line) for line in lines)
