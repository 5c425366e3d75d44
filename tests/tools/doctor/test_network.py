"""Checks of the network: names, interfaces, ports, addresses, and other hosts."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from slipstream.configs import RunConfig
from slipstream.configs.paths import UP, hold_run_lock
from slipstream.tools.doctor import network
from slipstream.tools.doctor.findings import Finding
from tests.conftest import free_port
from tests.tools.run_command import demo_config

ABSENT = "2001:db8::1"
"""An address for documentation, which no host has."""


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "CONNECT_S", 0.5)
    for variable in network.INTERFACE_VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def busy() -> Iterator[int]:
    """A port of loopback with a listener."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def config(folder: Path, *overrides: str, base: int = 0) -> RunConfig:
    return demo_config(folder, f"run.port_base={base or free_port()}", *overrides)


def checked(found: Iterator[Finding]) -> list[tuple[str, str]]:
    kept = [finding for finding in found if finding.check not in ("own name", "interfaces", "keys")]
    assert all(bool(finding.remedy) == (finding.verdict != "ok") for finding in kept)
    return [(finding.check, finding.verdict) for finding in kept]


# --- names and interfaces ---------------------------------------------------------------------------------------------


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert network.name("own name", "127.0.0.1", remedy="none").verdict == "ok"
    assert network.name("own name", "no.such.host.invalid", remedy="name it").verdict == "warning"
    monkeypatch.setattr(network, "SLOW_LOOKUP_S", 0.0)
    assert network.name("own name", "127.0.0.1", remedy="name it").verdict == "warning"
    monkeypatch.setattr(network, "LOOKUP_S", 0.0)
    answered = Event()
    monkeypatch.setattr(f"{network.__name__}.socket.getaddrinfo", lambda *_: [answered.wait(60)][:0])
    assert network.name("own name", "silent", remedy="name it").verdict == "warning"
    answered.set()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}, {"ok"}),
        ({"NCCL_SOCKET_IFNAME": "l"}, {"ok"}),  # a prefix
        ({"NCCL_SOCKET_IFNAME": "=l"}, {"error"}),
        ({"NCCL_SOCKET_IFNAME": "^docker"}, set()),
        ({"GLOO_SOCKET_IFNAME": "l"}, {"error"}),
        ({}, set()),
    ],
)
def test_interfaces_that_are_named(
    variables: dict[str, str], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert {finding.verdict for finding in network.interfaces(None)} == expected


def test_choice_among_interfaces_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{network.__name__}.socket.if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "ib0")])
    (found,) = network.interfaces(config(tmp_path, "weights.bind=0.0.0.0"))
    assert (found.verdict, "eth0, ib0" in found.value) == ("warning", True)
    assert not list(network.interfaces(config(tmp_path)))


# --- this host --------------------------------------------------------------------------------------------------------


def test_free_and_busy_ports(tmp_path: Path, busy: int) -> None:
    assert checked(network.network_findings(config(tmp_path))) == [("ports", "ok")]
    found = list(network.network_findings(config(tmp_path, f"weights.stream_port={busy}")))
    assert [finding.verdict for finding in found if finding.check == "ports"] == ["error"]
    assert f"weights.stream_port: port {busy}" in found[-1].value


def test_ports_of_the_running_run_are_its_own(tmp_path: Path, busy: int) -> None:
    settings = config(tmp_path, f"weights.stream_port={busy}")
    with hold_run_lock(settings.paths, by=UP):
        assert checked(network.network_findings(settings)) == [("ports", "ok")]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([f"buffer.endpoint=tcp://[{ABSENT}]:5555"], ("buffer.endpoint", "error")),
        (["buffer.endpoint=tcp://no.such.host.invalid:5555"], ("buffer.endpoint", "error")),
        ([f"weights.host={ABSENT}"], ("weights.control_port", "error")),
        # 127.1 is this host, but no name of loopback: as if its name were given, and loopback to bind
        (["weights.host=127.1"], ("weights.control_port", "error")),
    ],
)
def test_addresses_that_can_not_be_reached(overrides: list[str], expected: tuple[str, str], tmp_path: Path) -> None:
    assert expected in checked(network.network_findings(config(tmp_path, *overrides)))


def test_unencrypted_ports_beyond_loopback(tmp_path: Path) -> None:
    found = {finding.check: finding.verdict for finding in network.network_findings(config(tmp_path))}
    assert "keys" not in found
    found = {f.check: f.verdict for f in network.network_findings(config(tmp_path, "weights.bind=0.0.0.0"))}
    assert found["keys"] == "warning"


@pytest.mark.parametrize(
    ("ahead_s", "uncertain_s", "verdict"), [(0.9, 0.0, "ok"), (-1.2, 0.1, "warning"), (1.2, 0.3, "ok")]
)
def test_clocks(ahead_s: float, uncertain_s: float, verdict: str) -> None:
    assert network.clock("clock", ahead_s, uncertain_s).verdict == verdict


# --- other hosts, by a program `ssh` that runs the command here -------------------------------------------------------


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nwhile [ $# -gt 1 ]; do shift; done\nexec sh -c "$1"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program


def test_host_reports_its_clock_and_what_it_reaches(ssh: Path, tmp_path: Path, busy: int) -> None:
    base = free_port()
    settings = config(
        tmp_path,
        f"redis.url=redis://127.1:{busy}",
        f"buffer.bind=tcp://0.0.0.0:{base}",
        f"buffer.endpoint=tcp://127.1:{base}",  # listened on by the check itself
        f"weights.host={ABSENT}",
    )
    found = checked(network.host_findings(settings, ["peer"]))
    assert found[:3] == [("clock of peer", "ok"), ("peer", "ok"), ("peer", "ok")]
    assert {verdict for _, verdict in found[3:]} == {"error"}
    with socket.socket() as probe:  # no listener is left
        assert probe.connect_ex(("127.0.0.1", base))


def test_loopback_is_no_address_for_other_hosts(ssh: Path, tmp_path: Path) -> None:
    found = checked(network.host_findings(config(tmp_path), ["peer"]))
    assert found[0] == ("clock of peer", "ok")
    assert {verdict for _, verdict in found[1:]} == {"error"}


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'Permission denied' >&2; exit 255", "Permission denied"),
        ("echo Welcome; cat > /dev/null", "no answer"),
        ("exec sleep 600", "in time"),
    ],
    ids=["refused", "talks", "hangs"],
)
def test_host_that_does_not_answer(
    script: str, reason: str, ssh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh.write_text(f"#!/bin/sh\n{script}\n")
    monkeypatch.setattr("slipstream.tools.doctor.hosts.HOST_S", 1.0)
    (found,) = network.host_findings(None, ["peer"])
    assert (found.check, found.verdict, reason in found.value) == ("peer", "error", True)


def test_missing_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (found,) = network.host_findings(None, ["peer"])
    assert (found.verdict, "ssh" in found.value) == ("error", True)
