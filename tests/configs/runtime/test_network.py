"""The network interface of gloo and NCCL."""

import os

import pytest

from slipstream.configs.runtime.network import is_local_address, resolution_error, tcp_address, use_loopback_interface

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
VARIABLES = (*INTERFACES, "LOCAL_WORLD_SIZE", "WORLD_SIZE")
ONE_HOST = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
TWO_HOSTS = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("bind", "environment", "interface"),
    [
        ("127.0.0.1", {}, "lo"),
        ("127.0.0.1", ONE_HOST, "lo"),
        ("::1", {}, "lo"),
        ("127.0.0.1", TWO_HOSTS, None),
        ("0.0.0.0", ONE_HOST, None),
        ("::", {}, None),
        ("127.0.0.1", dict.fromkeys(INTERFACES, "eth1"), "eth1"),
    ],
    ids=[
        "alone", "ranks-of-one-host", "ipv6", "ranks-of-two-hosts", "servers-elsewhere", "servers-elsewhere-ipv6",
        "chosen-by-the-user",
    ],
)  # fmt: skip
def test_loopback_is_used_when_all_peers_are_on_it(
    bind: str, environment: dict[str, str], interface: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    use_loopback_interface(bind)
    assert [os.environ.get(name) for name in INTERFACES] == [interface, interface]


def test_ipv6_hosts_stand_in_brackets() -> None:
    assert (tcp_address("127.0.0.1", 5), tcp_address("::1", 5)) == ("tcp://127.0.0.1:5", "tcp://[::1]:5")


@pytest.mark.parametrize(
    ("address", "is_local"),
    [
        ("tcp://127.0.0.2:1", True), ("tcp://localhost:1", True), ("tcp://[::1]:1", True), ("ipc:///run/b", True),
        ("tcp://0.0.0.0:1", False), ("tcp://[::]:1", False), ("tcp://buffer:1", False), ("tcp://*:1", False),
    ],
)  # fmt: skip
def test_only_loopback_and_ipc_are_local(address: str, is_local: bool) -> None:
    assert is_local_address(address) is is_local


def test_unresolvable_host_is_named() -> None:
    assert resolution_error("tcp://127.0.0.1:1") == ""
    assert "no-such-host.invalid" in resolution_error("tcp://no-such-host.invalid:1")
