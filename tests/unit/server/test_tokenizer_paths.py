"""Which tokenizers a job may name: folders under the roots, and names of the hub that the operator has allowed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from flask.testing import FlaskClient

from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.errors import InvalidPayloadError
from slime_plugins.rollout_buffer.server.tokenizer_paths import check_tokenizer


@pytest.fixture(autouse=True)
def _cached_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's cache on this host has one model."""
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    snapshot = cache / "models--Qwen--Qwen3-8B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    refs = cache / "models--Qwen--Qwen3-8B" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc", encoding="utf-8")


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A data root with a model, a folder of models that was allowed, and one that nobody spoke of."""
    for name in ("root", "allowed", "secret", "allowed2"):
        (tmp_path / name / "model").mkdir(parents=True)
    (tmp_path / "root" / "file.json").write_text("{}", encoding="utf-8")
    (tmp_path / "root" / "way_out").symlink_to(tmp_path / "secret")
    return tmp_path


def check(top: Path, named: str) -> None:
    check_tokenizer(named, [top / "root"], [str(top / "allowed"), "Qwen/Qwen3-8B"])


@pytest.mark.parametrize("folder", ["root/model", "root", "root/../root/model", "allowed/model", "allowed"])
def test_a_folder_in_a_root_or_on_the_list_is_taken(top: Path, folder: str) -> None:
    check(top, str(top / folder))


def test_an_allowed_name_of_the_hub_and_the_tokenizer_of_the_package_are_taken(top: Path) -> None:
    check(top, "Qwen/Qwen3-8B")
    check(top, str(DEMO_TOKENIZER_PATH))


FOLDERS = [
    "secret",
    "secret/model",
    "root/../secret",
    "root/way_out/model",
    "root/none",
    "root/file.json",
    "allowed2/model",
]
OUTSIDE = ["~nobody-there/model", "../../etc", "~"]
NAMES_OF_THE_HUB = ["Qwen/Qwen3-14B", "model", "http://host/model", "Qwen/Qwen3-8B/.."]


@pytest.mark.parametrize(
    ("named", "what"),
    [
        *(("{top}/" + folder, "a folder that jobs may use") for folder in FOLDERS),
        *((path, "a folder that jobs may use") for path in OUTSIDE),
        *((name, "a folder, or an allowed name of the model hub, that jobs may use") for name in NAMES_OF_THE_HUB),
    ],
)
def test_any_other_is_refused_with_the_option_that_would_allow_it(top: Path, named: str, what: str) -> None:
    with pytest.raises(InvalidPayloadError, match=f"is not {what} .* --allow-tokenizer"):
        check(top, named.format(top=top))


def test_a_refusal_does_not_say_whether_a_folder_outside_exists(top: Path) -> None:
    said = []
    for name in ("model", "nothing"):
        with pytest.raises(InvalidPayloadError) as refusal:
            check(top, str(top / "secret" / name))
        said.append(refusal.value.message.replace(name, "X"))
    assert said[0] == said[1]


def test_an_allowed_name_that_cannot_be_had_here_is_refused_at_once(top: Path) -> None:
    with pytest.raises(InvalidPayloadError, match=r"Qwen/Absent cannot be loaded .*: the hub is offline"):
        check_tokenizer("Qwen/Absent", [top / "root"], ["Qwen/Absent"])


def test_a_job_with_a_runner_is_held_to_it(make_client: Callable[..., FlaskClient], top: Path) -> None:
    client = make_client(data_roots=(top / "root",), allowed_tokenizers=("Qwen/Qwen3-8B",))
    start = {"task_type": "math", "remote_engine_url": "http://127.0.0.1:9", "instances": [{"instance_id": "a"}]}
    inside, outside = str(top / "root" / "model"), str(top / "secret" / "model")
    statuses = {
        named: client.post("/start_rollout", json={**start, "job_id": f"j{at}", "tokenizer_path": named}).status_code
        for at, named in enumerate([inside, "Qwen/Qwen3-8B", outside, "Qwen/Qwen3-14B"])
    }
    assert list(statuses.values()) == [200, 200, 400, 400]


def test_an_external_job_starts_without_a_tokenizer_that_it_may_not_use(
    make_client: Callable[..., FlaskClient], top: Path
) -> None:
    client = make_client(data_roots=(top / "root",))
    outside = str(top / "secret" / "model")
    reply = client.post("/start_rollout", json={"task_type": "external", "job_id": "j", "tokenizer_path": outside})
    assert reply.status_code == 200
    note = (reply.json or {})["notes"][0]
    assert outside in note
    assert "--allow-tokenizer" in note
    assert (client.get("/jobs/j").json or {})["settings"]["tokenizer_path"] is None
