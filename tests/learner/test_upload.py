"""Copies of checkpoints in object stores: complete or not there, the newest first, fetched into a new run folder."""

import os
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fsspec.core import url_to_fs

from slipstream.configs.paths import RunPaths, checkpoint_name, checkpoint_steps
from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner import upload
from slipstream.learner.upload import MANIFEST, DamagedError, RunStore, StoreError, Uploader, fetch_checkpoint
from tests.conftest import free_port

PATIENCE_S = 60.0
MOTO_PYTHON = os.environ.get("SLIPSTREAM_MOTO_PYTHON")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A bucket of a server with S3's protocol."""
    if MOTO_PYTHON is None:
        pytest.skip("make s3-check runs it")
    endpoint = f"http://127.0.0.1:{free_port()}"
    command = [MOTO_PYTHON, "-m", "moto.server", "-H", "127.0.0.1", "-p", endpoint.rpartition(":")[2]]
    with subprocess.Popen(command) as server, pytest.MonkeyPatch.context() as environment:
        for name, value in {"ENDPOINT_URL": endpoint, "ACCESS_KEY_ID": "id", "SECRET_ACCESS_KEY": "secret"}.items():
            environment.setenv(f"AWS_{name}", value)
        environment.delenv("AWS_CA_BUNDLE", raising=False)
        try:
            give_up = time.monotonic() + PATIENCE_S
            while True:
                assert server.poll() is None
                assert time.monotonic() < give_up
                try:
                    httpx.put(f"{endpoint}/runs").raise_for_status()
                    break
                except httpx.HTTPError:
                    time.sleep(0.05)
            yield "s3://runs"
        finally:
            server.terminate()


@pytest.fixture(params=["memory", "file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/{uuid.uuid4().hex}"
    return f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"file://{tmp_path}/store"


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run")


def save(paths: RunPaths, step: int) -> Path:
    """Writes something like a checkpoint; its size is the same for each step."""
    folder = paths.checkpoints / checkpoint_name(step)
    (folder / "more").mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"%06d" % step * 10_000)
    (folder / "more" / "state.json").write_bytes(b"%06d" % step)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def put(store: RunStore, folder: Path) -> set[str]:
    """Copies a checkpoint; returns the files that were copied."""
    copied = set[str]()
    store.put(folder, f"checkpoints/{folder.name}", done=copied)
    return copied


def change(url: str, name: str, data: bytes | None) -> None:
    """Overwrites a stored file, or removes it."""
    files, root = url_to_fs(url, use_listings_cache=False)
    if data is None:
        files.rm_file(f"{root}/run/{name}")
    else:
        files.pipe_file(f"{root}/run/{name}", data)


def test_latest_sound_checkpoint_is_fetched_into_a_new_folder(url: str, paths: RunPaths, tmp_path: Path) -> None:
    store, new = RunStore(url, run="run"), RunPaths(tmp_path / "new")
    assert fetch_checkpoint(store, paths) is None
    saved = {step: save(paths, step) for step in (1, 2, 3, 4, 5)}
    for folder in saved.values():
        put(store, folder)
    change(url, f"checkpoints/step-000005/{MANIFEST}", None)
    change(url, "checkpoints/step-000004/__0_0.distcp", b"000004" * 9_999 + b"000005")
    change(url, "checkpoints/step-000003/more/state.json", None)
    put(store, save(paths, 6))
    change(url, f"checkpoints/step-000006/{MANIFEST}", b"{")
    assert store.steps() == [1, 2, 3, 4, 6]
    assert fetch_checkpoint(store, new) == 2
    assert checkpoint_steps(new.checkpoints) == [2]
    assert content(new.checkpoints / "step-000002") == content(saved[2])
    assert fetch_checkpoint(store, new) is None
    store.prune(keep=1, step=3)
    assert store.steps() == [3, 4, 6]
    with pytest.raises(StoreError, match="none of the checkpoints"):
        fetch_checkpoint(store, RunPaths(tmp_path / "another"))


def test_copy_is_replaced_only_if_its_content_differs(url: str, paths: RunPaths) -> None:
    store, folder = RunStore(url, run="run"), save(paths, 1)
    everything = {"__0_0.distcp", "more/state.json"}
    assert [put(store, folder), put(store, folder)] == [everything, set()]
    (folder / "__0_0.distcp").write_bytes(b"000009" * 10_000)  # of a repeated step
    assert put(store, folder) == everything
    store.fetch("checkpoints/step-000001", paths.root / "fetched")
    assert content(paths.root / "fetched") == content(folder)
    change(url, "checkpoints/step-000001/__0_0.distcp", b"short")
    with pytest.raises(DamagedError):
        store.fetch("checkpoints/step-000001", paths.root / "damaged")


def test_url_without_client_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing://bucket"):
        RunStore("nothing://bucket", run="run")


class Store(RunStore):
    """Fails as often as told, and copies only while it is open."""

    def __init__(self, *, failures: int = 0) -> None:
        super().__init__(f"memory://{uuid.uuid4().hex}", run="run")
        self.failures = failures
        self.open, self.started = threading.Event(), threading.Event()
        self.open.set()
        self.names: list[str] = []

    def put(self, folder: Path, name: str, *, done: set[str]) -> None:
        self.started.set()
        assert self.open.wait(PATIENCE_S)
        self.names.append(name)
        if self.failures:
            self.failures -= 1
            raise ConnectionError("refused")
        super().put(folder, name, done=done)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "FIRST_PAUSE_S", 0.01)


