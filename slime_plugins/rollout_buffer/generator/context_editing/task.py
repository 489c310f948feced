"""Reads the task of an input line: its prompt, document and label.

    {"instance_id": "needle_3", "raw_prompt": [{"role": "user", "content": "What is the code of …?"}],
     "document_content": "…", "label": "KX-4471", "extra_info": {…}}

The label is the first of ``label``, ``answer`` and ``ground_truth`` in the line, or else in its ``extra_info``. If the
label is a list, an answer must name all its items; if it is a text, ``aliases``, in the line or in ``extra_info``, are
equally right. Every answer to a line without a label gets 0. The trainer receives ``extra_info`` unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slime_plugins.rollout_buffer.errors import EnvironmentSetupError
from slime_plugins.rollout_buffer.generator.context_editing.rewards import Label, read_label
from slime_plugins.rollout_buffer.types import Instance, Message

_ROLES = frozenset({"system", "user", "assistant"})
_LABEL_NAMES = ("label", "answer", "ground_truth")


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentTask:
    """A question about a document. ``label`` is None if the line has no label."""

    prompt: tuple[Message, ...]
    document: str
    label: Label | None
    extra_info: Mapping[str, Any] = field(default_factory=dict)


def read_task(instance: Instance) -> DocumentTask:
    """Returns the task of an input line.

    Raises:
        EnvironmentSetupError: the line lacks prompt or document, or a part has an invalid form.
    """
    data = instance.data
    extra_info = data.get("extra_info")
    extra_info = dict(extra_info) if isinstance(extra_info, Mapping) else {}
    document = data.get("document_content")
    if not isinstance(document, str) or not document.strip():
        raise EnvironmentSetupError(f"instance {instance.instance_id} needs document_content: a text")
    labels = [source[name] for source in (data, extra_info) for name in _LABEL_NAMES if source.get(name) is not None]
    label = read_label(labels[0], data.get("aliases", extra_info.get("aliases"))) if labels else None
    if labels and label is None:
        raise EnvironmentSetupError(
            f"instance {instance.instance_id} needs a valid label: a text, a number, or a non-empty list of them"
        )
    return DocumentTask(prompt=_prompt(instance), document=document, label=label, extra_info=extra_info)


def _prompt(instance: Instance) -> tuple[Message, ...]:
    raw = instance.data.get("raw_prompt", instance.data.get("prompt"))
    if isinstance(raw, str) and raw:
        raw = [{"role": "user", "content": raw}]
    messages = [_message(entry) for entry in raw] if isinstance(raw, list | tuple) else []
    if not any(message is not None and message["role"] == "user" for message in messages) or None in messages:
        raise EnvironmentSetupError(
            f"instance {instance.instance_id} needs raw_prompt: messages with role and content, one of them the user's"
        )
    return tuple(message for message in messages if message is not None)


def _message(entry: Any) -> Message | None:
    """Returns the message with its content as one text; None if ``entry`` is no message of a known role."""
    if not isinstance(entry, Mapping) or entry.get("role") not in _ROLES:
        return None
    content = entry.get("content")
    if isinstance(content, list):
        texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    return {"role": str(entry["role"]), "content": content} if isinstance(content, str) else None
