"""Shared memory: had at once or refused, gone with its owner, however that ends."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.buffer.wire.weights.layout import SHARED_MEMORY, Segment, SegmentError, host_identity, sweep

OWNER = """
import os, sys
from pathlib import Path
from slipstream.buffer.wire.weights.layout import Segment
os.getpid = lambda: 7  # as in two containers, each with a count of its own
print(Segment(sys.argv[1], 10, folder=Path(sys.argv[2])).path, flush=True)
sys.stdin.read()
"""


def owner(run: str, folder: Path) -> "subprocess.Popen[str]":
    """A process with a segment."""
    command = [sys.executable, "-c", OWNER, run, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def segment_of(process: "subprocess.Popen[str]") -> Path:
    """Its segment, once it has it."""
    assert process.stdout is not None, "a pipe"
    return Path(process.stdout.readline().strip())


def test_a_segment_has_its_size_and_is_removed(run_name: str) -> None:
    segment = Segment(run_name, 12_345)
    assert segment.path.stat().st_size == 12_345
    assert segment.path.stat().st_mode & 0o077 == 0
    segment.close()
    assert not segment.path.exists()


def test_segment_without_room_is_refused_and_leaves_nothing(run_name: str) -> None:
    # The learner logs what servers of other hosts fail with.
    with pytest.raises(SegmentError, match=rf"/dev/shm on {socket.gethostname()} can't hold .* MB are free.*shm_size"):
        Segment(run_name, 1 << 50)
    assert list(SHARED_MEMORY.glob(f"*{run_name}*")) == []


def test_no_folder_is_said(run_name: str, tmp_path: Path) -> None:
    with pytest.raises(SegmentError):
        Segment(run_name, 1, folder=tmp_path / "absent")


def test_sweep_removes_segments_of_dead_owners_of_any_run(run_name: str, tmp_path: Path) -> None:
    mine = Segment(run_name, 1, folder=tmp_path)
    with owner(run_name, tmp_path) as process, owner("another", tmp_path) as other:
        theirs = [segment_of(process), segment_of(other)]
        assert sweep(tmp_path) == []
        process.kill()
        process.wait()
        assert sweep(tmp_path) == theirs[:1]
        other.kill()
    assert theirs[1].exists()
    Segment(run_name, 1, folder=tmp_path).close()  # frees what the dead have left, for itself
    assert not theirs[1].exists()
    assert mine.path.exists()
    mine.close()


def test_a_host_is_the_same_as_itself() -> None:
    assert host_identity() == host_identity() != ""
