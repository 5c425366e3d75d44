"""The console script `slipstream`: its commands, and the argument types that several of them share."""

import argparse
import math
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from slipstream.configs.runtime.files import run_with_stdout
from slipstream.configs.runtime.signals import restore_default_sigint

if TYPE_CHECKING:
    from rich.console import Console

COMMANDS = {
    # Running
    "up": ("slipstream.tools.launch.up:command", "run all processes on this machine and show the progress"),
    "slurm": ("slipstream.tools.clusters.slurm:command", "submit a run as a job of a Slurm cluster"),
    "ray": ("slipstream.tools.clusters.ray:command", "run all processes on an existing Ray cluster"),
    "k8s": ("slipstream.tools.clusters.kubernetes:command", "write a run as Kubernetes objects (kustomize)"),
    "sky": ("slipstream.tools.clusters.sky:command", "write a run as tasks of SkyPilot"),
    # Before a run
    "check": ("slipstream.tools.check:command", "try env, prompts, rewards and tools of a configuration, in seconds"),
    "try": ("slipstream.tools.play:command", "play one episode of an env, and show its tokens, turns and rewards"),
    "doctor": ("slipstream.tools.doctor.command:command", "check the machine, its network and Redis before a run"),
    "fit": ("slipstream.tools.fit:command", "compute the GPU memory that a configuration needs, and a mesh that fits"),
    "config": ("slipstream.tools.reference:command", "list the keys of the configuration with their defaults"),
    "plugins": ("slipstream.tools.plugins:command", "list envs, tools, rewards and algorithms, installed ones too"),
    "keys": ("slipstream.tools.keys:command", "make the keys that encrypt the connections of a run"),
    "conform": ("slipstream.tools.conform:command", "compare the algorithms with reference values"),
    # Watching
    "dashboard": ("slipstream.tools.dashboard.command:command", "serve a page over runs, live and finished"),
    "top": ("slipstream.tools.top:command", "show a run that another process runs as a live table"),
    "samples": ("slipstream.tools.samples:command", "show what the policy generated during a run"),
    "summary": ("slipstream.tools.summary:command", "show the metrics of a finished run and redraw its curves"),
    "report": ("slipstream.tools.dashboard.report:command", "write runs as one self-contained HTML file"),
    "trace": ("slipstream.tools.ledger.trace:command", "write the life of groups and steps as a timeline for Perfetto"),
    "ledger": ("slipstream.tools.cli:ledger", "check, show and export the groups and tokens of a run"),
    # Looking for a cause
    "diff": ("slipstream.tools.rewind.diff:command", "show how two runs differ, and where their metrics part"),
    "replay": ("slipstream.tools.rewind.replay:command", "do recorded training steps again, or with other settings"),
    "bisect": (
        "slipstream.tools.rewind.bisect:command",
        "find the groups that broke a metric, by replays without them",
    ),
}
"""By name: `module:function` with the signature `(argv) -> exit code`, and the purpose."""
LEDGER_COMMANDS = {
    "verify": ("slipstream.tools.ledger.inspect:verify", "check the consistency of a run's ledger"),
    "show": ("slipstream.tools.ledger.inspect:show", "report on a run's groups, or show the history of one"),
    "account": ("slipstream.tools.ledger.account:command", "show what has become of every generated token"),
    "export": ("slipstream.tools.ledger.export:command", "write a run's groups to a parquet file"),
    "filtration-report": (
        "slipstream.tools.ledger.filtration_report:command",
        "compare PF-PPO's strategies on exported groups",
    ),
}

ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("train", "run", "start", "grpo", "ppo"), "`slipstream up CONFIG` trains"),
    **dict.fromkeys(
        ("sft", "dpo", "reward", "kto"),
        "`slipstream up` trains with the trainer that `learner.trainer` names, such as sft (docs/trainings.md)",
    ),
    **dict.fromkeys(
        ("resume", "continue"), "`slipstream up CONFIG` continues an unfinished run; `--fresh` starts over"
    ),
    **dict.fromkeys(
        ("status", "watch", "monitor", "logs", "tensorboard"),
        "`slipstream dashboard` serves a page over runs, `slipstream top RUN` shows one in a terminal; logs/ and "
        "metrics.jsonl are in its folder, and `tracking` sends metrics elsewhere (docs/watch.md)",
    ),
    **dict.fromkeys(("compare",), "`slipstream diff RUN_A RUN_B` shows how two runs differ"),
    **dict.fromkeys(
        ("serve", "chat", "generate", "infer"),
        "`vllm serve RUN_FOLDER/model` serves a trained model; `slipstream try CONFIG --model FOLDER` plays an episode",
    ),
    **dict.fromkeys(
        ("export", "merge", "convert", "save"),
        "a finished run's folder has model/, in Hugging Face's format, adapters merged into it (`model.lora.export`); "
        "`slipstream ledger export RUN --out FILE` writes the answers",
    ),
    **dict.fromkeys(
        ("eval", "evaluate", "test"), "`slipstream up` evaluates, as the section `eval` of the configuration says"
    ),
    **dict.fromkeys(("validate", "lint"), "`slipstream check CONFIG` tries a configuration"),
    **dict.fromkeys(("diagnose", "env", "info"), "`slipstream doctor` checks the machine and its packages"),
    **dict.fromkeys(("bench", "benchmark"), "`python -m benchmarks`, in a checkout of the repository, measures"),
    **dict.fromkeys(("buffer", "rollout", "learner"), "a command of its own, without `slipstream` before it"),
    **dict.fromkeys(
        ("submit", "sbatch", "cluster", "launch"),
        "`slipstream slurm` and `slipstream ray` run on a cluster, `slipstream k8s` and `slipstream sky` write one's "
        "files (docs/clusters.md)",
    ),
    **dict.fromkeys(("stop", "kill"), "Ctrl-C, or SIGTERM to `slipstream up`, stops a run once its step is saved"),
    **dict.fromkeys(("list", "runs", "ls"), "the folders in runs/ are the runs; `slipstream dashboard` lists them"),
}
"""Answers to commands of other frameworks: the command or document to use instead."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Exits 2 on mistakes in the command line or the configuration, with one line for each."""
    sys.exit(run_with_stdout(lambda: _run(argv)))


