"""What a job may say about its context-editing episodes, validated before anything starts.

A payload says it under ``statelm``; the names that a launcher's config has always used (``SEED_NAMES``) are also taken
from the payload's top level.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.serve_settings import validation_messages

SECTION = "statelm"
SEED_NAMES = ("statelm_enabled", "max_model_length", "context_length_penalty", "train_before_deletion")
NESTED_PATH = ("actor_rollout_ref", "rollout", "multi_turn")
"""Where the same names stand in a config in the layout of StateLM's description."""
LOWEST_PENALTY = -10.0


class ContextEditingSettings(BaseModel):
    """The settings of one job."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    statelm_enabled: bool = True
    """False is a plain tool loop: no ``deleteContext``, no snapshots."""
    max_model_length: int = Field(default=8192, ge=1)
    """An episode ends before a turn whose prompt plus ``response_length`` would be longer, in tokens."""
    context_length_penalty: float = Field(default=-1.0, ge=LOWEST_PENALTY, le=0)
    """The reward of an episode that ended that way."""
    response_length: int | None = Field(default=None, ge=1)
    """Room that every turn needs, and its cap. None takes the job's own cap of one generation."""
    train_before_deletion: bool = False
    """False, StateLM's own rule, trains only what was sampled after the last deletion; true trains every turn once."""
    message_ids: Literal["conversation", "turns"] = "conversation"
    """What message 0 is: the first of the conversation, or, as StateLM's own description counts, the first turn."""
    max_turns: int = Field(default=100, ge=1)
    """Turns of an episode; one that needs more earns 0."""
    max_calls_per_turn: int = Field(default=8, ge=1)
    """Tool calls of one turn that are carried out; the rest are answered with an error."""
    chunk_words: int = Field(default=300, ge=20, le=5000)
    """Words of a chunk when ``buildIndex`` is not told otherwise."""
    max_result_tokens: int = Field(default=2048, ge=64)
    """A tool result is cut to about this; ``loadDocument`` alone may fill what room is left."""
    partial_credit: float = Field(default=0.5, ge=0, le=1)
    """What an answer earns that says the right thing among others."""
    system_prompt: str | None = None
    """Begins a conversation that has no system message. None takes the shipped text; an empty one writes none."""
    ban_vision_tokens: bool = True
    """Forbids at sampling the tokens that only a template may write."""


def _nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a config in the layout of StateLM's description says: in sections, the last one ``multi_turn``."""
    found: dict[str, Any] = {}
    section: Any = options
    for name in NESTED_PATH:
        section = section.get(name)
        if not isinstance(section, Mapping):
            return found
        found |= {key: section[key] for key in SEED_NAMES if key in section}
    return found


def load_settings(options: Mapping[str, Any]) -> ContextEditingSettings:
    """Returns the settings that a job's options give.

    Raises:
        ConfigError: names the key that is unknown or out of range.
    """
    section = options.get(SECTION) or {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"{SECTION} in the payload must be an object of settings")
    at_top = {name: options[name] for name in SEED_NAMES if name in options}
    try:
        return ContextEditingSettings.model_validate({**_nested(options), **at_top, **section})
    except ValidationError as error:
        raise ConfigError("; ".join(f"{SECTION}.{sentence}" for sentence in validation_messages(error))) from error
