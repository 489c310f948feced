"""The generator of context-editing episodes: settings, tokenizer, tools and documents."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.errors import GeneratorError
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.generator.context_editing.calls import CallReader, read_calls
from slime_plugins.rollout_buffer.generator.context_editing.document import DocumentCache, require_search_library
from slime_plugins.rollout_buffer.generator.context_editing.episode import ContextEditingEpisode, EpisodeSetup
from slime_plugins.rollout_buffer.generator.context_editing.history import History, MarkerBreaker, ToolResult, stub_of
from slime_plugins.rollout_buffer.generator.context_editing.instructions import with_instructions, with_tools_in_text
from slime_plugins.rollout_buffer.generator.context_editing.settings import load_settings
from slime_plugins.rollout_buffer.generator.context_editing.task import read_task
from slime_plugins.rollout_buffer.generator.context_editing.tool_specs import ToolName, schemas, tools_for
from slime_plugins.rollout_buffer.types import EpisodeRequest, Message, Trajectory

logger = logging.getLogger(__name__)


class ContextEditingGenerator:
    """Plays questions over long documents. ``read_calls`` parses the tool calls of a sampled turn."""

    def __init__(self, read_calls: CallReader = read_calls) -> None:
        self._read_calls = read_calls
        self._documents = DocumentCache()
        self._setup: EpisodeSetup | None = None

    async def start(self, context: GeneratorContext) -> None:
        """Reads the settings, loads the search library and tests the chat template with results and stubs.

        Raises:
            ConfigError: a setting is invalid, the search library is missing, or the tokenizer's chat template does not
                take tool results.
        """
        settings = load_settings(context.options)
        await asyncio.to_thread(require_search_library)
        chat = ChatTokens(context.tokenizer, context.options.get("apply_chat_template_kwargs"))
        tools = schemas(tools_for(editing=settings.statelm_enabled))
        self._setup = EpisodeSetup(
            engine=context.engine,
            chat=chat,
            settings=settings,
            tools=tools,
            tools_in_template=_template_writes_tools(chat, tools),
            break_markers=MarkerBreaker(context.tokenizer.get_added_vocab()),
            read_calls=self._read_calls,
        )
        _try_results_and_stubs(chat)
        if not self._setup.tools_in_template:
            logger.warning("the chat template has no tools section: the system message describes the tools")
        logger.info("statelm is ready with %s", settings.model_dump_json(exclude_defaults=True))

    async def play(self, episode: EpisodeRequest) -> Trajectory:
        """Plays one episode.

        Raises:
            EpisodeError: the engine failed, or the input line is invalid.
        """
        if self._setup is None:
            raise GeneratorError("the statelm generator was not started")
        task = read_task(episode.instance)
        return await ContextEditingEpisode(
            request=episode,
            task=task,
            prompt=self._prompt(task.prompt, self._setup),
            document=self._documents.document(task.document),
            setup=self._setup,
        ).play()

    async def close(self) -> None:
        self._documents = DocumentCache()

    def _prompt(self, prompt: Sequence[Message], setup: EpisodeSetup) -> list[Message]:
        settings = setup.settings
        instructed = with_instructions(prompt, settings.system_prompt, editing=settings.statelm_enabled)
        return instructed if setup.tools_in_template else with_tools_in_text(instructed, setup.tools)


def _template_writes_tools(chat: ChatTokens, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Returns True if the chat template has a section for tools."""
    question: list[Message] = [{"role": "system", "content": "text"}, {"role": "user", "content": "text"}]
    return chat.prompt(question, tools) != chat.prompt(question)


def _try_results_and_stubs(chat: ChatTokens) -> None:
    """Renders tool results and stubs once, so that a template that refuses them fails before the first episode."""
    history = History([{"role": "user", "content": "question"}])
    call_id = history.add_assistant("call")
    history.add_result(ToolName.READ_CHUNK, ToolResult(message="text"), invoked_by=call_id)
    results = [message for message in history.messages if message["role"] == "tool"]
    chat.bridge_over(results * 2, turn_is_closed=True)
    chat.bridge_over(
        [stub_of(message) for message in [*results, history.messages[call_id], *results]], turn_is_closed=True
    )
