"""One loader of tokenizers: a folder or a name, and code of its own only where somebody chose that."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer import tokenizer_loading
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.tokenizer_loading import hub_trouble, load_tokenizer


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


def test_a_tokenizers_own_code_runs_only_when_it_is_trusted(
    with_code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_tokenizer(with_code)
    assert not (tmp_path / "ran").exists()
    assert type(load_tokenizer(with_code, trusted=True)).__name__ == "Own"
    assert (tmp_path / "ran").exists()


def test_threads_that_load_the_first_tokenizers_of_a_process_at_once_all_get_theirs() -> None:
    program = (
        "import sys\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "from slime_plugins.rollout_buffer.tokenizer_loading import load_tokenizer\n"
        "with ThreadPoolExecutor(8) as threads:\n"
        "    assert len(list(threads.map(load_tokenizer, sys.argv[1:]))) == 8\n"
    )
    subprocess.run([sys.executable, "-c", program, *[str(DEMO_TOKENIZER_PATH)] * 8], check=True, timeout=120)


def test_a_name_that_the_hub_has_and_that_does_not_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_loading, "_trouble_of_asking", lambda *_: "")
    with pytest.raises(ConfigError, match=r"from the model hub \((OSError|ValueError): [^\n]*\): put"):
        load_tokenizer("nobody/has-this", download=True)


def test_a_name_that_cannot_be_had_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"no folder of this host.*put the trainer's tokenizer into a folder"):
        load_tokenizer("nobody/has-this", download=False)


class TestAHubThatIsNotThere:
    """Names of the model hub where nobody answers: refused in seconds, and what is cached is loaded all the same."""

    @pytest.fixture(autouse=True)
    def _hub(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    def test_a_name_is_refused_with_what_the_network_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _hub_raises(monkeypatch, ConnectionError("no route to host"))
        with pytest.raises(ConfigError, match=r"the hub cannot be asked.*no route to host"):
            load_tokenizer("nobody/has-this")
        assert "no route to host" in hub_trouble("nobody/has-this")

    def test_a_hub_that_says_nothing_is_not_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hold = threading.Event()
        monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *_, **__: hold.wait(60))
        monkeypatch.setattr(tokenizer_loading, "HUB_TIMEOUT_S", 0.05)
        try:
            assert "did not answer within" in hub_trouble("nobody/has-this")
            with pytest.raises(ConfigError, match="did not answer within"):
                load_tokenizer("nobody/has-this")
        finally:
            hold.set()

    def test_what_is_cached_is_asked_of_nobody_at_a_start_and_loads_without_the_hub(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = tmp_path / "hub" / "models--our--model"
        shutil.copytree(DEMO_TOKENIZER_PATH, model / "snapshots" / "abc")
        (model / "snapshots" / "abc" / "config.json").write_text('{"model_type": "qwen2"}', encoding="utf-8")
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text("abc", encoding="utf-8")
        asked = _hub_raises(monkeypatch, ConnectionError("no route to host"))
        assert hub_trouble("our/model") == ""
        assert asked == []
        assert len(load_tokenizer("our/model")) == len(load_tokenizer(DEMO_TOKENIZER_PATH))


def _hub_raises(monkeypatch: pytest.MonkeyPatch, error: Exception) -> list[str]:
    """Makes every question to the hub fail; returns the list of what is asked."""
    asked: list[str] = []

    def ask(url: str, **_: object) -> None:
        asked.append(url)
        raise error

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", ask)
    return asked
