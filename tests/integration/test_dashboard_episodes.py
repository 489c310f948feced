"""Episodes with edited contexts and sessions of the gateway, really played, on the dashboard in a real browser.

Needs what ``test_dashboard_browser`` needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests

from rollout_buffer_lab.documents import generate
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from tests.integration.conftest import BufferProcess
from tests.integration.test_dashboard_browser import Visit, browser, current
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

__all__ = ["browser"]  # a fixture


@pytest.fixture(scope="module")
def buffer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BufferProcess]:
    """A buffer with a gateway."""
    found = BufferProcess(tmp_path_factory.mktemp("episodes"), gateway=True)
    yield found
    found.stop()


@pytest.fixture
def show(browser: Any) -> Iterator[Callable[[BufferProcess, str], Visit]]:
    """Opens the page of a job's longest episode."""
    contexts = []

    def opened(buffer: BufferProcess, job_id: str) -> Visit:
        context = browser.new_context(viewport={"width": 390, "height": 844}, reduced_motion="reduce")
        contexts.append(context)
        here = Visit(context.new_page(), buffer.url)
        found = buffer.client.trajectories(job_id=job_id)["trajectories"]
        here.open("jobs", job_id, "trajectories", max(found, key=lambda one: one["turns"])["uid"])
        current(here.page, 1).wait_for()
        return here

    yield opened
    for context in contexts:
        context.close()


def played(buffer: BufferProcess, engine_port: int, **payload: Any) -> str:
    """Starts a job and returns its id when all of it is played."""
    start = {
        "remote_engine_url": f"http://127.0.0.1:{engine_port}",
        "tokenizer_path": str(DEMO_TOKENIZER_PATH),
        "num_repeat_per_sample": 1,
        "max_tokens": 512,
        "evaluation": True,
        **payload,
    }
    job_id: str = buffer.client.start_rollout(start).job_id
    wait_until(lambda: buffer.client.job(job_id)["state"] == "finished", 120, f"the end of {job_id}")
    return job_id


def test_an_edited_context_says_what_was_deleted_and_when(
    buffer: BufferProcess, stand_in_engine: int, show: Callable[[BufferProcess, str], Visit]
) -> None:
    lines = [json.dumps(line) for line in generate(2, (6000, 9000))]
    (buffer.folder / "documents.jsonl").write_text("\n".join(lines))
    statelm = {"task_type": "statelm", "statelm": {"train_before_deletion": True}, "num_repeat_per_sample": 4}
    job_id = played(buffer, stand_in_engine, input_file="documents.jsonl", **statelm)
    here = show(buffer, job_id)
    page, uid = here.page, here.page.url.rpartition("/")[2].partition("?")[0]
    first = buffer.client.trajectory(uid, job_id=job_id)["extra_info"]["deletions"][0]
    page.get_by_text("Edited context").wait_for()
    for _ in range(first["turn"]):
        page.keyboard.press("ArrowRight")
    current(page, first["turn"] + 1).wait_for()
    ids = ", ".join(f"#{one}" for one in first["deleted_msg_ids"])
    page.get_by_text(f"{len(first['deleted_msg_ids'])} messages from its context: {ids}.").wait_for()
    page.get_by_text(f"deleted in turn {first['turn'] + 1}").first.wait_for()
    page.get_by_text("Tokens, mask and log-probs").click()
    page.get_by_role("cell", name="edited").first.wait_for()
    assert page.get_by_label("Row").locator("option").count() > 1
    here.check()


def test_a_session_of_the_gateway_says_so_and_how_many_branches_it_had(
    buffer: BufferProcess, stand_in_engine: int, show: Callable[[BufferProcess, str], Visit]
) -> None:
    start = {"task_type": "external", "job_id": "agents", "num_repeat_per_sample": 1, "max_tokens": 100}
    engine = {"remote_engine_url": f"http://127.0.0.1:{stand_in_engine}", "tokenizer_path": str(DEMO_TOKENIZER_PATH)}
    buffer.client.start_rollout({**start, **engine, "instances": [{"instance_id": "sum"}]})
    session = requests.post(f"{buffer.gateway_url}/sessions", json={"job_id": "agents"}, timeout=30).json()
    for question in ("What is 1 + 1?", "What is 2 + 2?"):
        messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": question}]
        turn = {"model": "policy", "messages": messages}
        assert requests.post(f"{session['base_url']}/chat/completions", json=turn, timeout=30).ok
    closed = requests.post(
        f"{buffer.gateway_url}/sessions/{session['session_id']}/close", json={"reward": 1}, timeout=30
    )
    assert closed.ok
    here = show(buffer, "agents")
    here.page.get_by_text("in 2 turns and 2 branches, each a training row").wait_for()
    tree = here.page.get_by_role("region", name="Branches")
    tree.get_by_text("What is 1 + 1?").wait_for()
    assert tree.locator(".branch-turn").count() == 2
    tree.get_by_text("A branch of its own: message 1 (user) differs in text; repeats").wait_for()
    here.check()
