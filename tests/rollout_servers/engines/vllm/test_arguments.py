"""What vLLM finds in its environment."""

import pytest

from slipstream.rollout_servers.engines.vllm.arguments import prepare_environment


@pytest.mark.parametrize(("gpu", "method"), [(True, "spawn"), (False, None)])
def test_on_a_gpu_vllms_processes_are_not_forked_off_one_that_has_called_cuda(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, method: str | None
) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr("os.environ", environment)
    prepare_environment(gpu=gpu)
    assert environment.get("VLLM_WORKER_MULTIPROC_METHOD") == method


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    monkeypatch.setattr("os.environ", environment)
    prepare_environment(gpu=True)
    assert environment["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"
