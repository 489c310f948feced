"""Plays context-editing episodes with scripted replies, and keeps the requests that the engine got."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from slime_plugins.rollout_buffer.engine.base import GenerateRequest
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.generator.context_editing import history as history_module
from slime_plugins.rollout_buffer.generator.context_editing.history import Deletion, History
from slime_plugins.rollout_buffer.generator.context_editing_generator import create_generator
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine, ScriptedReply
from slime_plugins.rollout_buffer.types import EpisodeRequest, Message, Trajectory
from tests import demo_tokens
from tests.episode_requests import episode_of

tokenizer = demo_tokens.tokenizer

DOCUMENT = "\n\n".join(
    f"Day {day}. The tide was high and the gulls were loud. The keeper counted {day * 3} boats." for day in range(120)
)
LINE: dict[str, Any] = {
    "instance_id": "tide",
    "raw_prompt": [{"role": "user", "content": "How many boats were there on day 7?"}],
    "document_content": DOCUMENT,
    "label": 21,
    "extra_info": {"kind": "needle"},
}


def call(tool: str, **arguments: Any) -> str:
    return "<tool_call>\n" + json.dumps({"name": tool, "arguments": arguments}) + "\n</tool_call>"


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenDeletion:
    """What a deletion found: the history and the deleted ids right before it, and how many turns there were."""

    messages: list[Message]
    deleted: set[int]
    turns: int


@dataclass(kw_only=True, slots=True)
class Played:
    """A trajectory, what the engine was asked, and the state that every deletion found."""

    trajectory: Trajectory
    requests: list[GenerateRequest]
    deletions: list[SeenDeletion] = field(default_factory=list)

    @property
    def results(self) -> list[dict[str, Any]]:
        return [json.loads(message["content"]) for message in self.trajectory.messages if message["role"] == "tool"]


def request_for(
    line: Mapping[str, Any], *, uid: str = "u", max_new_tokens: int = 400, **sampling: Any
) -> EpisodeRequest:
    return episode_of(str(line["instance_id"]), line, uid=uid, max_new_tokens=max_new_tokens, **sampling)


async def play(
    script: Sequence[ScriptedReply] | Callable[[GenerateRequest], ScriptedReply],
    *,
    line: Mapping[str, Any] = LINE,
    options: Mapping[str, Any] | None = None,
    max_new_tokens: int = 400,
    with_tokenizer: Any = tokenizer,
    **settings: Any,
) -> Played:
    """Plays one episode; ``settings`` go under ``statelm``, where ``train_before_deletion`` is true by default here."""
    engine = FakeEngine(script, tokenizer=with_tokenizer)
    generator = create_generator()
    payload = {**(options or {}), "statelm": {"max_model_length": 100_000, "train_before_deletion": True, **settings}}
    await generator.start(
        GeneratorContext(job_id="job", engine=engine, tokenizer=with_tokenizer, concurrency=1, options=payload)
    )
    seen: list[SeenDeletion] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history_module.History, "delete", _watched(History.delete, seen, engine))
        trajectory = await generator.play(request_for(line, max_new_tokens=max_new_tokens))
    await generator.close()
    return Played(trajectory=trajectory, requests=engine.requests, deletions=seen)


def _watched(
    delete: Callable[[History, Deletion], None], seen: list[SeenDeletion], engine: FakeEngine
) -> Callable[[History, Deletion], None]:
    def watched(self: History, deletion: Deletion) -> None:
        seen.append(
            SeenDeletion(messages=copy.deepcopy(self.messages), deleted=set(self.deleted), turns=len(engine.requests))
        )
        delete(self, deletion)

    return watched
