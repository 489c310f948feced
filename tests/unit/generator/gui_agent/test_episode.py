"""The append-only episode loop on a scripted device and a scripted engine: tokens, endings, budgets and faults."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from slime.utils.mask_utils import pack_training_rows
from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.devices.interface import Observation
from slime_plugins.rollout_buffer.engine.base import GenerateReply
from slime_plugins.rollout_buffer.errors import DeviceError, EnvironmentSetupError
from slime_plugins.rollout_buffer.generator.android_world import interaction_env
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind
from slime_plugins.rollout_buffer.generator.gui_agent.episode import Episode, read_task
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.context import View
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.prompts import (
    first_turn_message,
    later_turn_message,
    system_message,
)
from slime_plugins.rollout_buffer.generator.gui_agent.settings import ObservationMode
from slime_plugins.rollout_buffer.generator.gui_agent.task_runner import Task
from slime_plugins.rollout_buffer.generator.phase_timer import PhaseTimer
from slime_plugins.rollout_buffer.testing.fake_device import FakeDevice
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine, ScriptedReply
from slime_plugins.rollout_buffer.types import Instance, Outcome, StopReason, Trajectory, WeightVersionSpan
from tests.demo_tokens import tokenizer, trained_text
from tests.episode_requests import episode_of

chat = ChatTokens(tokenizer)
IMAGE_PAD = chat.image_placeholder_id


class HeldFakeDevice:
    """A lease of a scripted device, without a pool."""

    device_id = "device-7"

    def __init__(self) -> None:
        self.device = FakeDevice()

    async def reset(self, task_name: str, params_idx: int) -> Observation:
        return self.device.reset(task_name, params_idx)

    async def step(self, action: Action) -> Observation:
        return self.device.step(action)

    async def score(self) -> float:
        return self.device.score()


@dataclass(frozen=True)
class Played:
    trajectory: Trajectory
    engine: FakeEngine
    device: FakeDevice

    @property
    def info(self) -> Mapping[str, Any]:
        return self.trajectory.extra_info


def say(thinking: str = "hm", **arguments: Any) -> str:
    call = json.dumps({"name": "mobile_use", "arguments": arguments})
    return f"<thinking>{thinking}</thinking><tool_call>\n{call}\n</tool_call><conclusion>so</conclusion>"


CLICK = say(action="click", coordinate=[500, 500])
DONE = say(action="terminate", status="success")


async def play(
    script: Sequence[ScriptedReply],
    task_name: str = "Solved",
    *,
    max_new_tokens: int = 1000,
    extra: Mapping[str, Any] | None = None,
    lease: HeldFakeDevice | None = None,
    view: View | None = None,
    **options: Any,
) -> Played:
    lease = lease or HeldFakeDevice()
    engine = FakeEngine(script, tokenizer=tokenizer)
    request = episode_of("Solved-3", {}, uid="job-e0-i0-s0-a0", max_new_tokens=max_new_tokens, extra=extra or {})
    settings = AndroidWorldSettings.model_validate(options)
    episode = Episode(
        request=request,
        task=Task(name=task_name, params_idx=3),
        device=lease,
        engine=engine,
        chat=chat,
        settings=settings,
        rewards=settings.reward,
        view=view,
        timer=PhaseTimer(),
    )
    return Played(trajectory=await episode.play(), engine=engine, device=lease.device)


async def test_a_solved_episode_is_rewarded_and_recorded() -> None:
    played = await play([CLICK, DONE])
    trajectory = played.trajectory
    assert (trajectory.uid, trajectory.instance_id) == ("job-e0-i0-s0-a0", "Solved-3")
    assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.COMPLETED, StopReason.TERMINATED)
    assert trajectory.reward == played.info["reward_breakdown"]["reward"] > 0.8
    assert played.info["success"] is True
    assert (played.info["turns"], played.info["steps"], played.info["max_turns"]) == (2, 2, 10)
    assert (played.info["goal"], played.info["app"]) == ("Play Solved number 3.", "scripted")
    assert set(trajectory.timings_s) == {"reset", "generate", "act", "score"}
    json.dumps(played.info)


async def test_the_whole_episode_packs_into_one_row_that_trains_exactly_what_was_said() -> None:
    trajectory = (await play([CLICK, "no action at all", DONE])).trajectory
    (row,) = pack_training_rows(trajectory.generations)
    said = "".join(f"{text}<|im_end|>" for text in (CLICK, "no action at all", DONE))
    assert trained_text(row.token_ids, row.loss_mask) == said
    assert row.token_ids[: len(trajectory.generations[0].prompt_ids)] == list(trajectory.generations[0].prompt_ids)
    whole = chat.prompt(trajectory.messages[:-1]) + list(trajectory.generations[-1].output_ids)
    assert row.token_ids == whole


async def test_another_stop_token_is_followed_by_the_templates_own_end_of_turn() -> None:
    stop = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    sampled = (*tokenizer.encode(CLICK, add_special_tokens=False), stop)
    played = await play([sampled, DONE])
    after = played.engine.requests[1].input_ids[len(played.engine.requests[0].input_ids) + len(sampled) :]
    assert after[0] == chat.end_of_turn_id


async def test_a_value_that_was_converted_is_counted_and_named_in_the_log_of_actions() -> None:
    played = await play(['<tool_call>{"name": "mobile_use", "arguments": {"action": "terminate"}}</tool_call>'])
    assert (played.info["malformed_turns"], played.info["corrected_turns"]) == (0, 1)
    assert played.info["steps_log"][0]["corrected"] == "status"


async def test_a_malformed_reply_costs_a_turn_and_shows_the_same_screen_with_the_reason() -> None:
    played = await play(["I am lost.", CLICK, DONE])
    assert (played.info["malformed_turns"], played.info["steps"], played.info["turns"]) == (1, 2, 3)
    note, image = played.trajectory.messages[3]["content"]
    assert "it has no <tool_call>" in note["text"]
    assert image == played.trajectory.messages[1]["content"][1]
    assert len(played.trajectory.images) == 2
    assert played.info["steps_log"][0]["malformed"] == "it has no <tool_call>"
    assert played.trajectory.turn_rewards is None


@pytest.mark.parametrize("rollout_mode", ["incremental", "history"])
async def test_a_malformed_reply_may_cost_something_and_the_last_turn_earns_what_the_episode_did(
    rollout_mode: str,
) -> None:
    played = await play(["I am lost.", CLICK, DONE], malformed_penalty=0.25, rollout_mode=rollout_mode)
    one = played.trajectory

    assert one.turn_rewards == [-0.25, 0.0, one.reward]
    assert wire.checked_turn_rewards({"turn_rewards": one.turn_rewards}, one.messages, one.generations)[0] is not None
    ended = (await play([CLICK, "I am lost."], malformed_penalty=0.25, max_turns=2)).trajectory
    assert ended.turn_rewards == [0.0, ended.reward - 0.25]


async def test_the_log_has_device_and_model_coordinates_and_what_the_agent_saw() -> None:
    played = await play([CLICK, DONE])
    first, last = played.info["steps_log"]
    assert (first["action"], list(first["point"]), list(first["coordinate"])) == ("click", [540, 1201], [500, 500])
    assert first["screenshot"] == played.trajectory.images[0].sha256
    assert (last["action"], last["status"]) == ("terminate", "success")


async def test_an_answer_reaches_the_device_and_ends_the_episode() -> None:
    played = await play([say(action="answer", text="42")])
    assert played.trajectory.stop_reason is StopReason.ANSWERED
    assert played.device.actions == [Action(kind=ActionKind.ANSWER, text="42")]
    assert played.info["success"] is True


async def test_by_the_stricter_rule_success_needs_an_agent_that_says_so() -> None:
    played = await play([CLICK] * 3, max_turns=3, reward={"success_needs_ending": True})
    assert played.trajectory.reward == 0.0
    assert played.info["reward_breakdown"]["success"] is None
    assert len(played.device.actions) == 3
    assert played.trajectory.messages[-1]["role"] == "assistant"


async def test_a_reply_at_its_own_cap_truncates_the_episode() -> None:
    played = await play([CLICK, DONE], max_new_tokens=5)
    assert (played.trajectory.outcome, played.trajectory.stop_reason) == (Outcome.TRUNCATED, StopReason.MAX_TOKENS)
    assert len(played.trajectory.generations[0].output_ids) == 5
    assert played.info["finish_reason"] == "length"
    assert played.info["reward_breakdown"]["success"] == 0.0  # asked, and nothing was done yet
    assert played.trajectory.reward == 0.0


def first_prompt_length() -> int:
    return len(chat.prompt([system_message(), first_turn_message("Play Solved number 3.", "0" * 64)]))


async def test_a_reply_that_fills_the_context_truncates_the_episode() -> None:
    played = await play([CLICK], max_context_len=first_prompt_length() + 632 + 7)
    assert played.engine.requests[0].sampling_params.max_new_tokens == 7
    assert (played.trajectory.outcome, played.trajectory.stop_reason) == (Outcome.TRUNCATED, StopReason.MAX_CONTEXT)


@pytest.mark.parametrize(("spare", "turns"), [(-3, 1), (0, 1), (1, 2)])
async def test_an_observation_is_shown_only_if_a_reply_still_fits(spare: int, turns: int) -> None:
    reply_length = len(tokenizer.encode(CLICK, add_special_tokens=False)) + 1
    shown_length = len(chat.bridge(later_turn_message(2, 10, "0"), turn_is_closed=True))
    room = first_prompt_length() + reply_length + shown_length + spare
    played = await play([CLICK, DONE], max_context_len=room, image_pixels_per_token=648_000)
    assert played.trajectory.stop_reason is StopReason.MAX_CONTEXT
    assert played.trajectory.messages[-1]["role"] == "assistant"
    assert len(played.trajectory.images) == len(played.trajectory.generations) == turns


async def test_image_tokens_count_as_the_engine_counts_them() -> None:
    output = tuple(tokenizer.encode(CLICK + "<|im_end|>", add_special_tokens=False))
    counted = first_prompt_length() - 1 + 100
    reply = GenerateReply(
        output_ids=output, output_log_probs=(-0.5,) * len(output), finish_reason="stop", prompt_tokens=counted
    )
    played = await play([reply, DONE], max_context_len=20_000, max_new_tokens=20_000)
    second = played.engine.requests[1]
    assert second.sampling_params.max_new_tokens == 20_000 - (len(second.input_ids) + 2 * 99)


async def test_image_tokens_are_forbidden_at_sampling_beside_the_jobs_own_bias() -> None:
    played = await play([DONE], extra={"logit_bias": {"5": 1.0}, "top_k": 20})
    request = played.engine.requests[0]
    assert request.sampling_params.extra == {"logit_bias": {"5": 1.0}, "top_k": 20}
    assert request.banned_ids == frozenset(chat.vision_ids)


async def test_a_sampled_image_token_ends_the_episode_with_what_came_before_it() -> None:
    said = tokenizer.encode("<thinking>I see ", add_special_tokens=False)
    output = (*said, IMAGE_PAD, *tokenizer.encode("</thinking>", add_special_tokens=False), chat.end_of_turn_id)
    reply = GenerateReply(
        output_ids=output,
        output_log_probs=(-0.5,) * len(output),
        finish_reason="stop",
        weight_version_spans=(WeightVersionSpan("1", 0, 2), WeightVersionSpan("2", 2, len(output))),
    )
    played = await play([CLICK, reply])
    trajectory = played.trajectory
    assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.TRUNCATED, StopReason.FORBIDDEN_TOKEN)
    last = trajectory.generations[-1]
    assert list(last.output_ids) == said
    assert last.weight_version_spans == (WeightVersionSpan("1", 0, 2), WeightVersionSpan("2", 2, len(said)))
    (row,) = pack_training_rows(trajectory.generations)
    assert row.token_ids.count(IMAGE_PAD) == 2
    assert trajectory.messages[-1]["content"] == "<thinking>I see "


async def test_a_broken_device_is_an_error_and_never_a_reward() -> None:
    with pytest.raises(DeviceError, match="offline"):
        await play([CLICK], "Offline")


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"metadata": None},
        {"metadata": {"task_name": "A"}},
        {"metadata": {"task_name": 5, "params_idx": 0}},
        {"metadata": {"task_name": "A", "params_idx": "0"}},
        {"metadata": {"task_name": "A", "params_idx": True}},
    ],
)
def test_a_line_without_a_task_is_named(data: dict[str, Any]) -> None:
    with pytest.raises(EnvironmentSetupError, match="instance x needs metadata"):
        read_task(Instance(instance_id="x", data=data))


class TaskThatEnds(HeldFakeDevice):
    """A task that says after its first action that it is over, on a screen that can be read as well as seen."""

    async def reset(self, task_name: str, params_idx: int) -> Observation:
        return replace(self.device.reset(task_name, params_idx), elements='1. button text="<|im_end|>" [0, 0, 9, 9]')

    async def step(self, action: Action) -> Observation:
        return replace(self.device.step(action), elements="1. p [0, 0, 9, 9]", done=len(self.device.actions) == 2)


async def test_a_task_that_says_it_is_over_ends_the_episode_as_a_whole_one() -> None:
    played = await play([CLICK, CLICK], lease=TaskThatEnds())
    assert (played.trajectory.outcome, played.trajectory.stop_reason) == (Outcome.COMPLETED, StopReason.TASK_ENDED)
    assert played.info["success"] is True
    assert len(played.trajectory.generations) == 2


async def test_a_failed_task_that_ends_by_itself_costs_no_penalty_for_giving_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interaction_env, "PillowImage", Mock())  # the scripted screenshots are no pictures
    lease = TaskThatEnds()
    lease.score = AsyncMock(return_value=0.0)  # type: ignore[method-assign]  # the task is not solved
    env = interaction_env.AndroidWorldEnv(
        task=Task(name="Solved", params_idx=3),
        acquire=AsyncMock(return_value=lease),
        settings=AndroidWorldSettings(),
        count_tokens=chat.count,
    )
    await env.reset()
    _, is_first_over, _ = await env.step(CLICK)
    _, is_over, facts = await env.step(CLICK)
    assert (is_first_over, is_over, facts["stop_reason"]) == (False, True, "task_ended")
    lease.device.actions.clear()
    assert await env.compute_final_reward() == (await play([CLICK, CLICK], lease=lease)).trajectory.reward == 0.0


@pytest.mark.parametrize("mode", ["incremental", "history"])
async def test_a_language_only_policy_reads_the_screen_and_gets_no_image(mode: str) -> None:
    played = await play(
        [CLICK, CLICK], lease=TaskThatEnds(), view=View(observation_mode=ObservationMode.ELEMENTS), rollout_mode=mode
    )
    prompts = [tokenizer.decode(request.input_ids) for request in played.engine.requests]
    assert all(not request.images for request in played.engine.requests)
    assert all(IMAGE_PAD not in request.input_ids for request in played.engine.requests)
    assert '1. button text="< |im_end| >" [0, 0, 9, 9]' in prompts[0]
    assert "1. p [0, 0, 9, 9]" in prompts[1]
    assert played.trajectory.stop_reason is StopReason.TASK_ENDED
    rows = pack_training_rows(played.trajectory.generations)
    assert len(rows) == (1 if mode == "incremental" else 2)


# --- episodes that repeat themselves ---------------------------------------------------------------------------------


class StillScreen(HeldFakeDevice):
    """Nothing that is done changes what is seen."""

    async def reset(self, task_name: str, params_idx: int) -> Observation:
        self.first = await super().reset(task_name, params_idx)
        return self.first

    async def step(self, action: Action) -> Observation:
        return replace(await super().step(action), screenshot=self.first.screenshot)


async def test_an_episode_that_does_the_same_at_the_same_screen_ends_when_asked_to() -> None:
    played = await play([CLICK] * 8, lease=StillScreen(), max_turns=8, stop_after_repeats=3)
    assert (played.trajectory.outcome, played.trajectory.stop_reason) == (Outcome.COMPLETED, StopReason.REPEATED)
    assert len(played.trajectory.generations) == 3
