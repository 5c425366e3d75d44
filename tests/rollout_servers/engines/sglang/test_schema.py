"""What is asked, and what was recorded, by SGLang's own schema: where an environment with SGLang is named."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.rollout_servers.engines.base import Generation, Request
from slipstream.rollout_servers.engines.sglang.protocol import generate_request, score_request
from tests.contract.engines import SGLANG_PYTHON
from tests.rollout_servers.engines.sglang.recorded import ENDED_STREAMS, recorded

PYTHON = os.environ.get(SGLANG_PYTHON)
FIND = "import importlib.util; print(*importlib.util.find_spec('sglang').submodule_search_locations)"

pytestmark = pytest.mark.skipif(PYTHON is None, reason=f"{SGLANG_PYTHON} names no environment with SGLang")


@pytest.fixture(scope="module")
def schema() -> Any:
    """SGLang's own file, loaded by its path: importing the package would need all that it needs."""
    assert PYTHON is not None, "see above"
    package = subprocess.run([PYTHON, "-c", FIND], check=True, capture_output=True, text=True).stdout.strip()
    spec = importlib.util.spec_from_file_location("sglang_api_types", Path(package) / "api/v1/api_types.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # msgspec looks its types up there
    spec.loader.exec_module(module)
    return module


def test_requests_match_the_schema(schema: Any) -> None:
    generation = Generation(max_tokens=40, temperature=0.7, ignore_eos=False, stop_token_ids=(1,))
    body = generate_request("a", Request([3, 5], 1.0), generation, context=100)
    for asked in (body, score_request([3, 5])):
        schema.GenerateRequest.from_json_value(asked)
        # Of the outermost keys it passes those that it does not know.
        assert asked.keys() <= set(schema.GenerateRequest.__struct_fields__)


def test_schema_refuses_unknown_keys(schema: Any) -> None:
    body = score_request([3, 5])
    body["sampling_params"]["temprature"] = 1.0
    with pytest.raises(schema.JsonContractError):
        schema.GenerateRequest.from_json_value(body)


@pytest.mark.parametrize("name", [*ENDED_STREAMS, "score", "score_one"])
def test_recorded_answers_match_the_schema(schema: Any, name: str) -> None:
    events = recorded(name).get("events") or [recorded(name)["answer"]]
    for event in events:
        meta = schema.GenerateResponse.from_json_value(event).meta_info
        assert len(meta.output_token_logprobs) == len(event["meta_info"]["output_token_logprobs"])
    # It reads a reason that it does not know as a plain dictionary.
    assert isinstance(meta.finish_reason, schema.FinishStop | schema.FinishLength | schema.FinishAbort)
    assert meta.weight_versions
