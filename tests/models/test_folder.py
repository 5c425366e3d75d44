"""The model folders that a configuration names."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import ValidationError

from slipstream.configs.load import load_config
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.learner import LearnerConfig
from slipstream.configs.schema.model import ModelConfig
from slipstream.models.digits import build_digits_model
from slipstream.models.folder import SAMPLE_BYTES, SAMPLES, initial_model, model_fingerprint, model_problems
from tests.configs.conftest import DEMO
from tests.models.hub import COMMIT, serve_hub


def run(folder: Path, **model: object) -> RunConfig:
    return RunConfig.model_validate({"run": {"dir": folder}, "model": model})


def test_model_is_built_once(tmp_path: Path) -> None:
    folder = initial_model(run(tmp_path, build="digits"))
    written = (folder / "model.safetensors").stat()
    assert initial_model(run(tmp_path, build="digits")) == folder
    assert (folder / "model.safetensors").stat() == written


def test_model_folder_is_used_in_place(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert initial_model(run(tmp_path, path=tmp_path)) == tmp_path


@pytest.mark.parametrize("path", ["/models/x", "a/b/c", "one"])
def test_missing_model_folder_is_named(path: str) -> None:
    with pytest.raises(ConfigError, match=rf"model.path={path} .*config.json"):
        initial_model(run(Path(), path=path))


@pytest.mark.parametrize("content", [b'{"vocab_size": 3', b"[]", b"\xff"], ids=["truncated", "list", "bytes"])
def test_damaged_configuration_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    (problem,) = model_problems(ModelConfig(path=tmp_path), LearnerConfig())
    assert str(tmp_path / "config.json") in problem
    assert "\n" not in problem


@dataclass
class Hub:
    """Processes that resolve models with a hub at `endpoint`, and a cache of their own."""

    home: Path
    endpoint: str = "http://127.0.0.1:9"  # the port `discard`: nothing listens

    def resolve(self, path: str, revision: str | None = None, **environment: str) -> str:
        """What a process prints that resolves a model: its folder, or the problem."""
        done = subprocess.run(
            [sys.executable, "-P", "-c", RESOLVE, path, *([revision] if revision else [])],
            env={
                "HF_ENDPOINT": self.endpoint, "HF_HOME": str(self.home), "PATH": "", "PYTHONPATH": ":".join(sys.path),
                **environment,
            },
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        return done.stdout.strip()


RESOLVE = """
import sys
from pathlib import Path
from slipstream.models.folder import model_folder
from slipstream.configs.runtime.errors import ConfigError
try:
    print(model_folder("model.path", Path(sys.argv[1]), *sys.argv[2:]))
except ConfigError as error:
    print("problem:", error)
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    model = tmp_path / "served"
    build_digits_model(model, seed=0)
    (model / "onnx").mkdir()
    (model / "onnx" / "config.json").write_text("{}")
    (model / "pytorch_model.bin").write_bytes(b"older")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    with serve_hub({"org/tiny": model, "org/empty": tmp_path / "empty"}) as endpoint:
        yield Hub(tmp_path / "home", endpoint)


def test_model_of_hub_is_taken_from_its_cache(hub: Hub, tmp_path: Path) -> None:
    folder = Path(hub.resolve("org/tiny"))
    assert (folder.name, folder.is_relative_to(hub.home)) == (COMMIT, True)
    served = {path.name for path in (tmp_path / "served").iterdir()}
    assert {path.name for path in folder.iterdir()} == served - {"onnx", "pytorch_model.bin"}
    assert model_fingerprint(folder) == model_fingerprint(tmp_path / "served")
    assert Path(hub.resolve("org/tiny", "v1")) == folder
    # Without a network.
    assert Path(Hub(hub.home).resolve("org/tiny")) == folder
    assert Path(hub.resolve("org/tiny", HF_HUB_OFFLINE="1")) == folder


