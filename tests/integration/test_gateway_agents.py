"""A well-known agent framework against the gateway: the example in ``examples/proxy``, run as its users run it.

``ROLLOUT_BUFFER_TEST_AGENTS_PYTHON`` names a Python with ``openai-agents`` 0.24.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from slime.utils.mask_utils import pack_training_rows
from slime_plugins.rollout_buffer.engine.base import GenerateRequest
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from tests.gateway_support import gateway_on, start_session_job, tokenizer

pytestmark = pytest.mark.timeout(180)

PYTHON = os.environ.get("ROLLOUT_BUFFER_TEST_AGENTS_PYTHON", "")
if not PYTHON:
    pytest.skip("ROLLOUT_BUFFER_TEST_AGENTS_PYTHON is not set", allow_module_level=True)

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "proxy" / "openai_agents.py"
CALL = 'I use the tool.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_frameworks_tool_loop_is_one_row(tmp_path: Path, streamed: bool) -> None:
    replies = [CALL, "The answer is 5."]

    def reply(request: GenerateRequest) -> str:
        return replies.pop(0)

    engine = FakeEngine(reply, tokenizer=tokenizer)
    async with gateway_on(tmp_path, engine) as gateway:
        job = start_session_job(gateway.buffer, n=1)
        arguments = [str(EXAMPLE), "--gateway", gateway.url, "--job", job.job_id, *(["--stream"] if streamed else [])]
        process = await asyncio.create_subprocess_exec(
            PYTHON, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        said, complaints = await process.communicate()
        assert process.returncode == 0, complaints.decode()[-2000:]
        closed = json.loads(said.decode().splitlines()[-1])
        assert "The answer is 5." in said.decode()
        assert (closed["turns"], closed["branches"]) == (2, 1)
        sent = [str(tokenizer.decode(request.input_ids)) for request in engine.requests]
        assert '"name": "add"' in sent[0]
        assert f"{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n5\n</tool_response>" in sent[1]
        (row,) = pack_training_rows(gateway.generations(job, closed["session_id"]))
        trained = [token for token, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask]
        assert tokenizer.decode(trained) == f"{CALL}<|im_end|>The answer is 5.<|im_end|>"
