"""The command ``engine``: its options become the settings of the engine that it serves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from rollout_buffer_lab import embedded_engine
from rollout_buffer_lab.cli.engine import engine
from rollout_buffer_lab.embedded_engine.settings import EmbeddedEngineSettings


@pytest.mark.parametrize(("flags", "seed"), [((), None), (("--seed", "0"), 0)])
def test_a_model_is_seeded_only_if_a_seed_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], seed: int | None
) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    served: list[EmbeddedEngineSettings] = []
    monkeypatch.setattr(embedded_engine, "server", SimpleNamespace(serve=served.append), raising=False)
    app = typer.Typer()
    app.command()(engine)

    result = CliRunner().invoke(app, ["--model", str(tmp_path), *flags])

    assert result.exit_code == 0, result.output
    assert [settings.seed for settings in served] == [seed]
