"""Rebuilds training rows and masks from messages, with slime's class ``MultiTurnLossMaskGenerator``.

``register_loss_mask_type`` adds a loss mask type. A family of chat templates whose turns cannot be found by one header
and one end marker is a ``Dialect`` of ``mask_template.py``.

Part of ``slime.utils.mask_utils``, which is the name to import from. Standard library only.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from slime.utils.mask_drift import DriftReport, RebuiltTokens, RebuiltTurn, compare_with_rebuilt
from slime.utils.mask_rebuild import ConversationReader
from slime.utils.mask_rows import (
    Generation,
    TrainingRow,
    align_with_expanded,
    common_prefix_length,
    get_response_lengths,
    pack_training_rows,
    response_length_of,
)
from slime.utils.mask_template import (
    ChatTemplate,
    Dialect,
    RenderedTurn,
    Rendering,
    Undecided,
    UndecidedReason,
    VisionTokens,
    discover_dialect,
    discover_vision_tokens,
)
from slime.utils.mask_tokens import Chunk, ChunkTokenizer, added_token_texts

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
IdsAndMask = tuple[list[int], list[int]]
MaskMethod = Callable[["MultiTurnLossMaskGenerator", Sequence[Message], Sequence[Any] | None], IdsAndMask]

DEEPSEEK_MARKER = "<｜Assistant｜>"
"""The token by which slime recognises the tokenizer of a distilled DeepSeek."""
BUILT_IN_TYPES = ("qwen", "qwen3", "qwen3_5", "gemma4", "distill_qwen")
_CONVERSATIONS_PER_BATCH = 64  # they are rendered before their chunks are tokenised together
_registered: dict[str, MaskMethod] = {}


def register_loss_mask_type(name: str, method: MaskMethod) -> None:
    """Registers ``tokenizer_type=name``: ``method(generator, messages, tools)`` returns ``(token_ids, loss_mask)``.

    The method may call ``generator.mask_conversation`` and change its result. A subclass that overrides
    ``get_loss_mask``, or has a method ``gen_multi_turn_loss_mask_<name>`` or ``get_custom_multi_turn_loss_mask``, needs
    no registration.

    Raises:
        ValueError: the name is taken.
    """
    if name in _registered or hasattr(MultiTurnLossMaskGenerator, f"gen_multi_turn_loss_mask_{name}"):
        raise ValueError(f"the loss mask type {name!r} exists already")

    _registered[name] = method


def known_loss_mask_types() -> tuple[str, ...]:
    """Returns the built-in types and the registered ones."""
    return (*BUILT_IN_TYPES, *sorted(_registered))


@dataclass(frozen=True, slots=True)
class MaskedTurn:
    """Tokens ``start`` to ``end`` (exclusive) were sampled as message ``message_index``, including end-of-turn.

    ``trained`` is false if the message has ``step_loss_mask: 0``.
    """

    message_index: int
    start: int
    end: int
    trained: bool


@dataclass(frozen=True, slots=True)
class MaskedConversation:
    """A conversation rebuilt from its messages: ids, mask, turns, and undecided tokens."""

    token_ids: list[int]
    loss_mask: list[int]
    turns: tuple[MaskedTurn, ...] = ()
    undecided: tuple[Undecided, ...] = ()


@dataclass(frozen=True, slots=True)
class RebuiltConversation:
    """Generations rebuilt from messages, the message of each, and undecided tokens."""

    generations: list[Generation]
    message_indices: tuple[int, ...] = ()
    undecided: tuple[Undecided, ...] = ()


@dataclass(frozen=True, slots=True)
class RebuiltRows:
    """Training rows made from messages.

    ``by_turn`` is false if there is a single row, with one mask of the whole conversation, and no ``generations``. This
    row is made for a custom type, or if the rows of all turns would have been too long.
    """

    rows: list[TrainingRow]
    by_turn: bool
    generations: list[Generation] = field(default_factory=list)
    undecided: tuple[Undecided, ...] = ()


class MultiTurnLossMaskGenerator:
    """Rebuilds token ids and loss mask of conversations from their messages and the tokenizer's chat template.

    ``token_ids`` equal the tokenizer's render of the whole conversation. The mask is 1 on the tokens that a model
    samples (the assistant's body and its end-of-turn token) and 0 on all others, including generation prompts. They are
    determined from the template; ``tokenizer_type`` names the family that a trainer expects (``qwen``, ``qwen3``,
    ``qwen3_5``, ``gemma4``, ``distill_qwen``, or a custom type) and never overrides the template.

    ``chat_template_kwargs`` are passed to every render. ``max_cache_bytes`` limits the cache.

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
        self._undecided_was_reported = False
        if type(self).get_loss_mask is MultiTurnLossMaskGenerator.get_loss_mask:
            self._method()

    def get_loss_mask(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> IdsAndMask:
        """Returns ``(token_ids, loss_mask)``, two lists of equal length.

        For a distilled DeepSeek, they include the reasoning of the last message, which its template drops. A message
        with a ``step_loss_mask`` other than 1 is not trained; its ids do not change. Undecided tokens are 0;
        ``mask_conversation`` returns them with the reason. Messages are not changed.
        """
        return self._method()(messages, tools)

    def get_loss_masks(
        self, conversations: Sequence[Sequence[Message]], tools: Sequence[Sequence[Any] | None] | None = None
    ) -> list[IdsAndMask]:
        """Returns the result of ``get_loss_mask`` for each of many conversations, tokenised on all cores.

        ``tools`` has one entry for each conversation.
        """
        tools_of_each = tools if tools is not None else [None] * len(conversations)
        if not self.is_built_in:
            return [self.get_loss_mask(*arguments) for arguments in zip(conversations, tools_of_each, strict=True)]

        results = zip(self.mask_conversations(conversations, tools), conversations, tools_of_each, strict=True)
        return [self._with_last_reasoning_kept(masked, messages, own_tools) for masked, messages, own_tools in results]

    def mask_conversation(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> MaskedConversation:
        """Returns ids and mask with the turns and all undecided tokens."""
        return self.mask_conversations([messages], [tools])[0]

    def mask_conversations(
        self, conversations: Sequence[Sequence[Message]], tools: Sequence[Sequence[Any] | None] | None = None
    ) -> list[MaskedConversation]:
        """Returns the result of ``mask_conversation`` for each of many conversations, tokenised in parallel batches."""
        tools_of_each = tools if tools is not None else [None] * len(conversations)
        pairs = list(zip(conversations, tools_of_each, strict=True))
        masked: list[MaskedConversation] = []
        for start in range(0, len(pairs), _CONVERSATIONS_PER_BATCH):
            batch = pairs[start : start + _CONVERSATIONS_PER_BATCH]
            renderings = [self._template.render(self._dialect, messages, own_tools) for messages, own_tools in batch]
            all_chunks = self._chunks.chunks([rendering.text for rendering in renderings])
            masked += map(self._assemble, renderings, all_chunks)
        return masked

    def get_loss_mask_with_multimodal_alignment(
        self, messages: Sequence[Message], input_ids: Sequence[int], tools: Sequence[Any] | None = None
    ) -> tuple[Sequence[int], list[int]]:
        """Returns ``(input_ids, loss_mask)`` for ids in which a processor expanded the image placeholders.

        ``input_ids`` (a list, or an array or tensor of shape [n] or [1, n]) are returned unchanged. The tokens of each
        image are counted in them.

        Raises:
            ValueError: ``input_ids`` are not this conversation with its images expanded.
        """
        token_ids, loss_mask = self.get_loss_mask(messages, tools)
        expanded = _flat(input_ids)
        return input_ids, align_with_expanded(token_ids, loss_mask, expanded, self._placeholder_ids)

    def rebuild_conversation(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, cut: bool = False
    ) -> RebuiltConversation:
        """Rebuilds the prompt and output of each turn from the messages, without log-probs.

        ``pack_training_rows`` of the generations trains all assistant messages, also if the template drops earlier
        reasoning: one row for each stretch that the template does not change. ``cut``: the last message was truncated,
        so that no end of turn is trained. Text is re-tokenised: this is a fallback for conversations without
        generations.

        Raises:
            ValueError: a turn cannot be located. Errors of the template are not translated.
        """
        turns = self._reader.turns(messages, tools, cut=cut)
        all_chunks = self._chunks.chunks([text for turn in turns for text in (turn.prompt, turn.output)])
        ids = [[token_id for chunk in chunks for token_id in chunk.ids] for chunks in all_chunks]
        generations = [
            Generation(
                prompt_ids=ids[2 * number],
                output_ids=ids[2 * number + 1],
                trained=messages[turn.message_index].get("step_loss_mask", 1) == 1,
            )
            for number, turn in enumerate(turns)
        ]
        undecided = tuple(part for turn in turns for part in turn.undecided)
        self._log_undecided(undecided)
        return RebuiltConversation(generations, tuple(turn.message_index for turn in turns), undecided)

    def rebuild_rows(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        cut: bool = False,
        images_before: Callable[[int], tuple[str, ...]] | None = None,
        max_tokens: int | None = None,
    ) -> RebuiltRows:
        """Returns the training rows of a conversation without generations: ``rebuild_conversation``, packed.

        ``images_before`` returns the images shown before the message of an index. The single row of ``get_loss_mask``
        is returned instead if several rows have more than ``max_tokens`` in total, or if the type is a custom one.
        """
        if not self.is_built_in:
            return RebuiltRows([self._whole_row(messages, tools)], by_turn=False)

        rebuilt = self.rebuild_conversation(messages, tools, cut=cut)
        generations = rebuilt.generations
        if images_before is not None:
            indexed = zip(generations, rebuilt.message_indices, strict=True)
            generations = [replace(generation, images=images_before(index)) for generation, index in indexed]
        rows = pack_training_rows(generations)
        if max_tokens is not None and len(rows) > 1 and sum(len(row.token_ids) for row in rows) > max_tokens:
            return RebuiltRows([self._whole_row(messages, tools)], by_turn=False)

        undecided = list(rebuilt.undecided)
        rows = [self._without_images_trained(row, undecided) for row in rows]
        return RebuiltRows(rows, True, generations, tuple(undecided))

    def report_drift(
        self, messages: Sequence[Message], generations: Sequence[Generation], tools: Sequence[Any] | None = None
    ) -> DriftReport:
        """Compares the sampled tokens with the tokens rebuilt from the messages (re-tokenisation drift).

        The template's text after the last turn is no drift. A difference in the mask alone is drift. So is a trajectory
        that packs into more than one row.
        """
        masked = self._masked_by_type(messages, tools)
        crossing = {part.position for part in masked.undecided if part.reason is UndecidedReason.BOUNDARY}
        turns = [RebuiltTurn(turn.start, turn.end, turn.start - 1 in crossing) for turn in masked.turns]
        rebuilt = RebuiltTokens(
            masked.token_ids, masked.loss_mask, turns, self._added_ids, self._special_ids, self.tokenizer.decode
        )
        return compare_with_rebuilt(generations, pack_training_rows(generations), rebuilt)

    def get_response_lengths(self, loss_masks: Sequence[Sequence[int]]) -> list[int]:
        """Counts, for each mask, the tokens from the first trained one to the end."""
        return get_response_lengths(loss_masks)

    def get_text_from_loss_mask(self, token_ids: Sequence[int], loss_masks: Sequence[int]) -> list[str]:
        """Decodes each stretch of consecutive trained tokens."""
        return [self.tokenizer.decode(list(token_ids[start:end])) for start, end in _trained_stretches(loss_masks)]

    def gen_multi_turn_loss_mask_qwen(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> IdsAndMask:
        """Rebuilds a conversation of any built-in type; slime's class has a method for each.

        The template of DeepSeek-R1's distillations drops everything up to ``</think>`` from assistant messages. The
        reasoning of the last one is kept; that of earlier ones is trained by ``rebuild_rows`` alone.
        """
        masked = self.mask_conversation(messages, tools)
        self._log_undecided(masked.undecided)
        return self._with_last_reasoning_kept(masked, messages, tools)

    gen_multi_turn_loss_mask_qwen3 = gen_multi_turn_loss_mask_qwen
    gen_multi_turn_loss_mask_qwen3_5 = gen_multi_turn_loss_mask_qwen
    gen_multi_turn_loss_mask_gemma4 = gen_multi_turn_loss_mask_qwen
    gen_multi_turn_loss_mask_distill_qwen = gen_multi_turn_loss_mask_qwen

    def find_all_sublist_indices(self, main_list: Sequence[int], sublist: Sequence[int]) -> list[int]:
        """Returns every index at which ``sublist`` begins in ``main_list``. Unused; part of slime's class."""
        wanted, size = list(sublist), len(sublist)
        return [start for start in range(len(main_list) - size + 1) if list(main_list[start : start + size]) == wanted]

    def get_system_message_length(self) -> tuple[int, int]:
        """Returns two numbers of tokens: before the first user message, and of the generation prompt.

        The template's default system prompt and a BOS come before the first user message. Unused; part of slime's
        class.
        """
        user = {"role": "user", "content": "Hello"}
        texts = [
            self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            for messages, prompt in (([user], False), ([user, user], False), ([user, user], True))
        ]
        one, two, two_with_prompt = (len(self.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
        user_message = two - one
        return one - user_message, two_with_prompt - two

    @property
    def cache_bytes(self) -> int:
        """Size of the cache; never more than ``max_cache_bytes``."""
        return self._chunks.cache_bytes

    @cached_property
    def _added_tokens(self) -> list[str]:
        return added_token_texts(self.tokenizer)

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.get_added_vocab().values())

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        flags = getattr(self.tokenizer, "added_tokens_decoder", {})
        special = {token_id for token_id, token in flags.items() if getattr(token, "special", False)}
        end = self.tokenizer.convert_tokens_to_ids([self._dialect.end_marker])
        return frozenset({*special, *self.tokenizer.all_special_ids, *end})

    @cached_property
    def _vision(self) -> VisionTokens:
        return discover_vision_tokens(self._template, self._added_tokens)

    @cached_property
    def image_token_ids(self) -> frozenset[int]:
        """Ids of images and videos in the template; never trained. Empty for a text template."""
        return frozenset(self.tokenizer.convert_tokens_to_ids(sorted(self._vision.written)))

    @cached_property
    def _placeholder_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.convert_tokens_to_ids(sorted(self._vision.placeholders)))

    @cached_property
    def _dialect(self) -> Dialect:
        return discover_dialect(self._template, self._added_tokens)

    @cached_property
    def _reader(self) -> ConversationReader:
        return ConversationReader(self._template, self._dialect)

    @cached_property
    def _chunks(self) -> ChunkTokenizer:
        dialect = self._dialect
        return ChunkTokenizer(
            self.tokenizer, dialect.chunk_markers, dialect.end_marker, self._max_cache_bytes, header=dialect.header
        )

    @property
    def is_built_in(self) -> bool:
        """True for the types of this module; false for custom ones."""
        plain = type(self).get_loss_mask is MultiTurnLossMaskGenerator.get_loss_mask
        name = f"gen_multi_turn_loss_mask_{self.tokenizer_type}"
        method, built_in = getattr(type(self), name, None), getattr(MultiTurnLossMaskGenerator, name, None)
        return plain and method is not None and method is built_in

    def _masked_by_type(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> MaskedConversation:
        """Returns the mask of this type; for a custom type, its stretches of trained tokens count as turns."""
        if self.is_built_in:
            return self.mask_conversation(messages, tools)

        token_ids, loss_mask = call_with_tools(self.get_loss_mask, messages, tools)
        stretches = _trained_stretches(loss_mask)
        turns = [MaskedTurn(index, start, end, True) for index, (start, end) in enumerate(stretches)]
        return MaskedConversation(token_ids, loss_mask, tuple(turns))

    def _method(self) -> Callable[[Sequence[Message], Sequence[Any] | None], IdsAndMask]:
        method: Any = getattr(self, f"gen_multi_turn_loss_mask_{self.tokenizer_type}", None)
        if method is not None:
            return method  # type: ignore[no-any-return]  # found by name: a built-in type, or a subclass's own

        if self.tokenizer_type in _registered:
            registered = _registered[self.tokenizer_type]
            return lambda messages, tools: registered(self, messages, tools)

        custom: Any = getattr(self, "get_custom_multi_turn_loss_mask", None)
        if custom is not None:
            return lambda messages, tools: call_with_tools(custom, messages, tools)

        raise ValueError(
            f"Unsupported tokenizer type: {self.tokenizer_type!r}; known are {', '.join(known_loss_mask_types())}"
        )

    def _with_last_reasoning_kept(
        self, masked: MaskedConversation, messages: Sequence[Message], tools: Sequence[Any] | None
    ) -> IdsAndMask:
        """Returns ids and mask; for a distilled DeepSeek they include the reasoning of the last message.

        Its template drops that reasoning, although the model has sampled it. slime's class trains it, too.
        """
        dropped = Undecided(UndecidedReason.DROPPED_REASONING, len(messages) - 1) in masked.undecided
        if not dropped or DEEPSEEK_MARKER not in self._added_tokens:
            return masked.token_ids, masked.loss_mask

        rebuilt = self.rebuild_conversation(messages, tools)
        last = rebuilt.generations[-1]
        shared = common_prefix_length(masked.token_ids, last.prompt_ids)
        prompt_mask = [*masked.loss_mask[:shared], *[0] * (len(last.prompt_ids) - shared)]
        output_mask = [int(last.trained and token_id not in self.image_token_ids) for token_id in last.output_ids]
        return [*last.prompt_ids, *last.output_ids], [*prompt_mask, *output_mask]

    def _whole_row(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> TrainingRow:
        token_ids, loss_mask = call_with_tools(self.get_loss_mask, messages, tools)
        return TrainingRow(token_ids, loss_mask, None, response_length_of(loss_mask), ())

    def _without_images_trained(self, row: TrainingRow, undecided: list[Undecided]) -> TrainingRow:
        if self.image_token_ids.isdisjoint(row.token_ids):
            return row

        pairs = list(zip(row.token_ids, row.loss_mask, strict=True))
        images = [
            index for index, (token_id, trained) in enumerate(pairs) if trained and token_id in self.image_token_ids
        ]
        undecided += [Undecided(UndecidedReason.IMAGE, position=index) for index in images]
        loss_mask = [0 if token_id in self.image_token_ids else trained for token_id, trained in pairs]
        return replace(row, loss_mask=loss_mask, response_length=response_length_of(loss_mask))

    def _log_undecided(self, undecided: Sequence[Undecided]) -> None:
        for part in undecided:
            # Every turn without thinking has an empty thinking block in its prompt.
            quiet = self._undecided_was_reported or part.reason is UndecidedReason.EMPTY_THINKING
            names = (("message", part.message_index), ("token", part.position))
            place = ", ".join(f"{name} {index}" for name, index in names if index is not None) or "a conversation"
            logger.log(
                logging.DEBUG if quiet else logging.WARNING,
                "%s is not trained: %s (further cases are logged at level DEBUG)",
                place,
                part.detail or part.reason,
            )
            self._undecided_was_reported |= not quiet

    def _assemble(self, rendering: Rendering, chunks: Sequence[Chunk]) -> MaskedConversation:
        token_ids = [token_id for chunk in chunks for token_id in chunk.ids]
        loss_mask = [0] * len(token_ids)
        undecided: list[Undecided] = []
        turns: list[MaskedTurn] = []
        if rendering.problem is not None:
            undecided.append(Undecided(UndecidedReason.TEMPLATE, detail=rendering.problem))
        for rendered, first, last in _places_of_turns(rendering.turns, chunks):
            turn, crossing = self._turn(rendering, rendered, first, last)
            turns.append(turn)
            if turn.trained:
                loss_mask[turn.start : turn.end] = [1] * (turn.end - turn.start)
                undecided += [Undecided(UndecidedReason.BOUNDARY, turn.message_index, index) for index in crossing]
                for index in self._images_in(token_ids, turn):
                    loss_mask[index] = 0
                    undecided.append(Undecided(UndecidedReason.IMAGE, turn.message_index, index))
                undecided += _left_out(rendering, rendered)
        return MaskedConversation(token_ids, loss_mask, tuple(turns), tuple(undecided))

    def _turn(
        self, rendering: Rendering, turn: RenderedTurn, first: _Place, last: _Place
    ) -> tuple[MaskedTurn, list[int]]:
        """Converts the character range of a turn to tokens; also returns the indices of tokens across its boundaries.

        ``first`` and ``last`` are the chunks in which the turn begins and ends.
        """
        before_start, start = self._chunks.boundary(first.chunk, turn.start - first.character)
        end, after_end = self._chunks.boundary(last.chunk, turn.end - last.character)
        at_start = range(first.token + before_start, first.token + start)
        at_end = range(last.token + end, last.token + after_end)
        crossing = list(dict.fromkeys([*at_start, *at_end]))  # one token may cross both
        trained = rendering.messages[turn.message_index].get("step_loss_mask", 1) == 1
        first_token = first.token + start
        # One token may hold the whole turn and more: then no token is the turn's own.
        return MaskedTurn(turn.message_index, first_token, max(first_token, last.token + end), trained), crossing

    def _images_in(self, token_ids: list[int], turn: MaskedTurn) -> list[int]:
        if not self.image_token_ids or self.image_token_ids.isdisjoint(token_ids[turn.start : turn.end]):
            return []

        return [index for index in range(turn.start, turn.end) if token_ids[index] in self.image_token_ids]


class _Place(NamedTuple):
    """A chunk, and the indices of its first character in the text and of its first token in the ids."""

    chunk: Chunk
    character: int
    token: int


def _places_of_turns(
    turns: Sequence[RenderedTurn], chunks: Sequence[Chunk]
) -> Iterable[tuple[RenderedTurn, _Place, _Place]]:
    """Yields each turn with the chunks in which it begins and ends; these differ only if its text contains a marker."""
    ends = list(accumulate([len(chunk.text) for chunk in chunks]))
    tokens = list(accumulate([len(chunk.ids) for chunk in chunks]))

    def place(index: int) -> _Place:
        return _Place(chunks[index], ends[index - 1], tokens[index - 1]) if index else _Place(chunks[0], 0, 0)

    index = 0
    for turn in turns:
        while ends[index] <= turn.start:
            index += 1
        first = place(index)
        while ends[index] < turn.end:
            index += 1
        last = place(index)
        yield turn, first, last


def _left_out(rendering: Rendering, turn: RenderedTurn) -> list[Undecided]:
    """Returns the parts of a message that are not among the trained tokens."""
    if turn.holds_answer_only:
        return [Undecided(UndecidedReason.EMPTY_THINKING, turn.message_index)]

    reasoning = _reasoning_of(rendering.messages[turn.message_index])
    if reasoning and reasoning not in rendering.text[turn.start : turn.end]:
        return [Undecided(UndecidedReason.DROPPED_REASONING, turn.message_index)]

    return []


def _reasoning_of(message: Message) -> str:
    reasoning, content = message.get("reasoning_content"), message.get("content")
    if isinstance(reasoning, str):
        return reasoning.strip()

    if isinstance(content, str) and "</think>" in content:
        return content.split("</think>")[0].split("<think>")[-1].strip()

    return ""


def call_with_tools(method: Any, messages: Sequence[Message], tools: Sequence[Any] | None) -> IdsAndMask:
    """Calls a custom mask method, with tools if it has a second positional parameter, and checks its result.

    Raises:
        ValueError: the result is not ids with a mask.
    """
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    kinds = [parameter.kind for parameter in inspect.signature(method).parameters.values()]
    takes_tools = inspect.Parameter.VAR_POSITIONAL in kinds or any(kind in positional for kind in kinds[1:])
    result = method(messages, tools) if takes_tools else method(messages)
    return checked_ids_and_mask(result)


def checked_ids_and_mask(given: Any) -> IdsAndMask:
    """Returns the result of a mask method as two lists of equal length.

    Raises:
        ValueError: the result is not ids with a mask. "it" in the message is the method.
    """
    try:
        token_ids, loss_mask = (_flat(part) for part in given)
    except (TypeError, ValueError):
        raise ValueError(f"it gave {type(given).__name__}, and must give (token_ids, loss_mask)") from None
    if len(token_ids) != len(loss_mask):
        raise ValueError(f"it gave {len(token_ids)} token ids and a mask of {len(loss_mask)}")
    if not set(loss_mask) <= {0, 1}:
        raise ValueError("it gave a mask of other values than 0 and 1")
    return token_ids, loss_mask


def _flat(ids: Any) -> list[int]:
    """Returns ids of shape [n] or [1, n] as a list."""
    plain = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    return list(plain[0]) if len(plain) == 1 and isinstance(plain[0], (list, tuple)) else plain


def _trained_stretches(loss_mask: Sequence[int]) -> Iterable[tuple[int, int]]:
    start: int | None = None
    for index, value in enumerate(loss_mask):
        if value == 1 and start is None:
            start = index
        elif value != 1 and start is not None:
            yield start, index
            start = None
    if start is not None:
        yield start, len(loss_mask)
