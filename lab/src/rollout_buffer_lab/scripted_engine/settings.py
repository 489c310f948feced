"""Settings of the scripted engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.serve_settings import why_exposed


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptedEngineSettings:
    """Where the engine listens, how well its policy plays, and how long a reply takes.

    ``skill`` is about the share of episodes without a fatal mistake; ``seed`` and the caller's session decide which
    episodes have one. ``port`` 0 takes a free port. ``latency_s`` passes before the first token of a reply,
    ``token_latency_s`` before each further token. ``context_length`` limits prompt plus ``max_new_tokens``, as that of
    a model would. ``threads`` read screenshots and tokenize, so that the event loop stays free for health checks.
    ``token_file`` holds the token that requests must send; a ``host`` that other machines can reach needs it. With
    ``token_records``, made-up experts and top_p ids are returned to requests that ask for them. ``weight_version`` is
    the version of all tokens until a trainer sets another one.
    """

    host: str = "127.0.0.1"
    port: int = 30000
    tokenizer_path: Path = DEMO_TOKENIZER_PATH
    skill: float = 0.7
    seed: int = 0
    latency_s: float = 0.0
    token_latency_s: float = 0.0
    context_length: int = 131072
    weight_version: str = "default"
    threads: int = 2
    token_file: Path | None = None
    token_records: bool = False

    def __post_init__(self) -> None:
        if why := why_exposed(self.host, self.token_file):
            raise ConfigError(why)
        if not 0.0 <= self.skill <= 1.0:
            raise ConfigError(f"the scripted engine's skill must lie in [0, 1], not be {self.skill}")
        if self.latency_s < 0 or self.token_latency_s < 0:
            raise ConfigError("the scripted engine's latencies must not be negative")
        if self.context_length < 1 or self.threads < 1:
            raise ConfigError("the scripted engine needs a context_length and threads of at least 1")