def test_failed_copy_is_repeated(paths: RunPaths) -> None:
    store = Store(failures=3)
    save(paths, 1)
    uploads = Uploader(store, paths, keep=1)
    uploads.checkpoint(1)
    (paths.export / "tokenizer").mkdir(parents=True)
    (paths.export / "tokenizer" / "vocabulary.json").write_text("{}")
    uploads.model()
    uploads.finish(deadline_s=PATIENCE_S)
    assert uploads.counts == {"completed": 2, "given_up": 0}
    assert store.names == ["checkpoints/step-000001"] * 4 + ["model"]
    assert store.steps() == [1]
    assert set(store.manifest("model") or ()) == {"tokenizer/vocabulary.json"}
    assert content(paths.checkpoints).keys() == {"step-000001/__0_0.distcp", "step-000001/more/state.json"}


def test_newest_checkpoint_waits_and_older_ones_are_given_up(paths: RunPaths) -> None:
    store = Store()
    store.open.clear()
    uploads = Uploader(store, paths, keep=1)
    for step in (1, 2, 3):
        folder = save(paths, step)
        uploads.checkpoint(step)
        if step == 1:
            assert store.started.wait(PATIENCE_S)
            shutil.rmtree(folder)  # as one beyond `keep`
    store.open.set()
    uploads.finish(deadline_s=PATIENCE_S)
    assert store.names == ["checkpoints/step-000001", "checkpoints/step-000003"]
    assert uploads.counts == {"completed": 2, "given_up": 1}
    assert store.steps() == [3]


def test_failing_copy_is_given_up_for_a_newer_checkpoint(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "FIRST_PAUSE_S", PATIENCE_S)
    store = Store(failures=1)
    save(paths, 1)
    uploads = Uploader(store, paths, keep=2)
    uploads.checkpoint(1)
    assert store.started.wait(PATIENCE_S)
    save(paths, 2)
    uploads.checkpoint(2)
    uploads.finish(deadline_s=PATIENCE_S / 2)
    assert uploads.counts == {"completed": 1, "given_up": 1}
    assert store.steps() == [2]


def test_finish_does_not_wait_beyond_its_deadline(paths: RunPaths) -> None:
    store = Store()
    store.open.clear()
    save(paths, 1)
    uploads = Uploader(store, paths, keep=1)
    uploads.checkpoint(1)
    assert store.started.wait(PATIENCE_S)
    uploads.finish(deadline_s=0.01)
    assert uploads.counts == {"completed": 0, "given_up": 1}
    store.open.set()
