"""Settings of both sides of the remote rollout protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field, model_validator

from slime_plugins.rollout_buffer.serve_settings import MAX_TURN_BYTES, ListenerSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerSettings:
    """Tokenizers that requests may name. This package's own tokenizer is always available, as ``demo``.

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
    """Limits of rollouts that this server plays for trainers. The command line sets the first three; programs set all.

    ``callback_hosts`` are the hosts it may call back: ``host``, ``host:port``, ``*.domain``, or a network of IP
    addresses like ``10.0.0.0/8``; by default this machine only. If ``api_key`` is set, every call must send it as a
    bearer token. ``turn_timeout_s`` limits a turn, retries included, ``tool_timeout_s`` a tool, ``rollout_timeout_s`` a
    rollout. ``tries`` limits the calls for one turn, and ``backoff_s`` is the first pause between them. ``max_running``
    limits concurrent rollouts, ``max_turns`` the turns that a request may ask for, and ``max_reply_bytes`` a trainer's
    reply. Results are stored for ``keep_result_s``, of the newest ``max_kept``.
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
    that key. With ``open_unknown`` the first call of an unknown ``rollout_id`` opens a session; otherwise ``POST
    /rollouts`` does. ``text_counts`` accepts the count by text (``token_counts.py``) if it differs from the exact one
    because the tokenizer would encode the sampled text to other ids; the stored mask is always exact.
    ``max_new_tokens`` limits one turn, ``max_context_tokens`` a sequence, ``max_session_tokens`` all recorded tokens of
    a session, edits included, ``max_turns`` the turns of a session, and ``max_sessions`` the open sessions. Sessions
    expire ``idle_s`` after their last call; at most ``max_ended`` ended ones stay visible, for ``keep_ended_s``.
    ``model`` is the name of the model in replies.
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


class RemoteRolloutSettings(ListenerSettings):
    """Settings of ``rollout-buffer remote-rollout``."""

    port: int = Field(default=8891, ge=0, le=65535, description="Port to serve on.")
    callback_hosts: tuple[str, ...] = Field(
        default=AgentSettings().callback_hosts,
        description="Host (host, host:port, *.domain, network) that a server_url may name; repeatable. "
        "[default: this machine]",
        json_schema_extra={"flag": "--callback-host"},
    )
    tokenizer_roots: tuple[Path, ...] = Field(
        default=(),
        description="Folder below which requests may name tokenizers; repeatable.",
        json_schema_extra={"flag": "--tokenizer-root"},
    )
    tokenizers: tuple[str, ...] = Field(
        default=(),
        description="NAME=FOLDER: the folder of a tokenizer that requests name NAME; repeatable.",
        json_schema_extra={"flag": "--tokenizer"},
    )
    default_tokenizer: str | None = Field(
        default=None,
        description="Name of the tokenizer of requests that name none. [default: such requests are refused]",
    )
    trusted_tokenizers: tuple[str, ...] = Field(
        default=(),
        description="Name of a tokenizer whose own code may run; repeatable.",
        json_schema_extra={"flag": "--trust-remote-code"},
    )
    download_tokenizers: bool = Field(default=False, description="Fetch named tokenizers from the model hub.")
    engine_url: str | None = Field(
        default=None, description="SGLang server: enables the trainer's side. [default: the agent's side only]"
    )
    buffer_url: str | None = Field(
        default=None, description="The buffer that the trainer's side writes trajectories to. [default: none]"
    )
    tools: str | None = Field(
        default=None, description="MODULE:NAME: the object that provides the tools of rollouts. [default: a calculator]"
    )
    only_opened: bool = Field(
        default=False, description="Refuse turns of rollouts that were not opened by POST /rollouts."
    )
    only_exact_counts: bool = Field(
        default=False, description="Refuse counts of conversations rendered again that differ from the exact count."
    )
    idle_s: float = Field(
        default=TrainerSettings().idle_s, ge=1.0, description="Seconds without a turn after which a rollout expires."
    )

    @model_validator(mode="after")
    def _is_consistent(self) -> RemoteRolloutSettings:
        if self.buffer_url is not None and self.engine_url is None:
            raise ValueError("--buffer-url is for the trainer's side: give --engine-url too")
        for root in self.tokenizer_roots:
            if not root.is_dir():
                raise ValueError(f"--tokenizer-root {root} is not a folder")
        self.tokenizer_settings()
        return self

    def tokenizer_settings(self) -> TokenizerSettings:
        """Returns which tokenizers requests may name."""
        return TokenizerSettings(
            roots=self.tokenizer_roots,
            folders=dict(map(_named_folder, self.tokenizers)),
            remote_code_names=frozenset(self.trusted_tokenizers),
            download=self.download_tokenizers,
            default_name=self.default_tokenizer,
        )


def _named_folder(entry: str) -> tuple[str, Path]:
    name, equals, folder = entry.partition("=")
    if not name or not equals or not Path(folder).is_dir():
        raise ValueError(f"--tokenizer {entry}: must be NAME=FOLDER with an existing folder")
    return name, Path(folder)
