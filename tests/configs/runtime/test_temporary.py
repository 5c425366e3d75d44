"""Temporary folders of real processes, in which the libraries leave files when they are killed."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipstream.configs.runtime.temporary import own_temporary_folder, remove_leftovers

SERVER = """
import subprocess, sys, tempfile, time
from pathlib import Path
from slipstream.configs.runtime.temporary import own_temporary_folder
with own_temporary_folder() as folder:
    # As vllm.utils.network_utils.get_file_store_init_method names it.
    Path(tempfile.gettempdir(), "vllm_dist_0123456789abcdef").touch()
    command = [sys.executable, "-c", "import tempfile; print(tempfile.mkdtemp(), flush=True)"]
    subprocess.run(command, check=True)
    print(folder, flush=True)
    sys.stdin.read()
"""
RANK = """
from slipstream.configs.runtime.temporary import mark_torchrun_folder, remove_leftovers
mark_torchrun_folder()
print("removed", remove_leftovers())
"""


@pytest.fixture
def common(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files of this test and of what it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@contextmanager
def server() -> Iterator[tuple["subprocess.Popen[str]", Path]]:
    """A process with a folder of its own, and the folder."""
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            of_child, folder = Path(process.stdout.readline().strip()), Path(process.stdout.readline().strip())
            assert of_child.parent == folder
            yield process, folder
        finally:
            process.kill()


def test_folder_of_a_killed_server_is_removed(common: Path) -> None:
    with server() as (killed, left), server() as (running, kept):
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert any(file.name.startswith("vllm_dist_") for file in left.iterdir())
        assert remove_leftovers() == [left]
        assert (not left.exists(), len(list(kept.iterdir()))) == (True, 2)
        assert running.stdin is not None
        running.stdin.close()
        assert running.wait() == 0
    assert list(common.iterdir()) == []


def test_temporary_files_are_the_systems_again_afterwards(common: Path) -> None:
    with own_temporary_folder() as folder:
        assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(folder)
        assert remove_leftovers() == []
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(common)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
def test_folders_of_others_links_and_unknown_ones_are_kept(common: Path) -> None:
    others, elsewhere = common / "slipstream-server-a", common / "elsewhere"
    for folder in (others, elsewhere):
        folder.mkdir()
    os.chown(others, 12345, 12345)
    (common / "slipstream-server-b").symlink_to(elsewhere)
    (common / "torchelastic_a").mkdir()
    (common / "torchelastic_a" / "slipstream-owner").touch()  # on a full disk
    assert remove_leftovers() == []
    assert len(list(common.iterdir())) == 4


@pytest.mark.parametrize("marked", [True, False])
def test_folder_of_ended_torchrun_is_removed_if_a_rank_marked_it(common: Path, marked: bool) -> None:
    (common / "rank.py").write_text(RANK if marked else "print('removed []')")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "rank.py"]
    done = subprocess.run(command, cwd=common, check=True, timeout=200, capture_output=True, text=True)
    assert "removed []" in done.stdout, "torchrun runs at this time"
    (folder,) = common.glob("torchelastic_*")
    assert remove_leftovers() == ([folder] if marked else [])
    assert folder.exists() != marked
