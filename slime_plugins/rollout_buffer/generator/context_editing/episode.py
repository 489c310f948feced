"""One episode: generate, execute the turn's tool calls, append the results, until an end condition.

    prompt (view of the history) ─▶ fits? ─▶ generate ─▶ read calls ─▶ execute, one after the other ─┐
              ▲                                                                                      │
              └──────────── results are added; deleteContext marks messages as deleted ◀─────────────┘

End conditions:

=========================================  ===============  ===========  =================================
what happened                              stop reason      outcome      reward
=========================================  ===============  ===========  =================================
``finish`` was called                      answered         completed    of the answer (``rewards.py``)
a turn without a tool call                 stop             completed    of the turn's text
the next turn would not fit the context    max_context      truncated    ``context_length_penalty``
the limit of turns is reached              max_turns        completed    0
a turn reached its token limit             max_tokens       truncated    0
the agent sampled an image token           forbidden_token  truncated    0
the engine aborted the request             aborted          aborted      0
the engine failed, or the line is invalid  an ``EpisodeError`` is raised: no trajectory, no reward
=========================================  ===============  ===========  =================================
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.engine.base import Engine, GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.engine.tool_call_parser import ToolCall
from slime_plugins.rollout_buffer.generator.context_editing.calls import CallReader, text_outside_calls
from slime_plugins.rollout_buffer.generator.context_editing.document import Document
from slime_plugins.rollout_buffer.generator.context_editing.document_tools import Budget, CheckedCall, DocumentTools
from slime_plugins.rollout_buffer.generator.context_editing.history import History, MarkerBreaker, ToolResult
from slime_plugins.rollout_buffer.generator.context_editing.prompt_view import PromptView
from slime_plugins.rollout_buffer.generator.context_editing.rewards import Score, score_answer
from slime_plugins.rollout_buffer.generator.context_editing.settings import ContextEditingSettings
from slime_plugins.rollout_buffer.generator.context_editing.snapshots import MARKS_KEY, DeletionMark
from slime_plugins.rollout_buffer.generator.context_editing.task import DocumentTask
from slime_plugins.rollout_buffer.generator.context_editing.tool_specs import ToolName
from slime_plugins.rollout_buffer.generator.outcomes import outcome_of
from slime_plugins.rollout_buffer.generator.phase_timer import PhaseTimer
from slime_plugins.rollout_buffer.types import EpisodeRequest, Generation, Message, StopReason, Trajectory

logger = logging.getLogger(__name__)

NO_TOOL = "none"
"""The name under which calls of unknown tools are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeSetup:
    """Shared by all episodes of a job."""

    engine: Engine
    chat: ChatTokens
    settings: ContextEditingSettings
    tools: Sequence[Mapping[str, Any]]
    tools_in_template: bool
    break_markers: MarkerBreaker
    read_calls: CallReader


@dataclass(frozen=True, slots=True)
class _Ending:
    """The reason why the loop ended, and the answer if there is one."""

    stop_reason: StopReason
    answer: str | None = None


