"""OpenAI's client for JavaScript against the gateway: the example in ``examples/proxy``, run as its users run it.

``ROLLOUT_BUFFER_TEST_NPM`` names a folder in which ``npm install openai`` was run.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from tests.gateway_support import gateway_on, start_session_job, tokenizer

pytestmark = pytest.mark.timeout(120)

NPM = os.environ.get("ROLLOUT_BUFFER_TEST_NPM", "")
NODE = shutil.which("node")
if not NPM or NODE is None:
    pytest.skip("ROLLOUT_BUFFER_TEST_NPM is not set, or there is no node", allow_module_level=True)

MODULES = Path(NPM).resolve() / "node_modules"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "proxy" / "openai_client.mjs"


async def test_two_turns_of_npms_client_are_one_row_with_what_was_sampled(tmp_path: Path) -> None:
    program = tmp_path / EXAMPLE.name  # modules are looked for beside the program
    shutil.copy(EXAMPLE, program)
    (tmp_path / "node_modules").symlink_to(MODULES)
    async with gateway_on(tmp_path, FakeEngine(["Four.", "Yes, four."], tokenizer=tokenizer)) as gateway:
        job = start_session_job(gateway.buffer, n=1)
        assert NODE is not None
        process = await asyncio.create_subprocess_exec(
            NODE, str(program), job.job_id, gateway.url, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        said, complaints = await process.communicate()
        assert process.returncode == 0, complaints.decode()[-2000:]
        closed = json.loads(said)
        assert (closed["first"], closed["second"]) == ("Four.", "Yes, four.")
        assert (closed["turns"], closed["branches"]) == (2, 1)
        assert gateway.trained_text(job, closed["session_id"]) == "Four.<|im_end|>Yes, four.<|im_end|>"
