"""Plays the simulated phone from what a model would see: the task, the screenshots, its own earlier replies."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from rollout_buffer_lab.scripted_engine.conversation import Conversation
from rollout_buffer_lab.scripted_engine.phone_policy.error_model import Mistakes, Slip, call_text
from rollout_buffer_lab.scripted_engine.phone_policy.goals import scripts_for
from rollout_buffer_lab.scripted_engine.phone_policy.moves import Move, give_up, terminate
from rollout_buffer_lab.scripted_engine.phone_policy.policy_observation import (
    PolicyObservation,
    read_goal,
    read_observation,
    step_number,
)
from rollout_buffer_lab.scripted_engine.phone_policy.task_script import TaskScript, is_believed_done
from rollout_buffer_lab.scripted_engine.rng import SessionRng

_LOOKS = ("I look at the screen first.", "Let me see what the screen shows.", "This is the screen I have now.")
_CHECKS = (
    "I have compared this with the task and with what I did before.",
    "Nothing on the screen speaks against it, and it brings me nearer to what the user wants.",
    "After that I will look at the next screenshot to see whether it worked.",
)


def is_phone_task(conversation: Conversation) -> bool:
    """Returns True if the conversation shows a phone and asks for something to be done on it."""
    return conversation.last_image is not None and read_goal(conversation) is not None


def play_phone(conversation: Conversation, *, skill: float, rng: SessionRng) -> str:
    """Returns the reply to the latest screenshot: thinking, one ``mobile_use`` call, conclusion."""
    goal, step = read_goal(conversation) or "", step_number(conversation)
    scripts = scripts_for(goal)
    if scripts is None:
        return _reply(give_up(f'I am a stand-in and know no way to do this: "{goal}".'), None, rng.about("words", step))
    mistakes = Mistakes.drawn(goal, scripts, skill=skill, rng=rng)
    slip = mistakes.slip(step)
    move = _move(conversation, scripts, step, mistakes)
    if slip in (Slip.STRAY_TAP, Slip.WAITS, Slip.UNKNOWN_ACTION):
        move = mistakes.slipped(slip, step)
    return _reply(move, slip, rng.about("words", step))


def _move(conversation: Conversation, scripts: Sequence[TaskScript], step: int, mistakes: Mistakes) -> Move:
    try:
        observation = read_observation(conversation)
    except ValueError as error:
        return give_up(f"I cannot read the screenshot: {error}.")
    return mistakes.ending(step) or _next_move(observation, scripts, mistakes, step)


def _next_move(observation: PolicyObservation, scripts: Sequence[TaskScript], mistakes: Mistakes, step: int) -> Move:
    done = terminate("All that the user wanted is done.")
    if mistakes.flaw is not None and is_believed_done(observation):
        return done
    moves = (script.next_move(observation) for script in mistakes.misread(scripts))
    move = next((move for move in moves if move is not None), done)
    return mistakes.with_flaw(move, step)


def _reply(move: Move, slip: Slip | None, randomness: Random) -> str:
    thought = [randomness.choice(_LOOKS), move.thought, *randomness.sample(_CHECKS, randomness.randint(0, 2))]
    conclusion = "I say what I think, and do nothing." if slip in (Slip.NO_CALL, Slip.BROKEN_CALL) else move.conclusion
    return (
        f"<thinking>\n{' '.join(thought)}\n</thinking>\n"
        f"{call_text(move, slip)}"
        f"<conclusion>\n{conclusion}\n</conclusion>"
    )
