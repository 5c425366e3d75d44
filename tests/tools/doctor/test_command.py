"""The command `slipstream doctor`."""

import json
import socket
from pathlib import Path

import pytest

from slipstream.tools.doctor import machine
from tests.tools.conftest import CommandLine
from tests.tools.run_command import DEMO, slipstream


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "TRIAL_BYTES", 1 << 20)


def test_machine_alone(cli: CommandLine, tmp_path: Path) -> None:
    code = cli("doctor", "--json", folder=tmp_path)
    found = json.loads(cli.out)
    assert {"GPUs", "Python", "torch", "/dev/shm", "open files", "disk", "sandbox", "own name"} <= {
        finding["check"] for finding in found
    }
    assert code == any(finding["verdict"] == "error" for finding in found)
    assert list(tmp_path.iterdir()) == []


def test_findings_of_a_run_have_verdict_and_remedy(cli: CommandLine, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        arguments = (DEMO, f"run.dir={tmp_path}", f"weights.control_port={port}")
        assert cli("doctor", *arguments) == 1
        errors = [line for line in cli.out.splitlines() if line.startswith("error")]
        assert any(str(port) in line for line in errors)
        assert f"{len(errors)} errors" in cli.out.splitlines()[-1]
        assert cli("doctor", *arguments, "--json") == 1
        assert all(entry["remedy"] for entry in json.loads(cli.out) if entry["verdict"] != "ok")


@pytest.mark.parametrize(
    "arguments",
    [["no.yaml"], [DEMO, "learner.stepz=1"], ["--hosts", "a,,b"], ["--hosts", "-oProxyCommand=x"], ["--what"]],
)
def test_wrong_command_line_or_configuration(arguments: list[object], cli: CommandLine) -> None:
    assert cli("doctor", *arguments) == 2
    assert cli.out == ""


def test_neither_torch_nor_an_engine_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('imported')")
    done = slipstream("doctor", DEMO, folder=tmp_path)
    assert "imported" not in done.stdout + done.stderr
    assert done.returncode in (0, 1)
