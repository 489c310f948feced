"""Parses a rendered prompt back into a conversation, so that a policy knows only what a model would see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

START_OF_TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"
IMAGE_PAD = "<|image_pad|>"
_VISION_MARKUP = ("<|vision_start|>", "<|vision_end|>", IMAGE_PAD)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One message: its text without image markup, and its images in order."""

    role: str
    text: str
    images: tuple[bytes, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Finished turns in order. ``begun_reply`` is the part of an aborted reply that is to be continued, else empty."""

    turns: tuple[Turn, ...]
    begun_reply: str = ""

    @property
    def user_turns(self) -> tuple[Turn, ...]:
        """The messages of the user, which include those of the environment."""
        return tuple(turn for turn in self.turns if turn.role == "user")

    @property
    def replies(self) -> tuple[str, ...]:
        """The assistant's earlier replies."""
        return tuple(turn.text for turn in self.turns if turn.role == "assistant")

    @property
    def last_image(self) -> bytes | None:
        """The newest image, None without one."""
        return next((turn.images[-1] for turn in reversed(self.turns) if turn.images), None)


def read_conversation(prompt: str, images: Sequence[bytes]) -> Conversation:
    """Parses a rendered ChatML prompt; other text counts as one user turn.

    Each image goes to the turn that holds its placeholder; surplus placeholders get no image.
    """
    if START_OF_TURN not in prompt:
        return Conversation(turns=(_turn("user", prompt, list(images)),))
    remaining = list(images)
    turns: list[Turn] = []
    begun_reply = ""
    for block in prompt.split(START_OF_TURN)[1:]:
        role, _, content = block.partition("\n")
        text, closed, _ = content.partition(END_OF_TURN)
        if closed or role != "assistant":
            turns.append(_turn(role, text, remaining))
        else:
            begun_reply = text
    return Conversation(turns=tuple(turns), begun_reply=begun_reply)


def _turn(role: str, text: str, remaining: list[bytes]) -> Turn:
    """Returns one turn; removes its images from the front of ``remaining``."""
    count = min(text.count(IMAGE_PAD), len(remaining))
    taken, remaining[:] = tuple(remaining[:count]), remaining[count:]
    for markup in _VISION_MARKUP:
        text = text.replace(markup, "")
    return Turn(role=role, text=text, images=taken)
