"""One loader of tokenizers: a folder or a name, and code of its own only where somebody chose that."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.tokenizer_loading import load_tokenizer

ROOT = Path(__file__).resolve().parents[2] / "slime_plugins" / "rollout_buffer"


@pytest.fixture
def with_code(tmp_path: Path) -> Path:
    """A tokenizer that brings code: loading it leaves a mark beside it."""
    folder = tmp_path / "tokenizer"
    shutil.copytree(DEMO_TOKENIZER_PATH, folder)
    mark = tmp_path / "ran"
    (folder / "own.py").write_text(
        "from pathlib import Path\nfrom transformers import PreTrainedTokenizerFast\n"
        f"Path({str(mark)!r}).touch()\n\n\nclass Own(PreTrainedTokenizerFast):\n    pass\n",
        encoding="utf-8",
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def test_a_folder_is_loaded_by_path_or_text() -> None:
    assert len(load_tokenizer(DEMO_TOKENIZER_PATH)) == len(load_tokenizer(str(DEMO_TOKENIZER_PATH)))


def test_a_tokenizers_own_code_runs_only_when_it_is_trusted(
    with_code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_tokenizer(with_code)
    assert not (tmp_path / "ran").exists()
    assert type(load_tokenizer(with_code, trusted=True)).__name__ == "Own"
    assert (tmp_path / "ran").exists()


def test_a_name_that_cannot_be_had_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"no folder of this host.*put the trainer's tokenizer into a folder"):
        load_tokenizer("nobody/has-this", download=False)


def test_nobody_else_lets_a_tokenizer_run_code() -> None:
    sources = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")}
    trusting = {
        name for name, source in sources.items() if "AutoTokenizer" in source and "trust_remote_code=" in source
    }
    assert trusting == {"tokenizer_loading.py"}
