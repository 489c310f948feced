"""Settings of both sides of the remote rollout protocol. Units are in the names; what is closed by default says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slime_plugins.rollout_buffer.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerSettings:
    """Which tokenizers a request may name. The one that ships with the package is always there, as ``demo``.

    ``roots`` are the folders that a local tokenizer may lie under; none by default. ``folders`` gives names of a model
    hub folders on this machine. ``remote_code_names`` are the names whose own code may run: a name is trusted as it is
    written, with every revision. ``download`` lets names that are not in the local cache be fetched from the hub.
    ``default_name`` is taken where a request names none. ``max_cached`` tokenizers are kept, the ones used last.
    """

    roots: tuple[Path, ...] = ()
    folders: Mapping[str, Path] = field(default_factory=dict)
    remote_code_names: frozenset[str] = frozenset()
    download: bool = False
    default_name: str | None = None
    max_cached: int = 8

    def __post_init__(self) -> None:
        if self.max_cached < 1:
            raise ConfigError("max_cached: at least one tokenizer must be kept")


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSettings:
    """How this server plays rollouts for trainers.

    ``callback_hosts`` are the hosts it calls back: ``host``, ``host:port``, ``*.domain``, or a network of IP addresses
    like ``10.0.0.0/8``; this machine alone by default. ``api_key`` must come as a bearer token with ``POST /rollout``
    when it is set. A turn ends after ``turn_timeout_s``, retries included, a tool after ``tool_timeout_s``, a rollout
    after ``rollout_timeout_s``. ``tries`` bounds the calls for one turn. ``max_running`` rollouts are played at once;
    results are kept for ``keep_result_s``, of the newest ``max_kept``.
    """

    callback_hosts: tuple[str, ...] = ("127.0.0.1", "localhost", "[::1]")
    api_key: str | None = None
    tokenizers: TokenizerSettings = field(default_factory=TokenizerSettings)
    turn_timeout_s: float = 600.0
    tool_timeout_s: float = 60.0
    rollout_timeout_s: float = 3600.0
    tries: int = 4
    backoff_s: float = 0.5
    max_running: int = 1024
    keep_result_s: float = 3600.0
    max_kept: int = 4096
    max_turns: int = 1000
    max_reply_bytes: int = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        times = (self.turn_timeout_s, self.tool_timeout_s, self.rollout_timeout_s, self.keep_result_s)
        if min(times) <= 0 or self.backoff_s < 0:
            raise ConfigError("remote rollout: timeouts must be above 0")
        if min(self.tries, self.max_running, self.max_kept, self.max_turns) < 1:
            raise ConfigError("remote rollout: tries, max_running, max_kept and max_turns must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSettings:
    """How this server plays the trainer for strangers' rollout servers.

    ``api_key`` must come as a bearer token with every call when it is set; a session that was opened with a key of its
    own takes that one for its turns. ``open_unknown`` lets the first call of an unknown ``rollout_id`` open a session;
    otherwise sessions are opened by ``POST /rollouts``. ``text_counts`` accepts the count of the guide's formula where
    it differs from the exact one because the sampled ids are not what the tokenizer makes of their text; the mask that
    is kept is the exact one in any case. ``max_new_tokens`` caps one turn, ``max_context_tokens`` a sequence,
    ``max_session_tokens`` what one session records over all its turns and edits.
    Sessions expire ``idle_s`` after their last call; ended ones can be looked at for ``keep_ended_s``.
    """

    api_key: str | None = None
    open_unknown: bool = True
    text_counts: bool = True
    max_new_tokens: int = 4096
    max_context_tokens: int = 131_072
    max_session_tokens: int = 4_194_304
    max_sessions: int = 4096
    max_turns: int = 10_000
    idle_s: float = 3600.0
    keep_ended_s: float = 900.0
    max_ended: int = 1024
    model: str = "policy"

    def __post_init__(self) -> None:
        if min(self.idle_s, self.keep_ended_s) <= 0:
            raise ConfigError("remote rollout: idle_s and keep_ended_s must be above 0")
        if min(self.max_new_tokens, self.max_context_tokens, self.max_sessions, self.max_ended, self.max_turns) < 1:
            raise ConfigError("remote rollout: the trainer side's limits must be at least 1")
