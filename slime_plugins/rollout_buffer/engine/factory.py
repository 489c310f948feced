"""The one place that makes an engine's client: which kind it is, and what it needs to know of the model behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from slime_plugins.rollout_buffer.engine.base import EngineSettings
from slime_plugins.rollout_buffer.engine.http import HttpEngine
from slime_plugins.rollout_buffer.engine.image_tokens import size_rule_of
from slime_plugins.rollout_buffer.engine.openai import OpenAiEngine
from slime_plugins.rollout_buffer.engine.prompt_probe import prompt_probe
from slime_plugins.rollout_buffer.engine.sglang import SglangEngine
from slime_plugins.rollout_buffer.engine.tokenizer_probe import tokenizer_probe
from slime_plugins.rollout_buffer.engine_keys import api_key_for
from slime_plugins.rollout_buffer.extensions import Group, load
from slime_plugins.rollout_buffer.rules.token_validity import vocabulary_size


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
    """Returns the client of the server at ``base_url``: SGLang's, which takes and gives token ids.

    Any other ``api`` is an engine of an installed package (``extensions.py``), which takes and gives them too.
    With ``chat_model`` it is that of an OpenAI-compatible server instead, for evaluations: ``tokenizer`` must be the
    one of its envelope then, and its key comes from the environment. With a tokenizer, or the folder of one, ids that
    the model does not have are refused; with a tokenizer, an engine that has another one too. That engine is asked what
    it does to prompts; ``requires_exact_prompts`` refuses one that changes them.

    Raises:
        ConfigError: ``base_url`` is no http or https address, or no package has that engine.
    """
    if api != "sglang":
        return cast("HttpEngine", load(Group.ENGINES, api)(base_url, settings))
    if chat_model is not None:
        key = api_key_for(base_url)
        return OpenAiEngine(base_url, settings, model=chat_model, tokenizer=tokenizer, api_key=key)
    probe = None if tokenizer is None else prompt_probe(tokenizer, size_rule_of(tokenizer_path))
    return SglangEngine(
        base_url,
        settings,
        vocabulary_size=vocabulary_size(tokenizer_path, tokenizer),
        tokenizer_probe=None if tokenizer is None else tokenizer_probe(tokenizer),
        prompts=None if probe is None else probe.checker,
        prompt_probe=probe,
        requires_exact_prompts=requires_exact_prompts,
    )
