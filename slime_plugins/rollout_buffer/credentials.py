"""Credentials: redacted in replies, logs, errors and files; an engine's API key is sent to that engine alone.

A secret is recognized by its position in a URL, or by a name such as ``api_key``. Stored values are not redacted,
because they are needed to reach engines. An engine's key comes from the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

MASK: Final = "***"

# Only text up to an @ is searched, so that no part of a long text is scanned twice.
_UP_TO_LAST_AT: Final = re.compile(r"(?<![^\s\"'<>])[^\s\"'<>]*@")
# Everything between the scheme and the last @ of the address, also a password with a slash.
_CREDENTIALS: Final = re.compile(r"(?<=://)(?:[^/?#\s\"'<>]*|[^/?#\s\"'<>@:]*:[^\s\"'<>@]*)@")

_SECRET: Final = (
    r"(?:api|access|account|secret|private|auth|signing|encryption)[-_]?key|passw(?:or)?d|passphrase|secret|credential"
    r"|authorization|cookie|(?:access|auth|api|bearer|refresh|session|hf|hub|github|wandb)[-_]?token"
)
_SECRET_NAME: Final = re.compile(rf"{_SECRET}|(?:^|[-_])(?:headers?|auth|pwd|bearer|env|token)$", re.IGNORECASE)
_HUMP: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_VOCABULARY: Final = re.compile(
    r"(?:^|[-_])(?:bos|eos|pad|unk|sep|cls|mask|start|stop|end|image|video|audio|vision|think|thinking|max|min|new|per)"
    r"[-_]token$",
    re.IGNORECASE,
)
# Values end before a quote and its backslashes, so that JSON inside a log line stays JSON.
_QUOTED: Final = r"(?:[^\"'\\]++|\\++(?![\"']))+"
_UNQUOTED: Final = r"(?:[^\s&\"',;\\]++|\\++(?![\"']))+"
# In a text: "api_key": "…" as in JSON and Python, api_key=… as in URLs and shells, flags, headers, keys of gateway
# sessions. A lone token needs quotes, a ? or & before it, or --: logs count tokens.
_NAMED: Final = re.compile(
    rf"((?:(?:{_SECRET})\\*[\"']?\s*[:=]|(?<![\w-])token(?:\\*[\"']\s*:|=))\s*\\*[\"']){_QUOTED}"
    rf"|((?:{_SECRET})=|[?&]token=|(?:authorization|api-key|x-(?:{_SECRET})):\s?(?:(?:bearer|basic|token) )?"
    rf"|--(?:\w++-){{0,3}}(?:{_SECRET}|token)(?: +|=)(?!-)){_UNQUOTED}"
    r"|(sk-rollout-)[^\s\"'/\\]+",
    re.IGNORECASE,
)


def redacted(text: str) -> str:
    """Returns a text with ``***`` in place of credentials in URLs and of values under a secret's name."""
    text = _NAMED.sub(lambda found: f"{found[found.lastindex or 0]}{MASK}", text)
    return _UP_TO_LAST_AT.sub(lambda part: _CREDENTIALS.sub(f"{MASK}@", part[0]), text) if "@" in text else text


def redacted_values(values: Any, *, secret: bool = False) -> Any:
    """Returns a JSON value with all texts redacted; ``secret`` is true below a secret's name."""
    if isinstance(values, Mapping):
        return {key: redacted_values(value, secret=secret or _names_secret(key)) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [redacted_values(value, secret=secret) for value in values]
    if secret and values is not None and values != "" and not isinstance(values, bool):
        return MASK
    return redacted(values) if isinstance(values, str) else values


def holds_redacted(values: Any, *, secret: bool = False) -> bool:
    """Returns True if a JSON value contains a redacted secret, so that it cannot be used."""
    if isinstance(values, Mapping):
        return any(holds_redacted(value, secret=secret or _names_secret(key)) for key, value in values.items())
    if isinstance(values, list | tuple):
        return any(holds_redacted(value, secret=secret) for value in values)
    if not isinstance(values, str) or MASK not in values:
        return False
    named = any(found[0].startswith(f"{found[found.lastindex or 0]}{MASK}") for found in _NAMED.finditer(values))
    return named or f"://{MASK}@" in values or (secret and values == MASK)


def _names_secret(name: Any) -> bool:
    """Returns True if a key is the name of a secret; tokens of a vocabulary (``eos_token``) are none."""
    return _SECRET_NAME.search(_HUMP.sub("_", str(name))) is not None and not _VOCABULARY.search(str(name))


KEY_VARIABLE: Final = "ROLLOUT_BUFFER_ENGINE_API_KEY"
"""Variable with the key for the server at ``KEY_URL_VARIABLE``."""
KEY_URL_VARIABLE: Final = "ROLLOUT_BUFFER_ENGINE_API_URL"
"""Variable with the server's URL. A job may name any server, and only this one gets the key."""


def api_key_for(base_url: str) -> str | None:
    """Returns the key if it belongs to the server at ``base_url``: scheme, host and port must be written alike."""
    owner = os.environ.get(KEY_URL_VARIABLE)
    if not owner or urlsplit(owner)[:2] != urlsplit(base_url)[:2]:
        return None
    return os.environ.get(KEY_VARIABLE) or None


def key_headers(url: str) -> dict[str, str]:
    """Returns the authorization header for the server at ``url``; {} for any other server."""
    key = api_key_for(url)
    return {} if key is None else {"Authorization": f"Bearer {key}"}
