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
KEY_VARIABLE: Final = "ROLLOUT_BUFFER_ENGINE_API_KEY"
"""Variable with the key for the server at ``KEY_URL_VARIABLE``."""
KEY_URL_VARIABLE: Final = "ROLLOUT_BUFFER_ENGINE_API_URL"
"""Variable with the server's URL. A job may name any server, and only this one gets the key."""

# Only text up to an @ is searched, so that no part of a long text is scanned twice.
_UP_TO_LAST_AT: Final = re.compile(r"(?<![^\s\"'<>])[^\s\"'<>]*@")
# Everything between the scheme and the last @ of the address, also a password with a slash.
_CREDENTIALS: Final = re.compile(r"(?<=://)(?:[^/?#\s\"'<>]*|[^/?#\s\"'<>@:]*:[^\s\"'<>@]*)@")

# Parts of names. A token needs the word of a credential before it: eos_token and action_token name words of a model.
_SECRET: Final = (
    r"(?:api|access|account|secret|private|auth|signing|encryption)[-_]?key|passw(?:or)?d|passphrase|secrets?(?![a-z])"
    r"|credentials?|authorization|cookies?|(?:access|auth|api|bearer|refresh|session|secret|security|csrf|jwt|hf|hub"
    r"|huggingface|github|gitlab|wandb|openai|admin|bot|deploy)[-_]?token"
    r"|(?:service|server|judge|client)[-_]?token(?!s)"  # logs count tokens
)
_NO_SECRET: Final = r"(?:BOS|EOS|PAD|UNK|SEP|MASK|STOP|IMAGE|ACTION)_TOKEN|(?:SORT|GROUP|INPUT|LABEL|REWARD|TOOL)_KEY"
# Also the variables of a launcher's env, such as NPM_TOKEN.
_SECRET_NAME: Final = re.compile(
    rf"(?i){_SECRET}|(?:service|server|judge|client)[-_]?tokens|(?:^|[-_])(?:headers?|auth|pwd|bearer)$|^token$"
    rf"|(?-i:^(?!(?:.*_)?(?:{_NO_SECRET})$)[A-Z0-9_]+_(?:KEY|TOKEN|PAT|PASS)$)"
)
_HUMP: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_WORDS: Final = ("key", "pass", "secret", "credential", "authorization", "cookie", "token", "sk-rollout-")
"""A text without any of them names no secret: most log lines are searched no further."""
# A value ends before the quote that began it, with as many backslashes: JSON inside JSON escapes a quote of the value
# with more. Where that quote is cut off it ends before any quote, so that JSON inside a log line stays JSON.
_QUOTED: Final = (
    r"(?:(?>(?:(?P=slashes)\\(?:(?P=slashes)[\\\"'])?|(?!(?P=slashes)(?P=quote))[\s\S]){1,1000})(?=(?P=slashes)(?P=quote))"
    r"|(?:[^\"'\\]++|\\++(?![\"']))+)"
)
_UNQUOTED: Final = r"(?:[^\s&\"',;\\]++|\\++(?![\"']))+"
_PARAMETER: Final = r"[\w-]++=(?:\\*+\"[^\"\\]*+\\*+\"|[^\s,\"'\\]++)"
_COOKIE: Final = r"[^\s=;,\"'\\]++=(?:(?:\\*+\")?[^\s;,\"'\\]++)?"
# Each alternative is a group with what stays, and the value. A lone token needs quotes, a ? or & before it, or --,
# because logs count tokens.
_NAMED: Final = re.compile(
    r"(?im)"
    # {"api_key": "…"}, password = '…', {\"token\": \"…\"}, token="…"
    rf"((?:(?:{_SECRET})\\*[\"']?\s*[:=]|(?<![\w-])token(?:\\*[\"']\s*:|=))\s*(?P<slashes>\\*)(?P<quote>[\"'])){_QUOTED}"
    # Authorization: Digest username="u", response="…"
    rf"|(authorization ?[:=] ?(?:digest|aws4-hmac-sha256) ){_PARAMETER}(?:, ?{_PARAMETER})*+"
    # Authorization: Bearer …, Proxy-Authorization: Negotiate …, OTEL_EXPORTER_OTLP_HEADERS=Authorization=Basic …
    rf"|(authorization ?[:=] ?(?:(?:bearer|basic|token|negotiate|ntlm|digest|api-?key) )?){_UNQUOTED}"
    # Cookie: session=…; theme=…
    rf"|(cookie: ?)(?:{re.escape(MASK)}|{_COOKIE}(?:; ?{_COOKIE})*+)"
    # api-key: …, X-Auth-Token: …, http://host/?api_key=…&token=…, HF_TOKEN=…
    rf"|((?:api-key|x-(?:{_SECRET})):\s?|(?:{_SECRET})=|[?&]token=){_UNQUOTED}"
    # --judge-api-key …, --token=…
    rf"|(--(?:(?:\w++-){{0,3}}(?:{_SECRET})|token)(?: +|=)(?!-)){_UNQUOTED}"
    # A line of YAML with one word: hf_token: …
    rf"|((?:^|(?<=[\"'])|(?<=\\n))[ \t]*+(?:- )?(?=[\w.-]{{2,60}}+: )[\w.-]*?(?:{_SECRET}): ++)"
    r"(?!(?:null|none|true|false)\b|[|>{\[<])[^\s\"'\\]++(?=[ \t\r]*+(?:$|#|\\|[\"'](?!\w)))"
    # Keys of gateway sessions: /sessions/sk-rollout-…/v1
    r"|(sk-rollout-)[^\s\"'/\\]+"
)


def redacted(text: str) -> str:
    """Returns a text with ``***`` in place of credentials in URLs and of values under a secret's name.

    Half of a surrogate pair, which can be neither stored nor sent, becomes ``?``.
    """
    text = text.encode("utf-8", "replace").decode("utf-8")
    lowered = text.lower()
    if any(word in lowered for word in _WORDS):
        text = _NAMED.sub(lambda match: f"{match[match.lastindex or 0]}{MASK}", text)
    return _UP_TO_LAST_AT.sub(lambda part: _CREDENTIALS.sub(f"{MASK}@", part[0]), text) if "@" in text else text


def redacted_values(values: Any, *, secret: bool = False) -> Any:
    """Returns a JSON value with all texts redacted; ``secret`` is true below a secret's name."""
    if isinstance(values, Mapping):
        return {key: redacted_values(value, secret=secret or _is_secret(key, value)) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [redacted_values(value, secret=secret) for value in values]
    if secret and values is not None and values != "" and not isinstance(values, bool):
        return MASK
    return redacted(values) if isinstance(values, str) else values


def holds_redacted(values: Any, *, secret: bool = False) -> bool:
    """Returns True if a JSON value contains a redacted secret, so that it cannot be used."""
    if isinstance(values, Mapping):
        return any(holds_redacted(value, secret=secret or _is_secret(key, value)) for key, value in values.items())
    if isinstance(values, list | tuple):
        return any(holds_redacted(value, secret=secret) for value in values)
    if not isinstance(values, str) or MASK not in values:
        return False
    named = any(match[0].startswith(f"{match[match.lastindex or 0]}{MASK}") for match in _NAMED.finditer(values))
    return named or f"://{MASK}@" in values or (secret and values == MASK)


def _is_secret(name: Any, value: Any) -> bool:
    if isinstance(value, int | float) and str(name).lower().endswith("tokens"):
        return False  # judge_tokens is a number of tokens
    return any(_SECRET_NAME.search(form) for form in (str(name), _HUMP.sub("_", str(name))))


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
