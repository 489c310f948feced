"""``LoopbackBuffer``: the buffer's protocol in memory, on a loopback port, with scripted faults.

``generate_rollout`` is the real rollout function against it, for slime's contract test, which calls rollout functions
with ``args=None`` and a data source that only has ``get_samples``. Imports nothing of ``tests``: it also runs inside of
a slime checkout.
"""

from __future__ import annotations

import json
import threading
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from slime.rollout import agent_rollout

PROBE_GROUPS = 2
PROBE_SAMPLES_PER_GROUP = 2
MAX_WAIT_S = 0.05


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Plays one rollout against a new ``LoopbackBuffer``; ``args`` may be None."""
    with LoopbackBuffer([f"probe-{number}" for number in range(PROBE_GROUPS)]) as buffer:
        own_args = _probe_args(buffer.url)
        return agent_rollout.generate_rollout(own_args, rollout_id, data_source, evaluation=evaluation)


def _probe_args(buffer_url: str) -> Namespace:
    return Namespace(
        rollout_buffer_url=buffer_url,
        rollout_task_type="probe",
        prompt_data="probe.jsonl",
        eval_prompt_data=["probe", "probe.jsonl"],
        n_samples_per_eval_prompt=PROBE_SAMPLES_PER_GROUP,
        num_epoch=1,
        rollout_batch_size=PROBE_GROUPS,
        n_samples_per_prompt=PROBE_SAMPLES_PER_GROUP,
        rollout_max_response_len=16,
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        sglang_router_ip="127.0.0.1",
        sglang_router_port=1,
        hf_checkpoint="none",
        fetch_trajectory_retry_times=3,
    )


def probe_item(instance_id: str, *, epoch: int, slot: int, group_index: int) -> dict[str, Any]:
    """Returns a delivered item with two generations; rewards differ within a group."""
    first = {"keep": 0, "prompt_ids": [1, 2, 3], "output_ids": [10 + slot, 4], "output_log_probs": [-0.5, -0.25]}
    second = {
        "keep": 5,
        "prompt_ids": [5, 6],
        "output_ids": [20 + slot, 21, 4],
        "output_log_probs": [-1.0, -2.0, -0.125],
    }
    return {
        "uid": f"{instance_id}.{epoch}.{slot}",
        "instance_id": instance_id,
        "messages": [{"role": "user", "content": "probe"}, {"role": "assistant", "content": f"answer {slot}"}],
        "reward": float(slot % 2),
        "raw_reward": float(slot % 2),
        "extra_info": {"finish_reason": "stop"},
        "generations": [{**turn, "finish_reason": "stop", "weight_version": "1"} for turn in (first, second)],
        "group_index": group_index,
        "epoch": epoch,
        "slot": slot,
        "outcome": "completed",
        "stop_reason": "answered",
        "remove_sample": False,
    }


ENDED = frozenset({"delivered", "failed", "skipped"})


@dataclass(kw_only=True, slots=True)
class LoopbackGroup:
    """One group of a loopback job: ``ready``, ``leased`` or one of ``ENDED``."""

    group_index: int
    instance_id: str
    epoch: int
    items: list[Any]
    state: str = "ready"
    delivery_id: str = ""


@dataclass(kw_only=True, slots=True)
class _Job:
    job_id: str
    payload: dict[str, Any]
    groups: list[LoopbackGroup]
    state: str = "running"
    cause: str = ""
    deliveries: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptedReply:
    """With ``lost``, the request is processed and its connection closed without a reply."""

    status: int = 200
    body: bytes = b""
    lost: bool = False


ItemMaker = Callable[..., dict[str, Any]]


class LoopbackBuffer:
    """A scripted buffer over HTTP on 127.0.0.1. A context manager; ``requests`` lists received requests in order."""

    def __init__(self, instance_ids: Sequence[str], *, make_item: ItemMaker = probe_item) -> None:
        """Makes one group of each instance id and epoch, ready at once; ``make_item`` makes the item of each slot."""
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.jobs: dict[str, _Job] = {}
        self.images: dict[str, bytes] = {}
        """Images for ``GET /images/<sha256>``; hashes are not verified."""
        self.on_request: Callable[[str, dict[str, Any]], Any] | None = None
        self.has_input = True
        """False: the job's writers bring its groups, and it is never exhausted."""
        self.empty_polls = 0
        """Number of next polls that return nothing."""
        self.looks_before_end = 0
        """Number of replies that report a finished job as running."""
        self.most_groups_of_a_poll: int | None = None
        """Maximum number of groups of a delivery, in addition to the requested one."""
        self.least_groups_of_a_poll = 0
        """Minimum number of groups of a delivery. Above the requested number, it violates the protocol."""
        self.also_finished: dict[int, str] = {}
        """Instance ids of the groups that the next delivery reports as filtered or failed."""
        self._instance_ids = list(instance_ids)
        self._make_item = make_item
        self._scripted: dict[str, list[ScriptedReply]] = {}
        self._next_group = 0
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def trainer_args(self, **changes: Any) -> Any:
        """The arguments of a slime that trains two groups of two from here."""
        # Imported here: programs that run in slime's Python, without the lab, import this file.
        from rollout_buffer_lab.mock_trainer import trainer_args

        values: dict[str, Any] = {
            "rollout_buffer_url": self.url,
            "prompt_data": "tasks.jsonl",
            "hf_checkpoint": "none",
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
            "rollout_buffer_wait_s": 0.05,
            "fetch_trajectory_retry_times": 5,
        }
        return trainer_args(**{**values, **changes})

    def __enter__(self) -> LoopbackBuffer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def script(self, path: str, *replies: ScriptedReply) -> None:
        """Queues replies for the next requests of a path."""
        self._scripted.setdefault(path, []).extend(replies)

    def only_job(self) -> _Job:
        (job,) = self.jobs.values()
        return job

    def lose_everything(self) -> None:
        """Begins with an empty database, whose group numbers start again."""
        self.jobs.clear()
        self._next_group = 0

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for seen, body in self.requests if seen == path]

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, bytes, bool]:
        """Returns the status and the body of the reply, and whether the connection is closed without sending it."""
        with self._lock:
            self.requests.append((path, body))
            if self.on_request is not None:
                self.on_request(path, body)
            queue = self._scripted.get(path) or []
            scripted = queue.pop(0) if queue else None
            if scripted is not None and not scripted.lost:
                return scripted.status, scripted.body, False
            if path.startswith("/images/"):
                return self._image(path.removeprefix("/images/"))
            status, reply = self._route(path, body)
        if path == "/get_rollout_data" and not reply.get("success"):
            time.sleep(min(float(body.get("wait_s") or 0.0), MAX_WAIT_S))
        return status, json.dumps(reply).encode(), scripted is not None

    def _image(self, sha256: str) -> tuple[int, bytes, bool]:
        image = self.images.get(sha256)
        missing = {"error": {"code": "not_found", "message": f"there is no image {sha256}", "detail": {}}}
        return (404, json.dumps(missing).encode(), False) if image is None else (200, image, False)

    def _route(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/start_rollout":
            return 200, self._start(body)
        if path == "/get_rollout_data":
            acknowledged = self._acknowledge(body.get("ack") or [])
            job = self._job(body.get("job_id"))
            if job is None:
                return _not_found(body.get("job_id"))
            reply = self._deliver(job, body)
            reply["data"]["meta_info"]["acknowledged"] = acknowledged
            return 200, reply
        if path == "/ack":
            return 200, self._acknowledge(body.get("delivery_ids") or [body.get("delivery_id")])
        _, _, job_id, *verb = path.split("/")
        job = self.jobs.get(job_id)
        if job is None:
            return _not_found(job_id)
        if verb and job.state in ("running", "paused"):
            job.state = {"pause": "paused", "drain": "paused", "resume": "running", "cancel": "cancelled"}[verb[0]]
        return 200, self._describe(job)

    def _job(self, job_id: str | None) -> _Job | None:
        return self.jobs.get(job_id) if job_id else next(iter(self.jobs.values()), None)

    def _start(self, payload: dict[str, Any]) -> dict[str, Any]:
        job_id = str(payload["job_id"])
        job = self.jobs.get(job_id)
        is_repeated = job is not None and job.payload["start_id"] == payload["start_id"]
        if job is None or (payload.get("fresh") and not is_repeated):
            self.jobs[job_id] = _Job(job_id=job_id, payload=payload, groups=self._plan(payload))
            return {"message": "rollout started", "job_id": job_id, "state": "running", "attached": False}
        job.payload = payload
        skips_left = Counter(payload["skip_instance_ids"])
        for group in job.groups:
            if group.state in ("leased", "delivered", "skipped") and skips_left[group.instance_id] > 0:
                skips_left[group.instance_id] -= 1
            elif group.state in ("leased", "delivered"):
                group.state = "ready"
        return {"message": "attached", "job_id": job_id, "state": job.state, "attached": True}

    def _plan(self, payload: dict[str, Any]) -> list[LoopbackGroup]:
        skips_left = Counter(payload["skip_instance_ids"])
        groups = []
        for epoch in range(int(payload["num_epoch"])):
            for instance_id in self._instance_ids:
                skipped = skips_left[instance_id] > 0
                skips_left[instance_id] -= skipped
                groups.append(self._group(payload, instance_id, epoch, "skipped" if skipped else "ready"))
        return groups

    def _group(self, payload: Mapping[str, Any], instance_id: str, epoch: int, state: str) -> LoopbackGroup:
        self._next_group += 1
        slots = range(int(payload.get("num_repeat_per_sample") or payload["samples"]))
        number = self._next_group
        items = [self._make_item(instance_id, epoch=epoch, slot=slot, group_index=number) for slot in slots]
        return LoopbackGroup(group_index=number, instance_id=instance_id, epoch=epoch, items=items, state=state)

    def _deliver(self, job: _Job, body: dict[str, Any]) -> dict[str, Any]:
        key = f"{body.get('consumer_id')}/{body.get('poll_id')}"
        if body.get("poll_id") and key in job.deliveries:
            return dict(job.deliveries[key]["reply"])
        ready = [group for group in job.groups if group.state == "ready"] if job.state == "running" else []
        most = max(int(body.get("max_groups") or len(ready)), self.least_groups_of_a_poll)
        taken = ready[: min(most, self.most_groups_of_a_poll or most)]
        if self.empty_polls > 0:
            self.empty_polls -= 1
            taken = []
        if not taken:
            exhausted = self.has_input and all(group.state in ENDED for group in job.groups)
            return {"success": False, "message": "nothing is ready", "data": _data([], {"exhausted": exhausted})}
        leased = bool(body.get("lease_s"))
        delivery_id = f"{job.job_id}/delivery-{len(job.deliveries)}"
        for group in taken:
            group.state, group.delivery_id = "leased" if leased else "delivered", delivery_id
        reply = {"success": True, "message": "", "data": _data(_items(taken), self._meta(delivery_id, taken))}
        job.deliveries[key] = {"id": delivery_id, "groups": taken, "reply": reply}
        return reply

    def _meta(self, delivery_id: str, groups: Sequence[LoopbackGroup]) -> dict[str, Any]:
        items = [item for item in _items(groups) if isinstance(item, dict)]
        rewards = [item["reward"] for item in items if _is_number(item.get("reward"))]
        not_delivered, self.also_finished = self.also_finished, {}
        return {
            "delivery_id": delivery_id,
            "ended_groups": [*not_delivered],
            "finished_groups": [*not_delivered.values(), *(group.instance_id for group in groups)],
            "num_groups": len(groups),
            "total_samples": len(rewards),
            "avg_reward": sum(rewards) / len(rewards) if rewards else None,
            "exhausted": False,
        }

    def _acknowledge(self, delivery_ids: Sequence[Any]) -> dict[str, list[str]]:
        """Acknowledges deliveries; one whose groups were delivered again is ``expired``."""
        reply: dict[str, list[str]] = {"acked": [], "expired": []}
        for delivery in (one for job in self.jobs.values() for one in job.deliveries.values()):
            if delivery["id"] not in delivery_ids:
                continue
            is_current = all(group.delivery_id == delivery["id"] for group in delivery["groups"])
            reply["acked" if is_current else "expired"].append(delivery["id"])
            for group in delivery["groups"] if is_current else ():
                group.state = "delivered"
        return reply

    def _describe(self, job: _Job) -> dict[str, Any]:
        states = Counter(group.state for group in job.groups)
        state = job.state
        if self.has_input and state == "running" and set(states) <= ENDED:
            self.looks_before_end -= 1
            state = "running" if self.looks_before_end >= 0 else "finished"
        description = {"state": state, "cause": job.cause, "has_input": self.has_input, "groups": dict(states)}
        return {"job_id": job.job_id, **description}


def _items(groups: Sequence[LoopbackGroup]) -> list[Any]:
    return [item for group in groups for item in group.items]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _data(items: list[Any], meta_info: dict[str, Any]) -> dict[str, Any]:
    return {"data": items, "meta_info": meta_info}


def _not_found(job_id: Any) -> tuple[int, dict[str, Any]]:
    return 404, {"error": {"code": "not_found", "message": f"there is no job {job_id}", "detail": {}}}


def _handler_of(buffer: LoopbackBuffer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._reply(json.loads(content or b"{}"))

        def do_GET(self) -> None:
            self._reply({})

        def _reply(self, body: dict[str, Any]) -> None:
            status, content, lost = buffer.answer(self.path, body)
            if lost:
                self.close_connection = True
                return
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Logs nothing."""

    return Handler
