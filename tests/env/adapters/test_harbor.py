"""Task folders of Harbor: their format, the rule for the sandbox, and episodes in the real sandbox and in Docker."""

import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs.load import load_config
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.run import EnvConfig
from slipstream.env.adapters.harbor.__main__ import main
from slipstream.env.adapters.harbor.env import Catalog, Harbor
from slipstream.env.adapters.harbor.folder import HarborTask
from slipstream.env.adapters.harbor.places import read_rewards, remove_abandoned, sandbox_problem
from slipstream.env.adapters.harbor.recipe import NeedsImage, Recipe
from slipstream.env.base import EnvFailed
from slipstream.env.registry import build_env
from slipstream.models.tokenizer import Tokenizer
from slipstream.rollout_servers.engines.registry import start_engine
from slipstream.rollout_servers.rollouts.base import EpisodeFailed
from tests.rollout_servers.rollouts.chat import build_chat_model
from tests.rollout_servers.rollouts.gateway.harness import Recorder, run_config, served
from tests.rollout_servers.rollouts.test_conversation import chat_answer

EXAMPLES = Path(__file__).parents[3] / "examples" / "agents"
TASKS = EXAMPLES / "harbor"
SHELL = [sys.executable, str(EXAMPLES / "shell.py")]

needs_docker = pytest.mark.skipif("SLIPSTREAM_HARBOR_CHECK" not in os.environ, reason="make harbor-check runs it")


@pytest.fixture(scope="module", autouse=True)
def _sandbox() -> None:
    if problem := sandbox_problem():
        pytest.skip(f"no sandbox here: {problem}")


@pytest.fixture
def copy(tmp_path: Path) -> Any:
    """Makes a task like hello, with changed files."""

    def make(name: str = "task", **files: str | None) -> Path:
        folder = tmp_path / "tasks" / name
        shutil.copytree(TASKS / "hello", folder)
        for path, text in files.items():
            if text is None:
                (folder / path).unlink()
            else:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(text)
        return folder

    return make


def harbor(path: Path = TASKS, **options: Any) -> Harbor:
    env = build_env(EnvConfig(name="harbor", options={"path": str(path), "command": ["true"], **options}))
    assert isinstance(env, Harbor)
    return env


async def scored(folder: Path, *, solved: bool = False, runtime: Any = "sandbox") -> dict[str, float]:
    catalog = Catalog(runtime)
    (task,) = catalog.read(str(folder))
    assert catalog.runtime(task) == runtime
    async with catalog.place(task) as place:
        if solved:
            await place.solve()
        return dict(await place.rewards())


# --- tasks ------------------------------------------------------------------------------------------------------------


def test_tasks_are_split_by_their_content() -> None:
    env = harbor()
    shown = {
        split: {env.task(split, index).info["task"] for index in range(env.size(split))} for split in ("train", "eval")
    }
    assert shown["train"]
    assert shown["train"] | shown["eval"] == {"examples/hello", "examples/totals", "examples/words"}
    assert not shown["train"] & shown["eval"]
    assert env.task("train", 0).prompt == "Write the word `hello` to the file `/app/hello.txt`.\n"
    with pytest.raises(IndexError):
        env.task("train", env.size("train"))
    assert (
        harbor().fingerprint()
        == env.fingerprint()
        != harbor(TASKS / "hello", eval_path=str(TASKS / "words")).fingerprint()
    )


def test_held_out_tasks_of_a_folder_are_not_trained_on(copy: Any) -> None:
    copy("same"), copy("other", **{"instruction.md": "Do something else."})
    held_out = copy("held_out").parent.parent / "held_out"
    shutil.move(held_out.parent / "tasks" / "held_out", held_out)
    env = harbor(held_out.parent / "tasks", eval_path=str(held_out))
    assert [env.task("train", index).info["task"] for index in range(env.size("train"))] == ["examples/hello"]
    assert env.task("train", 0).prompt == "Do something else."


