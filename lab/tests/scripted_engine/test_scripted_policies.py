"""The scripted policy: it solves every task of the simulated phone from its screenshots, and errs as often as told."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_buffer_lab.scripted_engine.conversation import Conversation, Turn, read_conversation
from rollout_buffer_lab.scripted_engine.math_policy import read_question, solve
from rollout_buffer_lab.scripted_engine.phone_policy.policy import is_phone_task, play_phone
from rollout_buffer_lab.scripted_engine.policy import reply_to
from rollout_buffer_lab.scripted_engine.rng import SessionRng
from rollout_buffer_lab.simulated_phone.phone import SimulatedPhone
from rollout_buffer_lab.simulated_phone.tasks.registry import TASKS
from slime_plugins.rollout_buffer.devices.interface import Observation
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import ActionKind
from slime_plugins.rollout_buffer.generator.gui_agent.prompting import prompts
from slime_plugins.rollout_buffer.generator.gui_agent.reply_parser import MalformedAction, parse_reply
from slime_plugins.rollout_buffer.types import Message

DEMO_MATH = Path(__file__).resolve().parents[3] / "data" / "demo_math.jsonl"


class Play(TypedDict):
    skill: float
    rng: SessionRng


PERFECT: Play = {"skill": 1.0, "rng": SessionRng(0, "session")}


@pytest.fixture(scope="module")
def phone() -> Iterator[SimulatedPhone]:
    device = SimulatedPhone()
    yield device
    device.close()


class Episode:
    """The policy on a phone, with the generator's own prompts and its own parser between them."""

    def __init__(self, phone: SimulatedPhone, task: str, params_idx: int, *, rebuilt_prompts: bool = False) -> None:
        self.phone = phone
        self.seen = phone.reset(task, params_idx)
        self.replies: list[str] = []
        self.ended = ""
        self._budget = self.seen.step_budget or 10
        self._rebuilt = rebuilt_prompts
        self._turns = [Turn(role="system", text=prompts.SYSTEM_PROMPT), self._user(self._first_text(), self.seen)]

    def play(self, skill: float, rng: SessionRng) -> float:
        """Plays to the end, or to the last turn, and returns the success."""
        while not self.ended and len(self.replies) < self._budget:
            self.play_turn(skill, rng)
        return self.phone.score()

    def play_turn(self, skill: float, rng: SessionRng) -> None:
        reply = play_phone(self._conversation(), skill=skill, rng=rng)
        self.replies.append(reply)
        self._turns.append(Turn(role="assistant", text=reply))
        self._act(reply)

    def _act(self, reply: str) -> None:
        action = parse_reply(reply, screen_width=1080, screen_height=2400).action
        if isinstance(action, MalformedAction):
            note = prompts.malformed_reply_note(action.reason)
        else:
            self.seen = self.phone.step(action.action)
            note = self.seen.note
            if action.action.kind in (ActionKind.TERMINATE, ActionKind.ANSWER):
                self.ended = action.action.status or "answer"
        message = prompts.later_turn_message(len(self.replies) + 1, self._budget, "00", note)
        self._turns.append(self._user(text_of(message), self.seen))

    def _conversation(self) -> Conversation:
        """All turns; or, as prompts rebuilt for each step have it, one with the history and the last screenshot."""
        if not self._rebuilt:
            return Conversation(turns=tuple(self._turns))
        said = [re.findall(r"<conclusion>\n(.*)\n</conclusion>", reply, re.DOTALL)[0] for reply in self.replies]
        present = prompts.history_turn_message(len(said) + 1, "00")
        text = text_of(prompts.with_history(self.seen.goal, said, [], present))
        return Conversation(turns=(self._turns[0], self._user(text, self.seen)))

    def _first_text(self) -> str:
        return text_of(prompts.first_turn_message(self.seen.goal, "00"))

    def _user(self, text: str, seen: Observation) -> Turn:
        return Turn(role="user", text=text, images=(seen.screenshot.data,))


def text_of(message: Message) -> str:
    return "".join(part.get("text", "") for part in message["content"])


