"""``ChatTokens`` under the name that generators import it by; it is shared with the gateway and lives one room up."""

from __future__ import annotations

from slime_plugins.rollout_buffer.chat_tokens import ChatTokens

__all__ = ["ChatTokens"]