def test_task_is_read_as_harbor_has_it(copy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET", "from outside")
    toml = """
    version = "1.0"
    [agent]
    timeout_sec = 900
    user = "agent"
    [verifier]
    env = { A = "${SET}", B = "${UNSET:-default}", C = "plain" }
    [environment]
    memory = "2G"
    storage = "512M"
    cpus = 2
    allow_internet = false
    docker_image = "registry/image:tag"
    gpus = 0
    mcp_servers = []
    workdir = "/work"
    """
    instruction = "<!-- benchmark canary 1234 -->\n# another canary\n\nDo it.\n"
    folder = copy(**{"task.toml": toml, "instruction.md": instruction, "environment/Dockerfile": None})
    task = HarborTask.read(folder)
    assert (task.instruction, task.agent_timeout_s, task.verifier_timeout_s) == ("Do it.\n", 900, 600)
    assert (task.memory_mb, task.storage_mb, task.cpus, task.has_network) == (2048, 512, 2, False)
    assert (task.image, task.workdir, task.agent_user, task.name) == ("registry/image:tag", "/work", "agent", "task")
    assert task.verifier_environment == {"A": "from outside", "B": "default", "C": "plain"}


@pytest.mark.parametrize(
    ("files", "shown"),
    [
        ({"tests/test.sh": None}, "tests/test.sh"),
        ({"environment/Dockerfile": None}, "environment/Dockerfile"),
        ({"instruction.md": None}, "instruction.md"),
        ({"task.toml": "[environment"}, "task"),
        ({"task.toml": "[environment]\ngpus = 1"}, "environment.gpus"),
        ({"task.toml": "[[steps]]\nname = 'one'"}, "steps"),
        ({"task.toml": "[environment]\nnetwork_mode = 'allowlist'"}, "allowlist"),
        ({"task.toml": "[environment]\nos = 'windows'"}, "linux"),
        ({"task.toml": "[environment]\nmemory_mb = 'much'"}, "much"),
        ({"task.toml": "[verifier]\nenvironment_mode = 'separate'"}, "shared"),
        ({"task.toml": "[verifier]\nenv = { A = '${NO_SUCH_VARIABLE}' }"}, "NO_SUCH_VARIABLE"),
        ({"environment/docker-compose.yaml": "services: {}"}, "docker-compose"),
    ],
)  # fmt: skip
def test_unusable_task_is_named(copy: Any, files: dict[str, str | None], shown: str) -> None:
    copy("good"), copy("bad", **files)
    folder = copy("other", **{"instruction.md": "Write hello, please."}).parent
    with pytest.raises(ConfigError, match=shown) as refused:
        harbor(folder)
    assert "task bad: " in str(refused.value)
    env = harbor(folder, skip_unusable=True)
    assert env.size("train") + env.size("eval") == 2


@pytest.mark.parametrize(
    ("dockerfile", "shown"),
    [
        ("FROM debian:12\nWORKDIR /app\nRUN apt-get update", "RUN"),
        ("FROM my/image\nWORKDIR /app", "FROM my/image"),
        ("FROM debian:12 AS one\nWORKDIR /app", "AS one"),
        ("FROM debian:12\nWORKDIR /app\nCOPY --from=one a /app/", "--from"),
        ("FROM debian:12\nWORKDIR /app\nADD https://example.com/a /app/", "https"),
        ("FROM debian:12\nWORKDIR /app\nCOPY Dockerfile /usr/bin/x", "/usr/bin/x"),
        ("FROM debian:12\nWORKDIR /app\nCOPY Dockerfile ../../etc/x", "etc"),
        ("FROM debian:12\nWORKDIR /app\nCOPY ../tests /app/", "tests"),
        ("FROM debian:12\nWORKDIR /app\nCOPY missing /app/", "missing"),
        ("FROM debian:12\nENV A=$PATH\nWORKDIR /app", "ENV"),
        ("FROM debian:12\nWORKDIR /app\nUSER agent", "USER"),
        ("FROM debian:12", "WORKDIR"),
    ],
)  # fmt: skip
def test_other_dockerfiles_need_their_image(copy: Any, dockerfile: str, shown: str) -> None:
    folder = copy(**{"environment/Dockerfile": dockerfile})
    with pytest.raises(NeedsImage, match=shown):
        Recipe.of(HarborTask.read(folder))
    with pytest.raises(ConfigError, match="task task"):
        harbor(folder, runtime="sandbox")


@pytest.mark.parametrize("line", ["apt-get install -y curl", "uvx pytest", "  pip install pytest && pytest"])
def test_tests_that_install_need_their_image(copy: Any, line: str) -> None:
    folder = copy(**{"tests/test.sh": f"#!/bin/sh\n# pip is not used\n{line}\n"})
    with pytest.raises(NeedsImage, match="installs"):
        Recipe.of(HarborTask.read(folder))


async def test_dockerfile_is_applied(copy: Any) -> None:
    dockerfile = """
    # A comment
    FROM docker.io/library/ubuntu:24.04
    LABEL by="a test"
    ENV GREETING="good day" OTHER=1
    ENV OLD form with blanks
    WORKDIR /app
    COPY ["one file.txt", "two.txt", \\
          "/app/in/"]
    WORKDIR sub
    COPY folder .
    ADD two.txt three.txt
    CMD ["bash"]
    """
    files = {"one file.txt": "1", "two.txt": "2", "folder/a": "a", "folder/deep/b": "b"}
    test = """#!/bin/bash
    [ "$GREETING/$OTHER/$OLD/$PWD" = "good day/1/form with blanks//app/sub" ] || exit 1
    [ "$(cat "../in/one file.txt" ../in/two.txt a deep/b three.txt)" = 12ab2 ] || exit 1
    [ "$(id -u)" = 0 ] && echo new > a && echo 1 > /logs/verifier/reward.txt
    """
    folder = copy(
        **{"environment/Dockerfile": dockerfile, "tests/test.sh": test},
        **{f"environment/{name}": text for name, text in files.items()},
    )
    assert await scored(folder) == {"reward": 1.0}


# --- environments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hello", "totals", "words"])
@pytest.mark.parametrize("runtime", ["sandbox", pytest.param("docker", marks=needs_docker)])
async def test_solution_gives_1_and_nothing_0(name: str, runtime: str) -> None:
    assert (await scored(TASKS / name, solved=True, runtime=runtime))["reward"] == 1.0
    assert (await scored(TASKS / name, runtime=runtime))["reward"] == 0.0


@pytest.mark.parametrize(
    ("test", "shown"),
    [
        ("echo no reward; exit 1", "no reward"),
        ("echo great > /logs/verifier/reward.txt", "great"),
        ("echo nan > /logs/verifier/reward.txt", "nan"),
        ("echo '{}' > /logs/verifier/reward.json", "{}"),
        ('echo \'{"a": "b"}\' > /logs/verifier/reward.json', "b"),
        ("ln -s /etc/hostname /logs/verifier/reward.txt", "neither"),
        ("sleep 600", "within 1 s"),
    ],
)
@pytest.mark.parametrize("runtime", ["sandbox", pytest.param("docker", marks=needs_docker)])
async def test_failed_tests_are_no_reward(copy: Any, runtime: str, test: str, shown: str) -> None:
    toml = (TASKS / "hello" / "task.toml").read_text().replace("timeout_sec = 60.0", "timeout_sec = 1.0")
    folder = copy(
        **{
            "task.toml": toml if "sleep" in test else toml.replace("= 1.0", "= 60.0"),
            "tests/test.sh": f"#!/bin/sh\n{test}\n",
        }
    )
    with pytest.raises(EnvFailed, match=shown):
        await scored(folder, runtime=runtime)


async def test_limits_are_those_of_the_task(copy: Any) -> None:
    test = """#!/bin/bash
    [ "$(nproc)" = 1 ] && ! python3 -c 'bytes(2 << 30)' && ! head -c 300M /dev/zero > /tmp/large || exit 1
    echo 1 > /logs/verifier/reward.txt
    """
    assert await scored(copy(**{"tests/test.sh": test})) == {"reward": 1.0}


async def test_agent_can_prepare_no_reward(copy: Any) -> None:
    catalog = Catalog("sandbox")
    (task,) = catalog.read(str(copy(**{"tests/test.sh": "#!/bin/sh\nexit 0\n"})))
    async with catalog.place(task) as place:
        write = "mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; ls -d /tests || echo none"
        process = await asyncio.create_subprocess_exec(place.shell, "sh", "-c", write, stdout=asyncio.subprocess.PIPE)
        printed, _ = await process.communicate()
        assert printed.decode().endswith("none\n")
        with pytest.raises(EnvFailed, match="neither"):
            await place.rewards()


def test_folders_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own, killed = (tmp_path / f"slipstream-harbor-{process}-x" for process in (os.getpid(), 2**22 + 1))
    own.mkdir()
    killed.mkdir()
    remove_abandoned()
    assert [*tmp_path.iterdir()] == [own]


def test_reward_is_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "reward.txt").write_text(" 0.25\n")
    assert read_rewards(tmp_path) == {"reward": 0.25}
    (tmp_path / "reward.json").write_text('{"a": 1, "b": true}')
    assert read_rewards(tmp_path) == {"a": 1.0, "b": 1.0}
    (tmp_path / "reward.json").write_text("0.5")
    assert read_rewards(tmp_path) == {"reward": 0.5}


