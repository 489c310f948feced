"""Token records are bytes under their hash, beside the payload that names them."""

from __future__ import annotations

from array import array

import orjson
import pytest
from flask.testing import FlaskClient

from slime.utils.mask_rows import TOP_P_TOKENS, RecordBytes, TokenRecords
from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import InvalidPayloadError
from slime_plugins.rollout_buffer.state.job_lookup import group_policy
from slime_plugins.rollout_buffer.storage.payload_store import INLINE_BODY_BYTES
from slime_plugins.rollout_buffer.types import Generation
from tests.stored_bytes import find_damage
from tests.support import (
    begun_attempt,
    delivered_items,
    polled_delivery,
    start_external,
    start_played,
    trajectory,
    write,
    written,
)

RECORDS = RecordBytes.of(TokenRecords.of_int32(2, array("i", [3, 4]).tobytes(), ends=(2,)))
TURN = {"prompt_ids": [1, 2], "output_ids": [3], "output_log_probs": [-0.5]}


def test_a_played_trajectory_keeps_its_records_and_a_delivery_names_them(buffer: Buffer) -> None:
    job = start_played(buffer)
    played = Generation([1, 2], [3], [-0.5], records={TOP_P_TOKENS: RECORDS})
    fence = buffer.begin_running(job.key)
    (group,) = buffer.open_groups(job.key, after=(-1, -1), limit=10)
    for slot in range(2):
        attempt = begun_attempt(buffer, fence, group, slot)
        note = {"note": "x" * INLINE_BODY_BYTES}
        brought = trajectory(f"{slot}", reward=slot, generations=[played], extra_info=note)
        buffer.add_trajectory(fence, group, slot, attempt, brought)
    buffer.judge_and_close(group, group_policy(job), fence=fence)
    delivery = polled_delivery(buffer, job)
    (_, body), *_ = delivered_items(buffer, delivery)
    (found,) = wire.decode_generations(orjson.loads(body)["generations"])
    assert found.records == {TOP_P_TOKENS: RECORDS}
    assert found.records[TOP_P_TOKENS].data is None
    assert buffer.payloads.image(RECORDS.sha256) == RECORDS.data
    assert list(find_damage(buffer.store)) == []
    with buffer.store.write() as connection:
        connection.execute("DELETE FROM images")
    assert {sentence.split(" names ")[1] for sentence in find_damage(buffer.store)} == {
        f"token records {RECORDS.sha256}, which are not stored"
    }


def test_a_writer_puts_the_bytes_first_and_then_names_them(client: FlaskClient) -> None:
    item = written("a/0", generations=[{**TURN, "records": {TOP_P_TOKENS: RECORDS.sha256}}])
    client.post("/start_rollout", json={"task_type": "external", "num_repeat_per_sample": 1})
    refused = client.post("/buffer/write", json=item)
    assert refused.status_code == 400
    assert "PUT them to /images first" in refused.get_json()["error"]["message"]
    assert client.put(f"/images/{RECORDS.sha256}", data=RECORDS.data).status_code == 201
    assert client.post("/buffer/write", json=item).status_code == 200
    found = client.get(f"/images/{RECORDS.sha256}")
    assert (found.data, found.mimetype) == (RECORDS.data, wire.RECORDS_TYPE)


@pytest.mark.parametrize("records", [{"other": RECORDS.sha256}, {TOP_P_TOKENS: "x"}, {TOP_P_TOKENS: [1, 2]}, []])
def test_records_that_are_no_names_are_refused(buffer: Buffer, records: object) -> None:
    job = start_external(buffer)
    with pytest.raises(InvalidPayloadError, match="records"):
        write(buffer, job, written("a/0", generations=[{**TURN, "records": records}]))


def test_records_that_a_message_names_as_an_image_are_delivered_with_their_media_type(client: FlaskClient) -> None:
    assert client.put(f"/images/{RECORDS.sha256}", data=RECORDS.data).status_code == 201
    image = {"type": "image_url", "image_url": {"url": f"sha256:{RECORDS.sha256}"}}
    item = written("a/0", messages=[{"role": "user", "content": [image]}, {"role": "assistant", "content": "done"}])
    assert client.post("/start_rollout", json={"task_type": "external", "job_id": "j"}).status_code == 200
    assert client.post("/buffer/write", json=item).status_code == 200
    reply = client.post("/get_rollout_data", json={}).get_json()
    (sent,) = reply["data"]["data"][0]["messages"][0]["content"]
    assert sent["image_url"]["url"].startswith("data:application/x-token-records;base64,")
