"""How tokenizers are loaded, and whose code may run on the way.

A tokenizer can bring code of its own. It runs only where the person who runs the process chose that tokenizer: on the
trainer's side, where slime runs the checkpoint's code anyway, and for names given with ``--trust-remote-code``. What a
job or a request names never brings code.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from slime_plugins.rollout_buffer.errors import ConfigError

__all__ = ["load_tokenizer"]


def load_tokenizer(
    path: str | Path, *, trusted: bool = False, revision: str | None = None, download: bool | None = None
) -> Any:
    """Returns the tokenizer in a folder of this host, or of a name of the model hub.

    ``trusted`` lets it run code of its own. ``download`` says whether a name may be fetched; None leaves that to
    ``HF_HUB_OFFLINE``.

    Raises:
        ConfigError: there is no such folder, and the name cannot be had. What is wrong with a folder comes through as
            transformers says it.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would warn that torch is missing: it is not needed
    from transformers import AutoTokenizer

    folder = Path(path).expanduser()
    if folder.is_dir():
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trusted, local_files_only=True)
    offline = _is_offline() if download is None else not download
    options = {} if revision is None else {"revision": revision}
    try:
        return AutoTokenizer.from_pretrained(str(path), trust_remote_code=trusted, local_files_only=offline, **options)
    except (OSError, ValueError) as error:
        why = "the hub is not asked from here, and it is not in the cache" if offline else "the hub does not give it"
        raise ConfigError(
            f"the tokenizer {path} is no folder of this host, and as a name of the model hub it cannot be had ({why}): "
            "put the trainer's tokenizer into a folder of this host"
        ) from error


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
