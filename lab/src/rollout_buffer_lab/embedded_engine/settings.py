"""Settings of the embedded engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.serve_settings import why_exposed

DEVICES: Final = ("auto", "cpu", "cuda", "mps")
DTYPES: Final = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddedEngineSettings:
    """Which model is served, where, and how much of it at once.

    ``model_path`` is a folder in the Hugging Face layout. ``port`` 0 takes a free port. ``device`` ``auto`` is a CUDA
    GPU if there is one, else the CPU. Log-probs equal a trainer's to six digits in ``float32`` only.
    ``context_length`` limits prompt plus ``max_new_tokens``; None is the model's own limit. ``max_running`` requests
    share one forward pass, further requests wait. ``prefill_tokens`` limits the prompt tokens of one forward pass,
    ``prefix_cache_mb`` the prefix cache. ``seed`` decides what requests without a ``sampling_seed`` sample; with None
    each start samples differently. ``threads`` are torch's; None is torch's default. ``token_file`` holds the token
    that requests must send; a ``host`` that other machines can reach needs it.
    """

    model_path: Path
    host: str = "127.0.0.1"
    port: int = 30000
    device: str = "auto"
    dtype: str = "float32"
    context_length: int | None = None
    max_running: int = 32
    prefill_tokens: int = 2048
    prefix_cache_mb: int = 256
    seed: int | None = None
    threads: int | None = None
    weight_version: str = "default"
    token_file: Path | None = None

    def __post_init__(self) -> None:
        if why := why_exposed(self.host, self.token_file):
            raise ConfigError(why)
        if self.device not in DEVICES:
            raise ConfigError(f"the engine's device must be one of {', '.join(DEVICES)}, not {self.device}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"the engine's dtype must be one of {', '.join(DTYPES)}, not {self.dtype}")
        counts = (self.max_running, self.prefill_tokens, self.context_length or 1, self.threads or 1)
        if min(counts) < 1 or self.prefix_cache_mb < 0:
            raise ConfigError(
                "the engine's max_running, prefill_tokens, context_length and threads must be at least 1, "
                "and prefix_cache_mb must not be negative"
            )
        if not (self.model_path / "config.json").is_file():
            raise ConfigError(f"{self.model_path} has no config.json: give a model's folder in Hugging Face layout")