def test_data_set_is_shown(copy: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    copy("good")
    folder = copy("unsolved", **{"solution/solve.sh": "#!/bin/sh\nexit 3\n"}).parent
    monkeypatch.setattr(sys, "argv", ["harbor", str(folder), "--runtime", "sandbox"])
    assert main() == 1
    good, unsolved = capsys.readouterr().out.splitlines()
    assert good.split() == ["examples/hello", "sandbox", "nothing", "0,", "solution", "1"]
    assert "code 3" in unsolved
    monkeypatch.setattr(sys, "argv", ["harbor", str(folder / "good")])
    assert main() == 0


# --- episodes ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_chat_model(tmp_path_factory.mktemp("harbor") / "model", "qwen2_5")


@pytest.fixture
def no_folder_is_left() -> Iterator[None]:
    yield
    assert not [*Path(tempfile.gettempdir()).glob(f"slipstream-harbor-{os.getpid()}-*")]


def calling(command: str) -> str:
    call = json.dumps({"name": "shell", "arguments": {"command": command}})
    return f"<tool_call>\n{call}\n</tool_call><|im_end|>"


@pytest.mark.usefixtures("no_folder_is_left")
@pytest.mark.parametrize(
    ("command", "reward", "lines"),
    [
        ("echo 'north 321' > totals.txt; sleep 600 &", 0.5, 1.0),
        pytest.param("echo -e 'north 321\\nsouth 11' > totals.txt", 1.0, 2.0, marks=needs_docker),
        pytest.param("exit 7", 0.0, 0.0, marks=needs_docker),
    ],
)
@pytest.mark.parametrize("runtime", ["sandbox", pytest.param("docker", marks=needs_docker)])
async def test_agent_is_rewarded_by_the_tests(
    model: Path, runtime: str, command: str, reward: float, lines: float
) -> None:
    env = harbor(TASKS / "totals", eval_path=str(TASKS / "hello"), command=SHELL, runtime=runtime)
    tokenizer = Tokenizer(model)
    recorder = Recorder(None, [chat_answer(tokenizer, calling(command)), chat_answer(tokenizer, "Done.<|im_end|>")])
    async with served(model, recorder, env) as player:
        (trajectory,) = await player.play("train", 0, samples=1)
    assert (trajectory.reward, trajectory.scores["env/lines"], trajectory.scores["env/roots"]) == (reward, lines, 1)


@pytest.mark.usefixtures("no_folder_is_left")
async def test_untrained_model_gets_0(model: Path) -> None:
    env = harbor(TASKS / "hello", eval_path=str(TASKS / "words"), command=SHELL)
    async with AsyncExitStack() as stack:
        engine = await start_engine(run_config(model), model, eos_token_ids=Tokenizer(model).eos_token_ids)
        stack.push_async_callback(engine.close)
        player = await stack.enter_async_context(served(model, engine, env))
        trajectories = await player.play("train", 0, samples=2)
    assert [trajectory.reward for trajectory in trajectories] == [0.0, 0.0]


CALLS_ONCE = """
import json, os, urllib.request
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
body = json.dumps({"model": "", "messages": [{"role": "user", "content": ""}]}).encode()
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers))
"""
WRITES = "import subprocess; subprocess.run([os.environ['SLIPSTREAM_SHELL'], 'sh', '-c', 'echo hello > hello.txt'])"


@pytest.mark.usefixtures("no_folder_is_left")
@pytest.mark.parametrize(
    ("agent", "turns", "outcome"),
    [
        (f"{CALLS_ONCE}{WRITES}; import time; time.sleep(600)", None, 1.0),  # until the task's deadline
        (f"{CALLS_ONCE}{WRITES}{CALLS_ONCE}", 1, 1.0),  # the budget of turns ends it
        (f"{CALLS_ONCE}{WRITES}; raise SystemExit(3)", None, "agent_error"),
    ],
)
async def test_ends_of_agents(model: Path, agent: str, turns: int | None, outcome: float | str) -> None:
    env = harbor(
        TASKS / "hello", eval_path=str(TASKS / "words"), command=[sys.executable, "-c", agent], agent_timeout_s=8
    )
    recorder = Recorder(None, [chat_answer(Tokenizer(model), "Yes.<|im_end|>")])
    async with served(model, recorder, env, episode={"tokens": 1000, "turns": turns}) as player:
        if isinstance(outcome, str):
            with pytest.raises(EpisodeFailed) as failed:
                await player.play("train", 0, samples=1)
            assert failed.value.reason == outcome
        else:
            (trajectory,) = await player.play("train", 0, samples=1)
            assert trajectory.reward == outcome


async def test_failed_tests_cost_the_episode(model: Path, copy: Any) -> None:
    env = harbor(copy(**{"tests/test.sh": "#!/bin/sh\nexit 1\n"}), eval_path=str(TASKS / "words"), command=SHELL)
    recorder = Recorder(None, [chat_answer(Tokenizer(model), "Yes.<|im_end|>")])
    async with served(model, recorder, env) as player:
        with pytest.raises(EpisodeFailed) as failed:
            await player.play("train", 0, samples=1)
    assert failed.value.reason == "env_error"


def test_example_names_its_tasks_and_its_agent() -> None:
    config = load_config(EXAMPLES / "harbor.yaml")
    root = EXAMPLES.parents[1]
    assert root / config.env.options["path"] == TASKS
    assert (root / config.env.options["command"][-1]).is_file()


@pytest.mark.parametrize(
    "options",
    [
        {"runtime": "podman"}, {"concurrency": 0}, {"command": "true"}, {"command": ["no-such-program"]},
        {"path": "/no/such/folder"}, {"command": []}, {"agent_timeout_s": 0},
    ],
)  # fmt: skip
def test_unusable_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        build_env(EnvConfig(name="harbor", options={"path": str(TASKS), "command": ["true"], **options}))
