"""Settings of a job's context-editing episodes, validated before the job starts.

A payload holds them under ``statelm``; settings of StateLM's description (``STATELM_NAMES``) are also accepted at
the payload's top level.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.serve_settings import validation_messages

SECTION = "statelm"
STATELM_NAMES = ("statelm_enabled", "max_model_length", "context_length_penalty", "train_before_deletion")
NESTED_PATH = ("actor_rollout_ref", "rollout", "multi_turn")
"""Names of the nested sections that hold these settings in a config in the layout of StateLM's description."""
LOWEST_PENALTY = -10.0


class ContextEditingSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    statelm_enabled: bool = True
    """False is a plain tool loop: no ``deleteContext``, no snapshots."""
    max_model_length: int = Field(default=8192, ge=1)
    """An episode ends before a turn whose prompt plus ``response_length`` would exceed this, in tokens."""
    context_length_penalty: float = Field(default=-1.0, ge=LOWEST_PENALTY, le=0)
    """The reward of an episode that ``max_model_length`` ended."""
    response_length: int | None = Field(default=None, ge=1)
    """Reserved length and token limit of a turn. None uses the job's limit of one generation."""
    train_before_deletion: bool = False
    """False, StateLM's own rule, trains only turns after the last deletion; True trains every turn once."""
    message_ids: Literal["conversation", "turns"] = "conversation"
    """The message with id 0: the first of the conversation, or, as in StateLM's description, the first turn."""
    max_turns: int = Field(default=100, ge=1)
    """Maximum number of turns; an episode that needs more gets 0."""
    max_calls_per_turn: int = Field(default=8, ge=1)
    """Maximum number of executed tool calls per turn; one error answers all further ones."""
    chunk_words: int = Field(default=300, ge=20, le=5000)
    """Default number of words of a chunk in ``buildIndex``."""
    max_result_tokens: int = Field(default=2048, ge=64)
    """Approximate maximum length of a tool result; only ``loadDocument`` may fill the remaining context."""
    partial_credit: float = Field(default=0.5, ge=0, le=1)
    """Score of an answer that holds the right one among other words."""
    system_prompt: str | None = None
    """System message for conversations without one. None uses the shipped text; an empty text adds none."""
    ban_vision_tokens: bool = True
    """Forbids sampling of tokens that only a template may write."""


OPTION_SECTIONS = {
    SECTION: tuple(ContextEditingSettings.model_fields),
    # Each section of NESTED_PATH may hold the settings themselves, and the next section.
    **{".".join(NESTED_PATH[:depth]): (*STATELM_NAMES, *NESTED_PATH[1:]) for depth in (1, 2, 3)},
}
"""The sections of a payload whose misspelt keys are refused at a job's start."""


def load_settings(options: Mapping[str, Any]) -> ContextEditingSettings:
    """Returns the settings in a job's options: the section overrides the top level, which overrides nested sections.

    Raises:
        ConfigError: names the key that is unknown or out of range.
    """
    section = options.get(SECTION) or {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"{SECTION} in the payload must be an object of settings")
    top_level = {name: options[name] for name in STATELM_NAMES if name in options}
    try:
        return ContextEditingSettings.model_validate({**_nested(options), **top_level, **section})
    except ValidationError as error:
        raise ConfigError("; ".join(f"{SECTION}.{sentence}" for sentence in validation_messages(error))) from error


def _nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings in a config in the layout of StateLM's description; an inner section overrides outer ones.

    Such a config also holds keys of other programs, which are ignored; a start with a misspelt key is refused by
    ``OPTION_SECTIONS``.
    """
    settings: dict[str, Any] = {}
    section: Any = options
    for name in NESTED_PATH:
        section = section.get(name)
        if not isinstance(section, Mapping):
            return settings
        settings |= {key: section[key] for key in STATELM_NAMES if key in section}
    return settings
