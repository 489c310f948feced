"""The mistakes of a policy without full skill: some episodes have a fatal flaw, and some turns a slip."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import Any, Final, cast

from rollout_buffer_lab.scripted_engine.phone_policy.moves import Move, give_up, tap, terminate
from rollout_buffer_lab.scripted_engine.phone_policy.task_script import TaskScript
from rollout_buffer_lab.scripted_engine.rng import SessionRng

SLIPS_PER_TURN: Final = 0.25  # at skill 0; it falls linearly to 0 at skill 1
STATUS_BAR_Y: Final = (6, 26)  # where a tap does nothing


class Flaw(StrEnum):
    """A mistake that makes an episode fail."""

    GIVES_UP = "gives_up"  # ends it as failed after a turn or two
    STOPS_EARLY = "stops_early"  # believes it done after a turn or two
    MISSES = "misses"  # taps next to a necessary target, and does not notice
    MISREADS = "misreads"  # swaps two letters of a text it was given


class Slip(StrEnum):
    """A mistake that costs one turn."""

    STRAY_TAP = "stray_tap"
    WAITS = "waits"
    NO_CALL = "no_call"  # talks and calls no tool
    BROKEN_CALL = "broken_call"  # the call is cut off in the middle
    UNKNOWN_ACTION = "unknown_action"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistakes:
    """The mistakes of one episode; each turn draws them again from the episode's rng, with the same result."""

    flaw: Flaw | None
    flaw_step: int
    slip_share: float
    rng: SessionRng

    @classmethod
    def drawn(cls, goal: str, scripts: Sequence[TaskScript], *, skill: float, rng: SessionRng) -> Mistakes:
        """Draws the mistakes: every episode has a flaw at skill 0; none has a flaw or a slip at skill 1."""
        randomness = rng.about("flaw", goal)
        flawed = randomness.random() >= skill
        flaw = randomness.choice(list(Flaw)) if flawed else None
        if flaw is Flaw.MISREADS and not any(_given_words(script) for script in scripts):
            flaw = Flaw.MISSES
        return cls(
            flaw=flaw, flaw_step=randomness.choice((1, 2, 2, 3)), slip_share=SLIPS_PER_TURN * (1 - skill), rng=rng
        )

    def misread(self, scripts: Sequence[TaskScript]) -> Sequence[TaskScript]:
        """Returns the scripts as the policy understood them: with one word misspelt if the flaw is MISREADS."""
        if self.flaw is not Flaw.MISREADS:
            return scripts
        return [_misread(script, self.rng.about("misread", type(script).__name__)) for script in scripts]

    def ending(self, step: int) -> Move | None:
        """Returns the move that ends an episode early, as failed or as done; None if the episode continues."""
        if step < self.flaw_step:
            return None
        if self.flaw is Flaw.GIVES_UP:
            return give_up("I do not see how to go on. I give the task up.")
        if self.flaw is Flaw.STOPS_EARLY:
            return terminate("I think that everything is done already.")
        return None

    def with_flaw(self, move: Move, step: int) -> Move:
        """Returns the move; with a flaw, a decisive one is replaced by a move that misses its target."""
        if self.flaw is None or self.flaw is Flaw.MISREADS or not move.decisive:
            return move
        if move.arguments["action"] == "answer":
            return replace(move, arguments={"action": "answer", "text": "I am not sure"})
        return replace(move, arguments={"action": "click", "coordinate": list(self._idle_point(step))})

    def slip(self, step: int) -> Slip | None:
        """Returns the slip of this turn's reply; None if it has none."""
        randomness = self.rng.about("slip", step)
        return randomness.choice(list(Slip)) if randomness.random() < self.slip_share else None

    def slipped(self, slip: Slip, step: int) -> Move:
        """Returns the harmless move that takes the place of the right one."""
        if slip is Slip.WAITS:
            arguments: dict[str, Any] = {"action": "wait", "time": 2}
            return Move(arguments=arguments, thought="The screen may still change. I wait.", conclusion="Waited.")
        if slip is Slip.UNKNOWN_ACTION:
            arguments = {"action": "press_and_hope"}
            return Move(arguments=arguments, thought="I try something else.", conclusion="Tried something else.")
        return tap(self._idle_point(step), "I tap here to go on.", "Tapped the screen, and nothing has changed.")

    def _idle_point(self, step: int) -> tuple[int, int]:
        randomness = self.rng.about("beside", step)
        return randomness.randint(150, 850), randomness.randint(*STATUS_BAR_Y)


def call_text(move: Move, slip: Slip | None) -> str:
    """Returns the tool call of a reply; with some slips it is missing or cut off."""
    call = json.dumps({"name": "mobile_use", "arguments": dict(move.arguments)}, ensure_ascii=False)
    if slip is Slip.NO_CALL:
        return ""
    if slip is Slip.BROKEN_CALL:
        return f"<tool_call>\n{call[: len(call) * 2 // 3]}\n</tool_call>\n"
    return f"<tool_call>\n{call}\n</tool_call>\n"


def _given_words(script: TaskScript) -> list[str]:
    """Returns the names of the script's fields that hold words to misread."""
    return [name for name in script.words if len(getattr(script, name)) > 1]


def _misread(script: TaskScript, randomness: Random) -> TaskScript:
    """Returns the script with one of its words misspelt, or unchanged if it has none."""
    names = _given_words(script)
    if not names:
        return script
    name = randomness.choice(names)
    misspelt = {name: _swapped(getattr(script, name), randomness)}
    return cast("TaskScript", replace(cast("Any", script), **misspelt))


def _swapped(text: str, randomness: Random) -> str:
    """Returns ``text`` with two different neighbouring letters swapped; without such letters the last one twice."""
    swappable = [
        index
        for index in range(len(text) - 1)
        if text[index].isalnum() and text[index + 1].isalnum() and text[index].casefold() != text[index + 1].casefold()
    ]
    if not swappable:
        return f"{text}{text[-1]}"
    index = randomness.choice(swappable)
    return text[:index] + text[index + 1] + text[index] + text[index + 2 :]
