"""Settings of the gateway's processes. Units are in the names; a limit of None is unlimited."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from slime_plugins.rollout_buffer.remote_rollout.callback_hosts import CallbackHosts
from slime_plugins.rollout_buffer.serve_settings import MAX_TURN_BYTES, ListenerSettings

DEFAULT_GATEWAY_PORT = 8890
DEFAULT_IDLE_TIMEOUT_S = 900.0
KEEP_ALIVE_INTERVAL_S = 10.0
"""Seconds between keep-alive comments in a stream while its turn is sampled."""


class GatewaySettings(ListenerSettings):
    data_dir: Path = Field(
        default=Path("rollout_buffer_data"), description="The data directory of `serve`, on this host."
    )
    port: int = Field(default=DEFAULT_GATEWAY_PORT, ge=0, le=65535, description="Port to serve on.")
    public_url: str | None = Field(
        default=None, description="Base URL for agents. [default: the address at which the session was opened]"
    )
    token_file: Path | None = Field(
        default=None, description="File whose first line is the bearer token that opens sessions."
    )
    scoring_hosts: tuple[str, ...] = Field(
        default=(),
        description="Host (host, host:port, *.domain, network) that a gateway session's scoring_url may name; "
        "repeatable.",
        json_schema_extra={"flag": "--scoring-host"},
    )
    workers: int = Field(default=1, ge=1, le=64, description="Processes that serve the address.")
    max_sessions: int = Field(default=4096, ge=1, description="Sessions that may be open at once.")
    idle_timeout_s: float = Field(
        default=DEFAULT_IDLE_TIMEOUT_S, gt=0, description="Seconds without a turn before sessions expire."
    )
    session_timeout_s: float = Field(default=4 * 3600.0, gt=0, description="Seconds that sessions may live.")
    max_body_bytes: int = Field(default=MAX_TURN_BYTES, ge=1024, description="Largest request body.")
    max_data_bytes: int | None = Field(default=None, ge=1_000_000, description="See `serve`. [default: unlimited]")
    max_turns: int = Field(default=2000, ge=1)
    """Limit of the turns of one session."""
    max_session_ids: int = Field(default=16_000_000, ge=1)
    """Token ids that one session may hold, over all its branches."""
    max_session_image_bytes: int = Field(default=512 * 1024 * 1024, ge=1)
    """Bytes of images and token records that one session may hold."""
    body_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds within which a request's body must arrive."""
    scoring_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds within which a scoring callback must answer."""

    @field_validator("scoring_hosts")
    @classmethod
    def _are_hosts(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        CallbackHosts(entries)
        return entries