class ContextEditingEpisode:
    """One episode over one document, for a single ``play``."""

    def __init__(
        self,
        *,
        request: EpisodeRequest,
        task: DocumentTask,
        prompt: Sequence[Message],
        document: Document,
        setup: EpisodeSetup,
    ) -> None:
        settings = setup.settings
        self._request = request
        self._task = task
        self._document = document
        self._setup = setup
        self._settings = settings
        self._response_length = settings.response_length or request.sampling_params.max_new_tokens
        max_new_tokens = min(request.sampling_params.max_new_tokens, self._response_length)
        self._sampling_params = replace(request.sampling_params, max_new_tokens=max_new_tokens)
        self._banned_ids = frozenset(setup.chat.vision_ids) if setup.settings.ban_vision_tokens else frozenset()
        self._history = History(prompt, setup.break_markers, ids_from_first_turn=settings.message_ids == "turns")
        self._view = PromptView(setup.chat, setup.tools if setup.tools_in_template else ())
        self._document_tools = DocumentTools(document, settings, count=self._count_as_json, budget=self._budget)
        self._generations: list[Generation] = []
        self._marks: list[DeletionMark] = []
        self._calls: Counter[str] = Counter()
        self._failed_calls = 0
        self._stopwatch = PhaseTimer()

    async def play(self) -> Trajectory:
        """Plays the episode and returns its trajectory, under the request's uid.

        Raises:
            EpisodeError: the engine failed.
        """
        try:
            ending = await self._play_turns()
        finally:
            self._request.transcript.extend(self._history.messages)
        score, reward = self._reward(ending)
        return self._trajectory(ending, score, reward)

    # ---- the loop ----------------------------------------------------------------------------------------------------

    async def _play_turns(self) -> _Ending:
        while len(self._generations) < self._settings.max_turns:
            prompt_ids = self._view.prompt(self._history)
            if len(prompt_ids) + self._response_length > self._settings.max_model_length:
                self._log_prompt_too_long(len(prompt_ids))
                return _Ending(StopReason.MAX_CONTEXT)
            reply = await self._generate(prompt_ids)
            why_cut = self._why_cut(reply)
            if not reply.output_ids and why_cut is not None:
                return _Ending(why_cut)
            msg_id, text = self._record(prompt_ids, reply)
            ending = _Ending(why_cut) if why_cut is not None else await self._act(msg_id, text)
            if ending is not None:
                return ending
        return _Ending(StopReason.MAX_TURNS)

    async def _generate(self, prompt_ids: Sequence[int]) -> GenerateReply:
        request = GenerateRequest(
            input_ids=prompt_ids,
            sampling_params=self._sampling_params,
            session_id=self._request.uid,
            banned_ids=self._banned_ids,
        )
        with self._stopwatch.phase("generate"):
            return await self._setup.engine.generate(request)

    def _record(self, prompt_ids: Sequence[int], reply: GenerateReply) -> tuple[int, str]:
        """Records a sampled turn; returns its message id and its text."""
        generation = reply.as_generation(prompt_ids, length=self._setup.chat.length_before_vision(reply.output_ids))
        text = self._setup.chat.text(generation.output_ids)
        msg_id = self._history.add_assistant(text)
        self._view.add_turn(msg_id, generation.output_ids)
        self._generations.append(generation)
        return msg_id, text

    def _why_cut(self, reply: GenerateReply) -> StopReason | None:
        """Returns why a turn was cut; None for a complete turn."""
        if reply.finish_reason == "abort":
            return StopReason.ABORTED
        if self._setup.chat.length_before_vision(reply.output_ids) < len(reply.output_ids):
            return StopReason.FORBIDDEN_TOKEN
        return StopReason.MAX_TOKENS if reply.finish_reason == "length" else None

    async def _act(self, msg_id: int, text: str) -> _Ending | None:
        """Executes the calls of a turn, in order; returns the ending if one of them ends the episode."""
        calls = self._setup.read_calls(text)
        if not calls:
            return _Ending(StopReason.STOP, text_outside_calls(text))
        # The first call above the limit is answered by an error, for all further calls.
        for index, call in enumerate(calls[: self._settings.max_calls_per_turn + 1]):
            with self._stopwatch.phase("tools"):
                result = await self._carry_out(call, msg_id, index)
            self._calls[call.name if self._document_tools.has(call.name) else NO_TOOL] += 1
            self._failed_calls += not result.ok
            if result.answer is not None:
                return _Ending(StopReason.ANSWERED, result.answer)
            self._history.add_result(call.name[:80], result, invoked_by=msg_id)
        return None

    async def _carry_out(self, call: ToolCall, msg_id: int, index: int) -> ToolResult:
        """Executes call ``index`` (from 0) of the turn ``msg_id``; returns its result, which may be an error."""
        max_calls = self._settings.max_calls_per_turn
        if index >= max_calls:
            return ToolResult(message=f"only the first {max_calls} calls of a turn are carried out", ok=False)
        checked = self._document_tools.check(call)
        if isinstance(checked, ToolResult):
            return checked
        if checked.tool == ToolName.FINISH:
            return ToolResult(message="finished", answer=checked.arguments["answer"])
        if checked.tool == ToolName.DELETE_CONTEXT:
            return self._delete_context(checked, msg_id)
        return await self._document_tools.run(checked)

    def _delete_context(self, call: CheckedCall, msg_id: int) -> ToolResult:
        """Deletes messages; first records the mark from which ``snapshots.py`` rebuilds the state before."""
        deletion = self._history.plan_deletion(call.arguments["message_ids"], invoked_by=msg_id)
        if deletion.deleted:
            self._marks.append(
                DeletionMark(
                    turn=len(self._generations) - 1,
                    message_count=len(self._history.messages),
                    deleted_msg_ids=deletion.deleted,
                )
            )
            self._history.delete(deletion)
        return deletion.result()

    def _count_as_json(self, text: str) -> int:
        """Counts the tokens of a text as it stands in a result: in JSON, which escapes quotes and line feeds."""
        return self._setup.chat.count(json.dumps(text, ensure_ascii=False))

    def _budget(self) -> Budget:
        """Returns the context's state after the current turn, with its results so far."""
        last = self._generations[-1]
        results = [message["content"] for message in self._history.results_of_last_turn()]
        return Budget(
            used=len(last.prompt_ids) + len(last.output_ids) + sum(map(self._setup.chat.count, results)),
            response_length=self._response_length,
            max_model_length=self._settings.max_model_length,
        )

    def _log_prompt_too_long(self, prompt_length: int) -> None:
        log = logger.info if self._generations else logger.warning
        log("episode %s ends: %d tokens and %d of a turn do not fit max_model_length %d",
            self._request.uid, prompt_length, self._response_length, self._settings.max_model_length)  # fmt: skip

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _reward(self, ending: _Ending) -> tuple[Score | None, float]:
        if ending.stop_reason is StopReason.MAX_CONTEXT:
            return None, self._settings.context_length_penalty
        if ending.answer is None or self._task.label is None:
            return None, 0.0
        score = score_answer(ending.answer, self._task.label, partial_credit=self._settings.partial_credit)
        return score, score.value

    def _trajectory(self, ending: _Ending, score: Score | None, reward: float) -> Trajectory:
        return Trajectory(
            uid=self._request.uid,
            instance_id=self._request.instance.instance_id,
            messages=tuple(self._history.messages),
            reward=reward,
            outcome=outcome_of(ending.stop_reason),
            stop_reason=ending.stop_reason,
            generations=self._trained_generations(),
            extra_info=self._extra_info(ending, score),
            timings_s=self._stopwatch.seconds(),
        )

    def _trained_generations(self) -> tuple[Generation, ...]:
        """Returns all turns; without ``train_before_deletion``, those up to the last deleting turn are not trained."""
        generations = self._stopwatch.with_environment_times(self._generations)
        if self._settings.train_before_deletion or not self._marks:
            return generations
        last_deleting_turn = self._marks[-1].turn
        return tuple(replace(each, trained=turn > last_deleting_turn) for turn, each in enumerate(generations))

    def _extra_info(self, ending: _Ending, score: Score | None) -> dict[str, Any]:
        return {
            "statelm_enabled": self._settings.statelm_enabled,
            "context_length_exceeded": ending.stop_reason is StopReason.MAX_CONTEXT,
            "had_delete_operation": bool(self._marks),
            MARKS_KEY: [mark.as_dict() for mark in self._marks],
            "deleted_msg_ids": sorted(self._history.deleted),
            "turns": len(self._generations),
            "steps": sum(self._calls.values()),
            "tool_calls": dict(self._calls),
            "failed_tool_calls": self._failed_calls,
            "notes": len(self._document_tools.notes),
            "answer": None if ending.answer is None else ending.answer[:2000],
            "score": None if score is None else asdict(score),
            "success": None if self._task.label is None else score is not None and score.value >= 1,
            "reward_source": "label" if self._task.label is not None else "none: the line has no label",
            "finish_reason": self._generations[-1].finish_reason if self._generations else None,
            "max_prompt_tokens": max((len(each.prompt_ids) for each in self._generations), default=0),
            "document": {"sha256": self._document.sha256, "characters": len(self._document.text)},
            "tools": list(self._setup.tools) if self._setup.tools_in_template else [],
            "task": dict(self._task.extra_info),
        }
