"""Validated settings of the gateway's process. Units are in the names; None means unlimited and says so."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from slime_plugins.rollout_buffer.config import read_token, sentences, why_exposed
from slime_plugins.rollout_buffer.errors import ConfigError

DEFAULT_GATEWAY_PORT = 8890


class GatewaySettings(BaseModel):
    """What the gateway was started with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data_dir: Path
    """The data directory of the buffer, on this host."""
    host: str = "127.0.0.1"
    port: int = Field(default=DEFAULT_GATEWAY_PORT, ge=0, le=65535)
    public_url: str | None = None
    """Where agents reach it, when that is not ``http://host:port``; it stands in the replies to ``/sessions``."""
    token_file: Path | None = None
    allowed_hosts: tuple[str, ...] = ()
    """Names under which a gateway without a token may be asked for, beside loopback's and that of ``public_url``."""
    scoring_hosts: tuple[str, ...] = ()
    """Hosts (``name`` or ``name:port``) that a session's ``scoring_url`` may name. None at all by default."""
    max_body_bytes: int = Field(default=64 * 1024 * 1024, ge=1024)
    max_sessions: int = Field(default=4096, ge=1)
    max_turns: int = Field(default=2000, ge=1)
    """Of one session."""
    max_session_ids: int = Field(default=16_000_000, ge=1)
    """Token ids that one session may hold, over all its branches."""
    max_session_image_bytes: int = Field(default=512 * 1024 * 1024, ge=1)
    idle_timeout_s: float = Field(default=900.0, gt=0)
    """A session without a request for this long has expired; opening one may ask for another time."""
    session_timeout_s: float = Field(default=4 * 3600.0, gt=0)
    """How long a session may live at most."""
    body_timeout_s: float = Field(default=60.0, gt=0)
    """How long a request's body may take to arrive."""
    scoring_timeout_s: float = Field(default=120.0, gt=0)
    max_data_bytes: int | None = Field(default=None, ge=1_000_000)
    """As of ``rollout-buffer serve``."""

    @model_validator(mode="after")
    def _only_loopback_without_a_token(self) -> GatewaySettings:
        if why := why_exposed(self.host, self.token_file):
            raise ValueError(why)
        return self


def build_gateway_settings(**values: object) -> GatewaySettings:
    """Builds the settings.

    Raises:
        ConfigError: one sentence for each thing that is wrong.
    """
    try:
        settings = GatewaySettings.model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(sentences(error))) from error
    if settings.token_file is not None:
        read_token(settings.token_file)
    return settings
