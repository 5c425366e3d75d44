"""Programs that are tested in the sandbox, and by a server of Sandbox Fusion's API."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.run import RewardConfig
from slipstream.rewards.base import Failure, RewardUnavailable, Score
from slipstream.rewards.functions.code import Code
from slipstream.rewards.registry import find_reward
from tests.rewards.episodes import episode
from tests.rewards.functions.benchmarks import rows
from tests.rewards.functions.fusion import fusion
from tests.rewards.functions.http_server import serving

pytestmark = pytest.mark.usefixtures("sandbox")
DOUBLE = "def double(x):\n    return 2 * x"
ASSERTS = ["assert double(2) == 4", "assert double(-1) == -2", "assert double('a') == 'aa'", "assert double(1) == 3"]
PAIRS = [{"input": "2\n", "output": "4"}, {"input": "5\n", "output": "10 \n\n"}, {"input": "x", "output": "0"}]
PRINTS = "print(2 * int(input()))"


def fenced(code: str) -> str:
    return f"First a draft:\n```python\nprint(0)\n```\nThen:\n```python\n{code}\n```\nDone."


async def score(answer: str, tests: Any, **options: Any) -> Score:
    limits = {"cpu_s": 5, "wall_s": 60}
    return await Code(**{"limits": limits, **options})(episode(answer, info={"tests": tests}))


def parts(parsed: float, passed: float, timeout: float = 0.0) -> dict[str, float]:
    return {"parsed": parsed, "passed": passed, "timeout": timeout, "refused": 0.0, "forged": 0.0}


@pytest.mark.parametrize("tests", [ASSERTS[:3], "\n".join(ASSERTS[:3]), json.dumps(ASSERTS[:3])])
@pytest.mark.parametrize("answer", [DOUBLE, fenced(DOUBLE), fenced(DOUBLE.replace("\n", "\r\n"))])
async def test_a_program_that_passes_its_tests_scores_1(answer: str, tests: Any) -> None:
    assert await score(answer, tests) == Score(1.0, parts(1, 1))


async def test_passed_tests_count_in_part_if_asked() -> None:
    assert await score(DOUBLE, ASSERTS) == Score(0.0, parts(1, 0.75))
    assert await score(DOUBLE, ASSERTS, partial=True) == Score(0.75, parts(1, 0.75))


@pytest.mark.parametrize("tests", [PAIRS[:2], {"inputs": ["2", "5"], "outputs": ["4", "10"]}])
async def test_outputs_are_compared_line_by_line(tests: Any) -> None:
    assert await score(PRINTS, tests) == Score(1.0, parts(1, 1))
    assert (await score("print(4)", tests, partial=True)).value == 0.5
    assert (await score(f"{PRINTS}\nimport sys; sys.exit(1)", tests)).value == 0.0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("I can't do that.", parts(0, 0)),
        ("", parts(0, 0)),
        ("```python\nprint(\n```", parts(1, 0)),
        ("while True: pass", parts(1, 0, 1)),
        ("import sys; sys.exit(0)", parts(1, 0)),
        ("import os; os._exit(0)", parts(1, 0)),
        ("raise SystemExit", parts(1, 0)),
        ("import sys; print('bwrap: failed', file=sys.stderr); sys.exit(1)", parts(1, 0)),
    ],
)
async def test_no_program_a_late_one_and_a_wrong_one_differ(answer: str, expected: Mapping[str, float]) -> None:
    limits = {"cpu_s": 1, "wall_s": 60}
    assert await score(answer, ASSERTS[0], limits=limits) == Score(0.0, expected)


@pytest.mark.parametrize("tests", [[], "", [1], [{"input": "1"}]])
async def test_a_task_without_tests_is_an_error(tests: Any) -> None:
    with pytest.raises(ValueError, match="test"):
        await score(DOUBLE, tests)


async def test_tests_may_be_the_reference_and_have_a_setup() -> None:
    subject = episode("def root(x): return math.sqrt(x)", reference="assert root(4) == 2")
    assert (await Code(setup="import math")(subject)).value == 1.0


@pytest.mark.parametrize(
    "options", [{"limits": {"cpu": 1}}, {"limits": {"cpu_s": "x"}}, {"python": "/nowhere/python"}, {"urls": "x"}]
)
def test_unusable_options_are_refused(options: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError, match="code"):
        find_reward(RewardConfig(name="code", options=dict(options)))


async def test_failure_of_the_sandbox_is_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = find_reward(RewardConfig(name="code"))
    monkeypatch.setenv("PATH", "/nowhere")
    (failed,) = await reward.run_async([episode(DOUBLE, reference=ASSERTS[0])])
    assert isinstance(failed, Failure)
    assert failed.reason == "reward_unavailable"


async def failures(programs: Sequence[str], tests: Sequence[Any]) -> dict[str, Score]:
    """The scores below 1 by program."""
    reward = Code(limits={"cpu_s": 10, "wall_s": 120})
    subjects = [episode(program, info={"tests": test}) for program, test in zip(programs, tests, strict=True)]
    scores = await asyncio.gather(*map(reward, subjects))
    return {program: score for program, score in zip(programs, scores, strict=True) if score.value < 1}


async def test_human_eval_is_passed_by_its_solutions_only() -> None:
    tasks = rows("codex_humaneval/gold_bpb_0shot")
    tests = [f"{task['test']}\ncheck({task['entry_point']})" for task in tasks]
    assert not await failures([task["prompt"] + task["canonical_solution"] for task in tasks], tests)
    assert len(await failures([task["prompt"] + "    pass\n" for task in tasks], tests)) == 164


async def test_mbpp_is_passed_by_its_solutions() -> None:
    tasks = rows("codex_mbpp/gold_bpb_0shot")
    tests = ["\n".join([task["test_setup_code"], *task["test_list"]]) for task in tasks]
    assert not await failures([task["code"] for task in tasks], tests)


async def test_a_sandbox_fusion_server_runs_the_tests() -> None:
    with serving(fusion) as url:
        reward = Code(url=url, partial=True)
        subjects = [
            episode(answer, info={"tests": tests})
            for answer, tests in [(DOUBLE, ASSERTS), (PRINTS, PAIRS), ("exit(0)", ASSERTS), ("LATE", ASSERTS)]
        ]
        scores = [await reward(subject) for subject in subjects]
        assert [score.value for score in scores] == [0.75, pytest.approx(2 / 3), 0.0, 0.0]
        assert scores[3].parts == parts(1, 0, 1)
        with pytest.raises(RewardUnavailable, match="no container"):
            await reward(episode("FAILS = 1", info={"tests": ASSERTS}))
        await reward._endpoint.close()