def test_unavailable_model_of_hub_is_named(hub: Hub) -> None:
    for path, revision, part in (
        ("org/none", None, "RepositoryNotFoundError"),
        ("org/tiny", "v2", "v2"),
        ("org/empty", None, "safetensors"),
        ("modelscope:org/tiny", None, "pip install modelscope"),
    ):
        problem = hub.resolve(path, revision)
        assert problem.startswith(f"problem: model.path={path} ")
        assert part in problem


def test_missing_file_is_named_without_a_network(hub: Hub) -> None:
    (Path(hub.resolve("org/tiny")) / "model.safetensors").unlink()
    problem = hub.resolve("org/tiny", HF_HUB_OFFLINE="1")
    assert "model.safetensors" in problem
    assert str(hub.home) in problem
    problem = Hub(hub.home / "other").resolve("org/tiny", HF_HUB_OFFLINE="1")
    assert problem.startswith("problem: model.path=org/tiny ")
    assert "hf download org/tiny" in problem


def test_revision_without_hub_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model\.revision=v1"):
        initial_model(run(tmp_path, path=tmp_path, revision="v1"))
    with pytest.raises(ValidationError, match=r"model\.revision=v1"):
        run(tmp_path, build="digits", revision="v1")


def test_unreadable_model_path_is_named() -> None:
    (problem,) = model_problems(ModelConfig(path=Path(300 * "a")), LearnerConfig())
    assert problem.startswith("model.path=aaa")


def test_each_missing_model_of_the_learner_is_named(tmp_path: Path) -> None:
    overrides = [
        f"run.dir={tmp_path}", "learner.kl={coefficient: 0.1, reference: /models/reference}", "learner.advantage=gae",
        "learner.critic.path=/models/critic",
    ]  # fmt: skip
    config = load_config(DEMO, overrides)
    reference, critic = model_problems(config.model, config.learner)
    prime = load_config(
        DEMO,
        [f"run.dir={tmp_path}", "learner.advantage=prime", "learner.process_reward.path=/models/prime"],
    )
    (process_reward,) = model_problems(prime.model, prime.learner)
    assert process_reward.startswith("learner.process_reward.path=/models/prime ")
    assert reference.startswith("learner.kl.reference=/models/reference ")
    assert critic.startswith("learner.critic.path=/models/critic ")
    assert initial_model(config).is_dir()


def change_a_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"!")


@pytest.fixture
def built(tmp_path: Path) -> Path:
    build_digits_model(tmp_path / "built", seed=0)
    return tmp_path / "built"


def test_fingerprint_is_independent_of_folder(built: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "copy"
    shutil.copytree(built, elsewhere)
    (elsewhere / "README.md").touch()
    (elsewhere / "generation_config.json").unlink()
    assert model_fingerprint(elsewhere) == model_fingerprint(built)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: change_a_byte(folder / "config.json"),
        lambda folder: change_a_byte(folder / "model.safetensors"),
        lambda folder: (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors"),
        lambda folder: shutil.copy(folder / "model.safetensors", folder / "model-2.safetensors"),
    ],
    ids=["another configuration", "another weight", "another name", "one file more"],
)
def test_config_and_weights_change_fingerprint(built: Path, change: Callable[[Path], object]) -> None:
    before = model_fingerprint(built)
    change(built)
    assert model_fingerprint(built) != before


def test_large_files_are_sampled_from_start_to_end(built: Path) -> None:
    weights = built / "model.safetensors"
    size = 20 * SAMPLES * SAMPLE_BYTES
    found = set()
    for changed in (None, 0, size // 2, size - size // SAMPLES):
        with weights.open("wb") as file:
            file.truncate(size)
            if changed is not None:
                file.seek(changed)
                file.write(b"!")
        found.add(model_fingerprint(built))
    assert len(found) == 4
    assert weights.stat().st_size == size


def test_weights_in_bin_format_are_fallback(built: Path) -> None:
    with_both = model_fingerprint(built)
    (built / "pytorch_model.bin").write_bytes(b"older")
    assert model_fingerprint(built) == with_both
    (built / "model.safetensors").unlink()
    only = model_fingerprint(built)
    change_a_byte(built / "pytorch_model.bin")
    assert len({with_both, only, model_fingerprint(built)}) == 3
