"""The API key of an inference server, from the environment, sent to that server only."""

from __future__ import annotations

import os
from typing import Final
from urllib.parse import urlsplit

KEY_VARIABLE: Final = "ROLLOUT_BUFFER_ENGINE_API_KEY"
"""Variable with the key for the server at ``KEY_URL_VARIABLE``."""
KEY_URL_VARIABLE: Final = "ROLLOUT_BUFFER_ENGINE_API_URL"
"""Variable with the server's URL. A job may name any server, and only this one gets the key."""


def api_key_for(base_url: str) -> str | None:
    """Returns the key if it belongs to the server at ``base_url``, by scheme, host and port."""
    owner = os.environ.get(KEY_URL_VARIABLE)
    if not owner or urlsplit(owner)[:2] != urlsplit(base_url)[:2]:
        return None
    return os.environ.get(KEY_VARIABLE) or None


def key_headers(url: str) -> dict[str, str]:
    """Returns the authorization header for the server at ``url``; {} for any other server."""
    key = api_key_for(url)
    return {} if key is None else {"Authorization": f"Bearer {key}"}
