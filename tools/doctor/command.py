"""`slipstream doctor`: checks of the machine, its network and Redis before a run, each with its remedy."""

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from slipstream.configs import RunConfig
from slipstream.configs.load import load_config
from slipstream.tools.doctor.findings import Finding
from slipstream.tools.doctor.gpus import gpu_findings
from slipstream.tools.doctor.machine import machine_findings
from slipstream.tools.doctor.network import host_findings, network_findings
from slipstream.tools.doctor.packages import package_findings
from slipstream.tools.doctor.redis import redis_findings
from slipstream.tools.launch.ports import choose_port_base, is_confined

DEFAULT_FOLDER = Path("runs")
"""Folder of the runs, as by default in a configuration."""


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream doctor`; returns 0, or 1 if there is an error. Raises: ConfigError."""
    parser = argparse.ArgumentParser(
        prog="slipstream doctor",
        description="Check this machine, and with CONFIG what the run needs: GPUs, packages, memory, disk, sandbox, "
        "names, ports, Redis, clocks.",
    )
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help="YAML file of the run")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key.path=value", help="change one key; the value is read as YAML"
    )
    parser.add_argument(
        "--hosts",
        type=_hosts,
        default=(),
        metavar="HOST,HOST",
        help="other hosts of the run, as ssh logs in there without a password: their clocks, and whether they reach "
        "the run's addresses",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    arguments = parser.parse_intermixed_args(argv)
    config = _read(arguments.config, arguments.overrides) if arguments.config is not None else None
    findings = []
    for finding in examine(config, hosts=arguments.hosts):
        findings.append(finding)
        if not arguments.json:
            print(finding.text, flush=True)
    verdicts = Counter(finding.verdict for finding in findings)
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False))
    else:
        print(f"\n{verdicts['error']} errors, {verdicts['warning']} warnings, {verdicts['ok']} ok")
    return 1 if verdicts["error"] else 0


def examine(config: RunConfig | None, *, hosts: Sequence[str] = ()) -> Iterator[Finding]:
    """The findings, as they are made; without a configuration those of the machine alone."""
    yield from gpu_findings()
    yield from package_findings(config)
    yield from machine_findings(config, config.run.dir if config is not None else DEFAULT_FOLDER)
    yield from network_findings(config)
    if config is not None:
        yield from redis_findings(config)
    yield from host_findings(config, hosts)


def _read(file: Path, overrides: Sequence[str]) -> RunConfig:
    """The configuration, with the ports that `slipstream up` would choose. Raises: ConfigError."""
    config = load_config(file, overrides)
    if config.run.port_base is None and is_confined(config.buffer, config.weights):
        return load_config(file, [*overrides, f"run.port_base={choose_port_base(config.paths)}"])
    return config


def _hosts(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or any(name.startswith("-") for name in names):
        raise argparse.ArgumentTypeError(f"{text!r} is no list such as host-1,host-2")
    return names
