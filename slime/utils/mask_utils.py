"""From messages or generations to training rows. Pure: imports nothing of this project; the tokenizer is passed in.

Two ways, in this order:

1. ``pack_training_rows`` keeps the token ids that the engine really sampled and trains exactly those.
2. ``MultiTurnLossMaskGenerator`` rebuilds ids and mask from OpenAI messages with the tokenizer's own chat template, for
   conversations that come without generations. Where it cannot know, it trains nothing and says so.

``report_drift`` says what the second would have done to a trajectory of the first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from slime.utils.mask_rows import (
    Generation,
    TrainingRow,
    WeightVersionSpan,
    expand_image_tokens,
    get_response_lengths,
    pack_training_rows,
)
from slime.utils.mask_template import ChatTemplate, Dialect, RenderedTurn, Rendering, discover_dialect
from slime.utils.mask_tokens import Chunk, ChunkTokenizer, added_token_texts

__all__ = [
    "Generation",
    "MaskedConversation",
    "MaskedTurn",
    "MultiTurnLossMaskGenerator",
    "TrainingRow",
    "UndecidedToken",
    "WeightVersionSpan",
    "expand_image_tokens",
    "get_response_lengths",
    "pack_training_rows",
    "register_loss_mask_type",
]

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
IdsAndMask = tuple[list[int], list[int]]
MaskMethod = Callable[["MultiTurnLossMaskGenerator", Sequence[Message], Sequence[Any] | None], IdsAndMask]

_registered: dict[str, MaskMethod] = {}


def register_loss_mask_type(name: str, method: MaskMethod) -> None:
    """Makes ``tokenizer_type=name`` known: ``method(generator, messages, tools)`` gives ``(token_ids, loss_mask)``.

    The method may call ``generator.mask_conversation`` and change what it gives. A subclass that overrides
    ``get_loss_mask``, or has a method ``gen_multi_turn_loss_mask_<name>``, needs no registration.

    Raises:
        ValueError: the name is taken.
    """
    if name in _registered or hasattr(MultiTurnLossMaskGenerator, f"gen_multi_turn_loss_mask_{name}"):
        raise ValueError(f"the loss mask type {name!r} exists already")

    _registered[name] = method


@dataclass(frozen=True, slots=True)
class MaskedTurn:
    """Tokens ``start`` to ``end`` (exclusive) are what was sampled as message ``message_index``, end-of-turn included.

    ``trained`` is false when the message says ``step_loss_mask: 0``.
    """

    message_index: int
    start: int
    end: int
    trained: bool


@dataclass(frozen=True, slots=True)
class UndecidedToken:
    """A token of an assistant turn that is masked 0 because nobody can know, and why.

    ``position`` is its place in ``token_ids``, or None when the reason concerns the whole message (or, with
    ``message_index`` None, the whole conversation).
    """

    reason: str
    message_index: int | None = None
    position: int | None = None


@dataclass(frozen=True, slots=True)
class MaskedConversation:
    """A conversation rebuilt from its messages: ids, mask, where each turn stands, and what could not be decided."""

    token_ids: list[int]
    loss_mask: list[int]
    turns: tuple[MaskedTurn, ...] = ()
    undecided: tuple[UndecidedToken, ...] = ()


class MultiTurnLossMaskGenerator:
    """Rebuilds token ids and loss mask of conversations from their messages and the tokenizer's chat template.

    ``token_ids`` equal the tokenizer's own render of the whole conversation. The mask is 1 on what a model samples (the
    assistant's body and its end-of-turn token) and 0 on everything else, generation prompts included. Which text that
    is, the template says; ``tokenizer_type`` names the family a trainer expects (``qwen``, ``qwen3``, ``qwen3_5``,
    ``distill_qwen``, or a type of your own) and never overrides the template.

    ``chat_template_kwargs`` go to every render. ``max_cache_bytes`` bounds what is remembered between calls.

    Raises:
        ValueError: the type is unknown.
    """

    def __init__(
        self,
        tokenizer: Any,
        tokenizer_type: str = "qwen",
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_cache_bytes: int = 128 * 1024 * 1024,
    ) -> None:
        self.tokenizer = tokenizer
        self.tokenizer_type = tokenizer_type
        self._template = ChatTemplate(tokenizer, chat_template_kwargs)
        self._max_cache_bytes = max_cache_bytes
        self._undecided_was_told = False
        if type(self).get_loss_mask is MultiTurnLossMaskGenerator.get_loss_mask:
            self._method()

    def get_loss_mask(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> IdsAndMask:
        """Gives ``(token_ids, loss_mask)``, two lists of one length, the mask of zeros and ones.

        ``step_loss_mask`` other than 1 on a message switches its turn off and changes no ids. What cannot be decided is
        0; ``mask_conversation`` tells what and why. Messages are not changed.
        """
        return self._method()(messages, tools)

    def get_loss_masks(
        self, conversations: Sequence[Sequence[Message]], tools: Sequence[Sequence[Any] | None] | None = None
    ) -> list[IdsAndMask]:
        """Does many conversations at once, their tokenising spread over all cores. ``tools`` has one entry for each."""
        if (
            type(self).get_loss_mask is not MultiTurnLossMaskGenerator.get_loss_mask
            or self.tokenizer_type in _registered
        ):
            each = tools if tools is not None else [None] * len(conversations)
            return [self.get_loss_mask(messages, own) for messages, own in zip(conversations, each, strict=True)]

        return [(one.token_ids, one.loss_mask) for one in self.mask_conversations(conversations, tools)]

    def mask_conversation(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> MaskedConversation:
        """Gives ids and mask together with the turns and everything that could not be decided."""
        return self.mask_conversations([messages], [tools])[0]

    def mask_conversations(
        self, conversations: Sequence[Sequence[Message]], tools: Sequence[Sequence[Any] | None] | None = None
    ) -> list[MaskedConversation]:
        """Does the same for many conversations, tokenising what is new in parallel batches."""
        each = tools if tools is not None else [None] * len(conversations)
        masked: list[MaskedConversation] = []
        for start in range(0, len(conversations), _BATCH):
            pairs = zip(conversations[start : start + _BATCH], each[start : start + _BATCH], strict=True)
            renderings = [self._template.render(self._dialect, messages, own) for messages, own in pairs]
            chunks = self._chunks.chunks([rendering.text for rendering in renderings])
            masked += [self._assemble(rendering, own) for rendering, own in zip(renderings, chunks, strict=True)]
        return masked

    def get_response_lengths(self, loss_masks: Sequence[Sequence[int]]) -> list[int]:
        """Counts, for each mask, the tokens from the first trained one to the end."""
        return get_response_lengths(loss_masks)

    def get_text_from_loss_mask(self, token_ids: Sequence[int], loss_masks: Sequence[int]) -> list[str]:
        """Decodes each unbroken stretch of trained tokens."""
        texts = []
        for start, end in _trained_stretches(loss_masks):
            texts.append(self.tokenizer.decode(list(token_ids[start:end])))
        return texts

    def gen_multi_turn_loss_mask_qwen(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> IdsAndMask:
        """Rebuilds a conversation of the Qwen2.5 family."""
        return self._rebuild(messages, tools)

    def gen_multi_turn_loss_mask_qwen3(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> IdsAndMask:
        """Rebuilds a conversation of the Qwen3 family."""
        return self._rebuild(messages, tools)

    def gen_multi_turn_loss_mask_qwen3_5(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> IdsAndMask:
        """Rebuilds a conversation of the Qwen3.5 family."""
        return self._rebuild(messages, tools)

    def gen_multi_turn_loss_mask_distill_qwen(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> IdsAndMask:
        """Rebuilds a conversation of the DeepSeek-R1 distillations of Qwen.

        Their template drops everything up to ``</think>`` from every assistant message, the last one too: reasoning
        given in a message is in neither ids nor mask. Only generations can train it.
        """
        return self._rebuild(messages, tools)

    @cached_property
    def _added_tokens(self) -> list[str]:
        return added_token_texts(self.tokenizer)

    @cached_property
    def _dialect(self) -> Dialect:
        return discover_dialect(self._template, self._added_tokens)

    @cached_property
    def _chunks(self) -> ChunkTokenizer:
        dialect = self._dialect
        return ChunkTokenizer(self.tokenizer, dialect.chunk_markers, dialect.end_marker, self._max_cache_bytes)

    def _method(self) -> Callable[[Sequence[Message], Sequence[Any] | None], IdsAndMask]:
        own: Any = getattr(self, f"gen_multi_turn_loss_mask_{self.tokenizer_type}", None)
        if own is not None:
            return own  # type: ignore[no-any-return]  # found by name: a built-in type, or a subclass's own

        if self.tokenizer_type in _registered:
            registered = _registered[self.tokenizer_type]
            return lambda messages, tools: registered(self, messages, tools)

        raise ValueError(
            f"Unsupported tokenizer type: {self.tokenizer_type!r}; known are qwen, qwen3, qwen3_5, distill_qwen"
            + "".join(f", {name}" for name in sorted(_registered))
        )

    def _rebuild(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> IdsAndMask:
        masked = self.mask_conversation(messages, tools)
        return masked.token_ids, masked.loss_mask

    def _assemble(self, rendering: Rendering, chunks: Sequence[Chunk]) -> MaskedConversation:
        token_ids: list[int] = []
        for chunk in chunks:
            token_ids.extend(chunk.ids)
        undecided: list[UndecidedToken] = []
        if rendering.problem is not None:
            undecided.append(UndecidedToken(rendering.problem))
        turns = [
            self._turn(rendering, turn, pieces, undecided) for turn, pieces in _pieces_of_turns(rendering.turns, chunks)
        ]
        loss_mask = [0] * len(token_ids)
        for turn in turns:
            if turn.trained:
                loss_mask[turn.start : turn.end] = [1] * (turn.end - turn.start)
        return MaskedConversation(token_ids, loss_mask, tuple(turns), tuple(undecided))

    def _turn(
        self,
        rendering: Rendering,
        turn: RenderedTurn,
        pieces: _Pieces,
        undecided: list[UndecidedToken],
    ) -> MaskedTurn:
        """Turns the characters of one turn into tokens."""
        before_start, start = self._chunks.boundary(pieces.first, turn.start - pieces.first_character)
        end, after_end = self._chunks.boundary(pieces.last, turn.end - pieces.last_character)
        shared = [
            *range(pieces.first_token + before_start, pieces.first_token + start),
            *range(pieces.last_token + end, pieces.last_token + after_end),
        ]
        undecided += [
            UndecidedToken("a token holds sampled text and text that was not", turn.message_index, at) for at in shared
        ]
        message = rendering.messages[turn.message_index]
        first, last = pieces.first_token + start, pieces.last_token + end
        return MaskedTurn(turn.message_index, first, max(first, last), message.get("step_loss_mask", 1) == 1)


_BATCH = 64  # conversations rendered before their chunks are tokenised together


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The chunks in which one turn begins and ends, and where each of them stands in characters and in tokens."""

    first: Chunk
    first_character: int
    first_token: int
    last: Chunk
    last_character: int
    last_token: int


def _pieces_of_turns(turns: Sequence[RenderedTurn], chunks: Sequence[Chunk]) -> Iterable[tuple[RenderedTurn, _Pieces]]:
    """Finds the chunks of each turn. Both are in order, and a turn lies in one chunk unless its text holds a marker."""
    places: list[tuple[Chunk, int, int]] = []
    characters = tokens = 0
    for chunk in chunks:
        places.append((chunk, characters, tokens))
        characters += len(chunk.text)
        tokens += len(chunk.ids)
    at = 0
    for turn in turns:
        while places[at][1] + len(places[at][0].text) <= turn.start:
            at += 1
        first = at
        while places[at][1] + len(places[at][0].text) < turn.end:
            at += 1
        yield turn, _Pieces(*places[first], *places[at])


def _trained_stretches(loss_mask: Sequence[int]) -> Iterable[tuple[int, int]]:
    start: int | None = None
    for at, value in enumerate(loss_mask):
        if value == 1 and start is None:
            start = at
        elif value != 1 and start is not None:
            yield start, at
            start = None
    if start is not None:
        yield start, len(loss_mask)