def dispatch(
    prog: str,
    description: str,
    commands: Mapping[str, tuple[str, str]],
    argv: Sequence[str] | None,
    *,
    metavar: str = "command",
    version: str | None = None,
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Runs the command that the first argument names; returns its exit code.

    Args:
        prog: the program name in the usage line.
        commands: see `COMMANDS`.
        argv: None: the arguments of this process.
        metavar: name of the first argument in the help.
        version: printed by `--version`; None: there is no such option.
        elsewhere: answers to commands that there are not.
    """
    width = max(map(len, commands))
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog="\n".join(f"  {name:<{width}}  {purpose}" for name, (_, purpose) in commands.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if version is not None:
        parser.add_argument("--version", action="version", version=f"{prog} {version}")
    parser.add_argument(metavar, help=f"see below; `{prog} {metavar.upper()} --help` has details")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=f"arguments of the {metavar}")
    parsed = parser.parse_args(argv)
    name: str = getattr(parsed, metavar)
    if name not in commands:
        parser.error(_unknown(name, metavar, commands, elsewhere))
    target, _ = commands[name]
    module, _, function = target.partition(":")
    code: int = getattr(import_module(module), function)(parsed.arguments)
    return code


def _unknown(name: str, metavar: str, commands: Mapping[str, object], elsewhere: Mapping[str, str]) -> str:
    from slipstream.configs.runtime.errors import suggest

    if name in elsewhere:
        return f"there is no {metavar} {name!r}: {elsewhere[name]}"
    return f"there is no {metavar} {name!r}{suggest(name, list(commands)) or '; known: ' + ', '.join(commands)}"


def ledger(argv: Sequence[str]) -> int:
    """Runs `slipstream ledger`; returns its exit code."""
    description = "Read the ledger of a running, finished or crashed run."
    return dispatch("slipstream ledger", description, LEDGER_COMMANDS, argv)


def at_least(least: int) -> Callable[[str], int]:
    """Argument type: an integer that is not less."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return int(text)

    return number


def seconds(text: str) -> float:
    """Argument type: a positive finite number."""
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be more than 0, and finite")
    return float(text)


def new_file(text: str) -> Path:
    """Argument type: a file path in an existing folder. Checked at the start, before hours of work."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder; name a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}; make it, or name a file elsewhere")
    return path


def printable(text: str) -> str:
    """The text with control characters escaped: a terminal would obey them."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def table_console(*, min_width: int) -> "Console":
    """A console of at least `min_width` columns: rich truncates tables to the width, a terminal only wraps lines."""
    from rich.console import Console

    console = Console()
    console.width = max(console.width, min_width)
    return console


def _run(argv: Sequence[str] | None) -> int:
    with _quiet_ctrl_c():
        from slipstream.configs.arguments import exit_code
        from slipstream.configs.runtime.logging import configure_logging
    if argv is None:  # else the process has a caller, and logs as that one wants
        configure_logging("slipstream", level="info", folder=None)

    def command() -> int:
        _require_working_directory()
        return dispatch(
            "slipstream",
            "Asynchronous reinforcement learning for language models.",
            COMMANDS,
            argv,
            version=_version(),
            elsewhere=ELSEWHERE,
        )

    return exit_code(command)


def _version() -> str:
    """The version that is installed: a bare checkout on the import path has none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("slipstream")
    except PackageNotFoundError:
        return "of a checkout that is not installed"


def _require_working_directory() -> None:
    """Raises: ConfigError when it was deleted: neither relative paths nor torch work without one."""
    from slipstream.configs.runtime.errors import ConfigError

    try:
        Path.cwd()
    except FileNotFoundError:
        raise ConfigError("the working directory was deleted; change to another one") from None


@contextmanager
def _quiet_ctrl_c() -> Iterator[None]:
    """Ctrl-C ends the process without a traceback, during imports that take most of a second."""
    previous = signal.getsignal(signal.SIGINT)
    restore_default_sigint()
    yield
    signal.signal(signal.SIGINT, previous)


if __name__ == "__main__":
    main()