class TestPhone:
    @pytest.mark.parametrize(("params_idx", "task"), enumerate(TASKS))
    def test_with_full_skill_the_task_is_solved_within_its_budget(
        self, phone: SimulatedPhone, task: str, params_idx: int
    ) -> None:
        episode = Episode(phone, task, params_idx % 20)
        assert episode.play(**PERFECT) == 1.0, episode.replies
        assert episode.ended in ("success", "answer")

    @pytest.mark.parametrize("task", ["SimpleSmsSendReceivedAddress", "MarkorAddNoteHeader", "MarkorCreateNoteAndSms"])
    def test_prompts_rebuilt_for_each_step_do_as_well(self, phone: SimulatedPhone, task: str) -> None:
        episode = Episode(phone, task, 3, rebuilt_prompts=True)
        assert episode.play(**PERFECT) == 1.0, episode.replies

    def test_without_skill_nothing_is_solved(self, phone: SimulatedPhone) -> None:
        scores = [Episode(phone, "SimpleSmsReply", 0).play(0.0, SessionRng(0, str(slot))) for slot in range(8)]
        assert scores == [0.0] * 8

    def test_siblings_differ_and_the_same_session_does_not(self, phone: SimulatedPhone) -> None:
        def replies(session: str) -> list[str]:
            episode = Episode(phone, "ClockStopWatchRunning", 0)
            episode.play(0.5, SessionRng(7, session))
            return episode.replies

        assert replies("a") == replies("a")
        assert len({json.dumps(replies(f"slot {slot}")) for slot in range(6)}) == 6


class TestConversation:
    def test_turns_and_their_images_are_found_again(self) -> None:
        pad = "<|vision_start|><|image_pad|><|vision_end|>"
        prompt = (
            "<|im_start|>system\nBe good.<|im_end|>\n"
            f"<|im_start|>user\nOne {pad} two {pad}<|im_end|>\n"
            "<|im_start|>assistant\nFine.<|im_end|>\n"
            f"<|im_start|>user\nStep 2: {pad}<|im_end|>\n"
            "<|im_start|>assistant\nI beg"
        )
        read = read_conversation(prompt, [b"a", b"b", b"c"])
        assert read.turns == (
            Turn(role="system", text="Be good."),
            Turn(role="user", text="One  two ", images=(b"a", b"b")),
            Turn(role="assistant", text="Fine."),
            Turn(role="user", text="Step 2: ", images=(b"c",)),
        )
        assert (read.begun_reply, read.last_image, read.replies) == ("I beg", b"c", ("Fine.",))

    @given(st.text(), st.lists(st.binary(max_size=4), max_size=3))
    def test_any_text_can_be_read(self, text: str, images: list[bytes]) -> None:
        read = read_conversation(text, images)
        assert sum(len(turn.images) for turn in read.turns) <= len(images)
        assert reply_to(read, skill=0.5, rng=SessionRng(0, "")) != "" or is_phone_task(read)


class TestSums:
    @pytest.mark.parametrize(
        ("text", "answer"),
        [
            ("What is 17 * 23?", "391"),
            ("What is 49 + (998) + (-93)?", "954"),
            ("Solve x + 5 = 12", "7"),
            ("Solve 2(y + 1) = 11 for y.", "9/2"),
            ("Compute $\\frac{1}{2} + \\frac{1}{3}$.", "5/6"),
            ("What is the larger solution of x^2 + (-7)x + (10) = 0?", "5"),
            ("What is the smaller solution of x^2 + (-7)x + (10) = 0?", "2"),
            ("Add the fractions 7/2 and 2. Put your final answer within \\boxed{}.", "11/2"),
            ("What is 1,234 - 34?", "1200"),
            ("What is 2^10?", "1024"),
        ],
    )
    def test_what_it_can_work_out(self, text: str, answer: str) -> None:
        question = read_question(text)
        assert question is not None
        assert solve(question) == Fraction(answer)

    def test_the_whole_demo_set_is_answered_right_with_full_skill(self) -> None:
        for line in DEMO_MATH.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            reply = reply_to(question_of(record["prompt"][0]["content"]), **PERFECT)
            assert boxed(reply) == Fraction(record["label"]), reply


def question_of(text: str) -> Conversation:
    return Conversation(turns=(Turn(role="user", text=text),))


def boxed(reply: str) -> Fraction:
    inside = reply.split("\\boxed{", 1)[1]
    fraction = re.match(r"(-?)\\frac\{(\d+)\}\{(\d+)\}", inside)
    return Fraction("{}{}/{}".format(*fraction.groups())) if fraction else Fraction(inside.split("}")[0])
