"""Settings of both sides of the remote rollout protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slime_plugins.rollout_buffer.serve_settings import MAX_TURN_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerSettings:
    """Tokenizers that requests may name. The one of this package is always available, as ``demo``.

    ``roots`` are the folders below which local tokenizers may lie; none by default. ``folders`` maps names of a model
    hub to folders on this machine. ``remote_code_names`` are the names whose own code may run, with every revision.
    ``download`` allows names that are not in the local cache to be downloaded from the hub. ``default_name`` is used if
    a request names none. The ``max_cached`` most recently used tokenizers stay in memory.
    """

    roots: tuple[Path, ...] = ()
    folders: Mapping[str, Path] = field(default_factory=dict)
    remote_code_names: frozenset[str] = frozenset()
    download: bool = False
    default_name: str | None = None
    max_cached: int = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSettings:
    """Limits of rollouts that this server plays for trainers.

    ``callback_hosts`` are the hosts it may call back: ``host``, ``host:port``, ``*.domain``, or a network of IP
    addresses like ``10.0.0.0/8``; by default this machine only. If ``api_key`` is set, ``POST /rollout`` must send it
    as a bearer token. ``turn_timeout_s`` limits a turn, retries included, ``tool_timeout_s`` a tool,
    ``rollout_timeout_s`` a rollout. ``tries`` limits the calls for one turn. ``max_running`` limits concurrent
    rollouts; results are stored for ``keep_result_s``, of the newest ``max_kept``.
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
    max_reply_bytes: int = MAX_TURN_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSettings:
    """Limits of the trainer's side, for other rollout servers.

    If ``api_key`` is set, every call must send it as a bearer token; turns of a session opened with its own key send
    that one. With ``open_unknown`` the first call of an unknown ``rollout_id`` opens a session; otherwise ``POST
    /rollouts`` does. ``text_counts`` accepts the count by the guide's formula if it differs from the exact one because
    the tokenizer would encode the sampled text to other ids; the stored mask is always exact. ``max_new_tokens`` limits
    one turn, ``max_context_tokens`` a sequence, ``max_session_tokens`` all recorded tokens of a session, edits
    included. Sessions expire ``idle_s`` after their last call; ended ones stay visible for ``keep_ended_s``.
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
