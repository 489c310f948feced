"""One episode on a device with a screen: observe, generate, act, until an end condition; then the reward.

    reset → first prompt ─▶ generate ─▶ parse ─▶ act ─▶ next prompt, with the new screenshot ─┐
                               ▲                                                             │
                               └─────────────────────────────────────────────────────────────┘

The loop is the same for every rollout mode; a ``Context`` renders the prompts. End conditions:

=======================================  ==================  ===========  ==============
what happened                            stop reason         outcome      reward
=======================================  ==================  ===========  ==============
the agent called ``terminate``           terminated          completed    see rewards
the agent called ``answer``              answered            completed    see rewards
the task ended by itself                 task_ended          completed    see rewards
the limit of turns is reached            max_turns           completed    success counts
the same action on the same screen       repeated            completed    success counts
``stop_after_repeats`` times in a row
a reply reached its token limit          max_tokens          truncated    success counts
prompt and replies fill the context      max_context         truncated    success counts
the agent sampled an image token         forbidden_token     truncated    success counts
the engine aborted the request           aborted             aborted      0
a device, engine or task set-up failed   an ``EpisodeError`` is raised: no trajectory, no reward
=======================================  ==================  ===========  ==============

A reply without a valid action is a turn like any other: the next prompt has the same screen and the reason. An image
token in a reply would shift every later screenshot against its placeholder: image tokens are banned at sampling. If the
engine samples one anyway, the episode ends, and the reply keeps the ids before it.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.devices.interface import DeviceLease, Observation
from slime_plugins.rollout_buffer.devices.leased_device import NOT_RESTORED
from slime_plugins.rollout_buffer.engine.base import Engine, GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.engine.image_token_counts import family_with
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.context import Context, IncrementalContext, View
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.conversation import Conversation
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.history_context import HistoryContext
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.image_token_counter import ImageTokenCounter
from slime_plugins.rollout_buffer.generator.gui_agent.settings import GuiAgentSettings, RolloutMode
from slime_plugins.rollout_buffer.generator.gui_agent.task_runner import (
    RewardBreakdown,
    RewardRule,
    Task,
    TaskRunner,
    task_of,
)
from slime_plugins.rollout_buffer.generator.outcomes import outcome_of
from slime_plugins.rollout_buffer.generator.phase_timer import PhaseTimer
from slime_plugins.rollout_buffer.types import EpisodeRequest, Instance, StopReason, Trajectory

_ENDED_BY_AGENT = frozenset({StopReason.TERMINATED, StopReason.ANSWERED})
"""Stop reasons of an episode that the agent ended itself."""


def read_task(instance: Instance) -> Task:
    """Returns the task in the ``metadata`` of an input line.

    Raises:
        EnvironmentSetupError: the line has no ``metadata`` with a ``task_name`` and an integer ``params_idx``.
    """
    return task_of(instance.data.get("metadata"), instance_id=instance.instance_id)


def create_context(settings: GuiAgentSettings, chat: ChatTokens, view: View | None = None) -> Context:
    """Returns the ``Context`` of one episode in the settings' rollout mode; ``view`` None is a phone's."""
    view = view or View()
    if settings.rollout_mode is RolloutMode.HISTORY:
        return HistoryContext(chat, view, history_images=settings.history_images)
    return IncrementalContext(chat, view)


class Episode:
    """One episode on a leased device, for a single ``play``."""

    def __init__(
        self,
        *,
        request: EpisodeRequest,
        task: Task,
        device: DeviceLease[Action],
        engine: Engine,
        chat: ChatTokens,
        settings: GuiAgentSettings,
        rewards: RewardRule,
        timer: PhaseTimer,
        view: View | None = None,
    ) -> None:
        self._request = request
        self._task = task
        self._device = device
        self._engine = engine
        self._settings = settings
        self._timer = timer
        family = family_with(settings.image_pixels_per_token)
        self._image_tokens = ImageTokenCounter(family, estimate=settings.image_tokens)
        self._conversation = Conversation(
            chat,
            create_context(settings, chat, view),
            max_context_len=settings.max_context_len,
            image_tokens=self._image_tokens,
        )
        self._task_runner = TaskRunner(
            task=task,
            device=device,
            rewards=rewards,
            max_turns=settings.max_turns,
            count_tokens=chat.count,
            timer=timer,
        )
        self._sampling_params = request.sampling_params
        self._banned_ids = frozenset(chat.vision_ids) if settings.ban_vision_tokens else frozenset()
        self._allowed_tokens = 0
        self._turns = 0

    async def play(self) -> Trajectory:
        """Plays the episode and returns its trajectory, under the request's uid.

        Raises:
            EpisodeError: the device, the engine or the task's set-up failed.
        """
        first = await self._task_runner.reset()
        self._conversation.open(first)
        try:
            stop_reason = await self._play_turns()
            breakdown = await self._task_runner.reward(
                ended_by_agent=stop_reason in _ENDED_BY_AGENT, given_up=stop_reason is StopReason.ABORTED
            )
        finally:
            self._request.transcript.extend(self._conversation.messages)
        return self._trajectory(first, stop_reason, breakdown)

    # ---- the loop ----------------------------------------------------------------------------------------------------

    async def _play_turns(self) -> StopReason:
        """Plays turns until one of them ends the episode."""
        while self._turns < self._task_runner.max_turns:
            sampled = await self._generate()
            if sampled is None:
                return StopReason.MAX_CONTEXT
            text = self._conversation.add_reply(sampled)
            stop_reason = self._why_cut(sampled) or await self._act(text)
            if stop_reason is not None:
                return stop_reason
        return StopReason.MAX_TURNS

    async def _generate(self) -> GenerateReply | None:
        """Samples the next turn; None if the context has no room."""
        room = self._conversation.room
        if room <= 0:
            return None
        self._turns += 1
        self._allowed_tokens = min(self._sampling_params.max_new_tokens, room)
        request = GenerateRequest(
            input_ids=self._conversation.prompt.ids,
            sampling_params=replace(self._sampling_params, max_new_tokens=self._allowed_tokens),
            session_id=self._request.uid,
            images=self._conversation.prompt.images,
            banned_ids=self._banned_ids,
        )
        with self._timer.phase("generate"):
            return await self._engine.generate(request)

    def _why_cut(self, reply: GenerateReply) -> StopReason | None:
        """Returns why a reply was cut; None for a complete reply."""
        if reply.finish_reason == "abort":
            return StopReason.ABORTED
        if self._conversation.has_forbidden_token(reply):
            return StopReason.FORBIDDEN_TOKEN
        if reply.finish_reason == "length":
            cut_by_own_limit = self._allowed_tokens == self._sampling_params.max_new_tokens
            return StopReason.MAX_TOKENS if cut_by_own_limit else StopReason.MAX_CONTEXT
        return None

    async def _act(self, text: str) -> StopReason | None:
        """Executes the reply's action and renders the next prompt; returns why the episode ends, if it does."""
        reply = self._task_runner.read(text)
        end = await self._task_runner.act(reply, self._turns)
        if end is not None:
            return StopReason(end)
        max_turns = self._task_runner.max_turns
        if self._turns >= max_turns:
            return StopReason.MAX_TURNS
        max_repeats = self._settings.stop_after_repeats
        if max_repeats is not None and self._task_runner.repeats() >= max_repeats:
            return StopReason.REPEATED
        observation = self._task_runner.observation
        fits = self._conversation.add_observation(observation, turn=self._turns, max_turns=max_turns, reply=reply)
        return None if fits else StopReason.MAX_CONTEXT

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _trajectory(self, first: Observation, stop_reason: StopReason, breakdown: RewardBreakdown) -> Trajectory:
        return Trajectory(
            uid=self._request.uid,
            instance_id=self._request.instance.instance_id,
            messages=tuple(self._conversation.messages),
            reward=breakdown.reward,
            turn_rewards=self._turn_rewards(breakdown.reward),
            outcome=outcome_of(stop_reason),
            stop_reason=stop_reason,
            generations=self._timer.with_environment_times(self._conversation.generations),
            images=tuple(self._conversation.distinct_images()),
            extra_info=self._extra_info(first, stop_reason, breakdown),
            timings_s=self._timer.seconds(),
        )

    def _turn_rewards(self, earned: float) -> list[float] | None:
        """Returns the reward of each turn; the last turn's includes the episode's. None if malformed replies have no
        penalty."""
        penalty, turns = self._settings.malformed_penalty, len(self._conversation.generations)
        if not penalty or not turns:
            return None
        malformed = {entry["turn"] for entry in self._task_runner.log if "malformed" in entry}
        rewards = [-penalty if turn in malformed else 0.0 for turn in range(1, turns + 1)]
        rewards[-1] += earned
        return rewards

    def _extra_info(self, first: Observation, stop_reason: StopReason, breakdown: RewardBreakdown) -> dict[str, Any]:
        generations = self._conversation.generations
        return {
            "task_name": self._task.name,
            "params_idx": self._task.params_idx,
            "app": first.details.get("app"),
            "solved_at_start": first.details.get("solved_at_start") == "true",
            NOT_RESTORED: first.details.get(NOT_RESTORED, "").split(),
            "goal": first.goal,
            "rollout_mode": str(self._settings.rollout_mode),
            **self._conversation.facts(),
            "device_id": self._device.device_id,
            "screen": [first.screen_width, first.screen_height],
            "turns": self._turns,
            "max_turns": self._task_runner.max_turns,
            "steps": breakdown.steps,
            "malformed_turns": self._task_runner.malformed_turns,
            "corrected_turns": self._task_runner.corrected_turns,
            "thinking_tokens": self._task_runner.thinking_tokens,
            "success": breakdown.success is not None and breakdown.success >= 1,
            "stop_reason": str(stop_reason),
            "finish_reason": generations[-1].finish_reason if generations else None,
            "reward_breakdown": breakdown.as_dict(),
            "steps_log": self._task_runner.log,
            **self._prompt_mismatch(),
        }

    def _prompt_mismatch(self) -> dict[str, Any]:
        """Returns the engine's and the size rule's count of image tokens, if they differ."""
        mismatch = self._image_tokens.mismatch
        return {} if mismatch is None else {"prompt_tokens_mismatch": asdict(mismatch)}
