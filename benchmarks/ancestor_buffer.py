"""The baseline of the buffer benchmark: slime's rollout buffer, reimplemented as a FastAPI application.

Items are stored in dictionaries of the process, grouped by instance; a write parses the item, stores it and a deep copy
for the statistics, and returns it; a read removes every complete group and serialises it. Nothing is on disk, nothing
is acknowledged. Everything that costs time is as in slime: the HTTP middleware around every request, the validated
reply model, the echo, the deep copy, the lock, handlers on the event loop, the two scans of a read.

    python benchmarks/ancestor_buffer.py --port 8900
"""

from __future__ import annotations

import argparse
import copy
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

Item = dict[str, Any]
BODY_LIMIT_BYTES = 1 << 30


class Reply(BaseModel):
    """The reply of both data routes."""

    success: bool
    message: str = ""
    data: dict[str, Any] | None = None


class AncestorBuffer:
    """Groups of items in memory. A read returns a group when it has all its members."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._groups: dict[str, list[Item]] = {}
        self._since_last_read: dict[str, list[Item]] = {}
        self._lock = threading.RLock()

    def write(self, item: Item) -> Item:
        """Stores an item, and a copy for the statistics of the next read."""
        with self._lock:
            instance_id = item["instance_id"]
            self._since_last_read.setdefault(instance_id, []).append(copy.deepcopy(item))
            self._groups.setdefault(instance_id, []).append(item)
        return item

    def read(self) -> dict[str, Any]:
        """Removes and returns every complete group, with statistics of all writes since the last read."""
        with self._lock:
            if not self._complete():
                return {"data": [], "meta_info": {}}
            meta_info = self._statistics()
            complete = self._complete()
            data = [item for items in complete.values() for item in items]
            for instance_id in complete:
                del self._groups[instance_id]
            self._since_last_read = {}
        return {"data": data, "meta_info": meta_info}

    def _complete(self) -> dict[str, list[Item]]:
        return {key: items for key, items in self._groups.items() if len(items) >= self._group_size}

    def _statistics(self) -> dict[str, Any]:
        rewards = [item["reward"] for items in self._since_last_read.values() for item in items]
        groups = len(self._since_last_read)
        return {
            "total_samples": len(rewards),
            "num_groups": groups,
            "avg_group_size": len(rewards) / groups,
            "avg_reward": sum(rewards) / len(rewards),
            "finished_groups": [],
        }


def create_app() -> FastAPI:
    app = FastAPI()
    state = {"buffer": AncestorBuffer(1)}

    @app.middleware("http")
    async def set_body_size(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        request.state.body_limit = BODY_LIMIT_BYTES  # as in slime, where nothing reads it either
        return await call_next(request)

    @app.post("/start_rollout")
    async def start_rollout(request: Request) -> dict[str, Any]:
        payload = await request.json()
        state["buffer"] = AncestorBuffer(int(payload["num_repeat_per_sample"]))
        return {"message": "Rollout started"}

    @app.post("/buffer/write", response_model=Reply)
    async def write(request: Request) -> Reply:
        item = state["buffer"].write(await request.json())
        return Reply(success=True, message="written", data={"data": [item], "meta_info": "write"})

    @app.post("/get_rollout_data", response_model=Reply)
    async def get_rollout_data(request: Request) -> Reply:
        result = state["buffer"].read()
        if not result["data"]:
            return Reply(success=False, message="nothing to read", data=result)
        return Reply(success=True, message=f"{len(result['data'])} items", data=result)

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8900)
    parser.add_argument("--http", choices=("h11", "httptools"), default="h11", help="slime's environment has h11")
    given = parser.parse_args()
    uvicorn.run(create_app(), host="127.0.0.1", port=given.port, http=given.http, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
