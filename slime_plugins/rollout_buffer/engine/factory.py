"""Creates the client of an engine from its API and the model's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from slime_plugins.rollout_buffer.credentials import api_key_for
from slime_plugins.rollout_buffer.engine.http_engine import HttpEngine
from slime_plugins.rollout_buffer.engine.image_token_counts import size_rule_of
from slime_plugins.rollout_buffer.engine.openai import OpenAiEngine
from slime_plugins.rollout_buffer.engine.prompt_check import PromptChecker
from slime_plugins.rollout_buffer.engine.prompt_probe import prompt_probe
from slime_plugins.rollout_buffer.engine.settings import EngineSettings
from slime_plugins.rollout_buffer.engine.sglang import SglangEngine
from slime_plugins.rollout_buffer.engine.tokenizer_probe import tokenizer_probe
from slime_plugins.rollout_buffer.extensions import Group, load
from slime_plugins.rollout_buffer.tokenizer_loading import vocabulary_size


def make_engine(
    base_url: str,
    settings: EngineSettings | None = None,
    *,
    api: str = "sglang",
    chat_model: str | None = None,
    tokenizer: Any = None,
    tokenizer_path: str | Path | None = None,
    requires_exact_prompts: bool = False,
) -> HttpEngine:
    """Returns the client of the server at ``base_url``.

    ``api`` is ``sglang`` or the name of an engine of an installed package (``extensions.py``), which gets ``base_url``
    and ``settings`` only. With ``chat_model`` the server is an OpenAI-compatible one, for evaluations: ``tokenizer``
    must be the one at ``openai.ENVELOPE_TOKENIZER_PATH``, and the API key comes from the environment. SGLang's client
    refuses sampled ids outside the vocabulary if it has a tokenizer or its folder. With a tokenizer, it also refuses an
    engine with another tokenizer, and probes the engine for changed prompts. With ``requires_exact_prompts``, it
    refuses an engine that changes prompts.

    Raises:
        ConfigError: ``base_url`` is no http or https address, or no package provides that engine.
    """
    if api != "sglang":
        return cast("HttpEngine", load(Group.ENGINES, api)(base_url, settings))
    if chat_model is not None:
        key = api_key_for(base_url)
        return OpenAiEngine(base_url, settings, model=chat_model, tokenizer=tokenizer, api_key=key)
    return SglangEngine(
        base_url,
        settings,
        vocabulary_size=vocabulary_size(tokenizer_path, tokenizer),
        tokenizer_probe=None if tokenizer is None else tokenizer_probe(tokenizer),
        prompts=None if tokenizer is None else PromptChecker(tokenizer),
        prompt_probe=None if tokenizer is None else lambda: prompt_probe(tokenizer, size_rule_of(tokenizer_path)),
        requires_exact_prompts=requires_exact_prompts,
    )
