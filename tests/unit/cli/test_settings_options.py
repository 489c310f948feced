"""A setting of ``serve`` is one field: its flag, its variable and its key in a file say the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from slime_plugins.rollout_buffer.cli.settings_options import with_options, with_settings
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.gateway.settings import GatewaySettings
from slime_plugins.rollout_buffer.remote_rollout.settings import RemoteRolloutSettings
from slime_plugins.rollout_buffer.serve_settings import (
    ListenerSettings,
    ServeSettings,
    build_serve_settings,
    build_settings,
)


@pytest.fixture
def served() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def app(served: list[dict[str, Any]]) -> typer.Typer:
    """A command line whose ``serve`` only keeps its settings."""
    found = typer.Typer()

    @found.command()
    @with_settings(ServeSettings, "BUFFER")
    def serve(settings: dict[str, Any]) -> None:
        served.append(settings)

    return found


def call(app: typer.Typer, *arguments: str, **variables: str) -> str:
    result = CliRunner().invoke(app, arguments, env=variables)
    assert result.exit_code in (0, 2), result.output
    return " ".join(result.output.replace("│", " ").split())


def test_without_flag_variable_or_file_the_fields_defaults_hold(app: typer.Typer, served: list[dict[str, Any]]) -> None:
    call(app)
    assert build_serve_settings(**served[0]) == ServeSettings()


@pytest.mark.parametrize("text", ["# port: 1\n", "port: null\ndata_root: null\n"])
def test_a_file_without_values_sets_nothing(
    app: typer.Typer, served: list[dict[str, Any]], tmp_path: Path, text: str
) -> None:
    (tmp_path / "serve.yaml").write_text(text)
    call(app, "--config", str(tmp_path / "serve.yaml"))
    assert build_serve_settings(**served[0]) == ServeSettings()


def test_a_flag_comes_before_a_variable_and_that_before_the_file(
    app: typer.Typer, served: list[dict[str, Any]], tmp_path: Path
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"port: 1\nworkers: 3\nthreads: 5\ndata_root: {tmp_path}\nallowed_host: [a.lan, b.lan]\n")
    call(app, "--port", "9", "--config", str(file), BUFFER_PORT="8", BUFFER_WORKERS="7")
    settings = build_serve_settings(**served[0])
    assert (settings.port, settings.workers, settings.threads) == (9, 7, 5)
    assert (settings.data_roots, settings.allowed_hosts) == ((tmp_path,), ("a.lan", "b.lan"))
    call(app, BUFFER_CONFIG=str(file), BUFFER_ALLOWED_HOST="c.lan d.lan")
    assert build_serve_settings(**served[1]).allowed_hosts == ("c.lan", "d.lan")


@pytest.mark.parametrize(
    ("arguments", "variables", "file", "says"),
    [
        (("--port", "x"), {}, "", "'--port': Input should be a valid integer"),
        ((), {"BUFFER_PORT": "x"}, "", "'--port': Input should be a valid integer"),
        ((), {"BUFFER_DATAROOT": "x"}, "", "BUFFER_DATAROOT is not known; did you mean BUFFER_DATA_ROOT?"),
        ((), {}, "port: x", "'--port': Input should be a valid integer"),
        ((), {}, "prot: 1", "serve.yaml: prot is not known: did you mean port?"),
        ((), {}, "- port", "serve.yaml must be a YAML mapping of settings"),
        ((), {}, "port: 1\nport: 2", "port"),
        ((), {}, "host: \xe9", "serve.yaml is not YAML: 'utf-8' codec"),
    ],
)
def test_a_bad_value_is_refused_with_where_it_stands(
    app: typer.Typer,
    served: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    variables: dict[str, str],
    file: str,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)  # a long path would be broken over lines
    Path("serve.yaml").write_text(file, encoding="latin-1")
    config = ("--config", "serve.yaml") if file else ()
    assert says in call(app, *config, *arguments, **variables)
    assert served == []


def test_variables_that_kubernetes_sets_for_a_service_of_that_name_are_left_alone(
    app: typer.Typer, served: list[dict[str, Any]]
) -> None:
    call(app, BUFFER_SERVICE_HOST="10.0.0.1", BUFFER_SERVICE_PORT="1", BUFFER_PORT_1_TCP_ADDR="10.0.0.1")
    assert len(served) == 1


@pytest.mark.parametrize("kind", [ServeSettings, GatewaySettings, RemoteRolloutSettings])
def test_a_process_that_other_machines_reach_needs_a_token(kind: type[ListenerSettings]) -> None:
    with pytest.raises(ConfigError, match="give --token-file"):
        build_settings(kind, {"host": "0.0.0.0"})


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Options of a command, as one group."""

    task: Annotated[str, typer.Option(help="What is played.")]
    seed: Annotated[int, typer.Option("--seed", "--start", min=0)] = 7


def test_a_command_gets_its_options_as_one_group_beside_others() -> None:
    told: list[tuple[Wanted, bool]] = []
    app = typer.Typer()

    @app.command()
    @with_options(Wanted)
    def play(wanted: Wanted, fast: Annotated[bool, typer.Option("--fast")] = False) -> None:
        """Play."""
        told.append((wanted, fast))

    assert CliRunner().invoke(app, ["--task", "math"]).exit_code == 0
    assert CliRunner().invoke(app, ["--task", "math", "--start", "3", "--fast"]).exit_code == 0
    assert CliRunner().invoke(app, ["--seed", "-1", "--task", "math"]).exit_code == 2
    assert told == [(Wanted(task="math"), False), (Wanted(task="math", seed=3), True)]
