"""The check of an evaluation's engine before episodes are played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import requests

from slime_plugins.rollout_buffer.evaluation.plan import EngineFacts, EvaluationSettings, ask_engine


def test_the_key_is_sent_also_where_netrc_has_a_password_for_every_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []

    def send(_: object, request: requests.PreparedRequest, **__: Any) -> requests.Response:
        sent.append(request.headers["Authorization"])
        reply = requests.Response()
        reply.status_code = 404
        return reply

    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", send)
    (tmp_path / "netrc").write_text("default login user password other\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    settings = EvaluationSettings(
        output=tmp_path, task_type="t", tasks="", engine_url="http://h/v1", api="openai", model="m", api_key="key"
    )
    assert ask_engine(settings) == EngineFacts(model="m")
    assert sent == ["Bearer key"]
