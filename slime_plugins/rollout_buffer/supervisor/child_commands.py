"""Command lines and environments of the supervisor's children. They carry all settings, so a full disk prevents no
start."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.gateway.settings import GatewaySettings
from slime_plugins.rollout_buffer.serve_settings import ServeSettings, build_settings, read_token


def server_command(settings: ServeSettings, listening: Sequence[int]) -> list[str]:
    """Returns gunicorn's command line, with descriptors of listening sockets; the environment has its settings."""
    return [
        sys.executable, "-m", "gunicorn",
        "slime_plugins.rollout_buffer.server.asgi:create_application_from_environment()",
        *(f"--bind=fd://{descriptor}" for descriptor in listening), "--workers", str(settings.workers),
        "--worker-class", "asgi", "--asgi-lifespan", "off", "--http-parser", "python",
        "--limit-request-line", "8190", "--keep-alive", "30", "--timeout", "120", "--graceful-timeout", "3",
        "--error-logfile", "-", "--no-control-socket",
        "--config", "python:slime_plugins.rollout_buffer.server.gunicorn_config",
    ]  # fmt: skip


def gateway_settings(settings: ServeSettings, port: int) -> GatewaySettings:
    """Returns the settings of the gateway.

    Raises:
        ConfigError: a scoring host is invalid.
    """
    values = {
        "data_dir": settings.data_dir.resolve(),
        "host": settings.host,
        "port": port,
        "workers": settings.gateway_workers,
        "public_url": settings.gateway_public_url,
        "token_file": None if settings.token_file is None else settings.token_file.resolve(),
        "allowed_hosts": settings.allowed_hosts,
        "scoring_hosts": settings.scoring_hosts,
        "max_body_bytes": settings.max_body_bytes,
        "max_data_bytes": settings.max_data_bytes,
    }
    return build_settings(GatewaySettings, values)


def runner_command(
    settings: ServeSettings,
    job_key: int,
    heartbeat_fd: int,
    *,
    ray_address: str | None,
    generator_file: str | None,
    skip: Sequence[str],
) -> list[str]:
    """Returns the command line of a job's runner.

    ``generator_file`` defines the task type; ``skip`` names generator files that do not load.
    """
    command = [
        sys.executable, "-m", "slime_plugins.rollout_buffer.runner.main",
        "--data-dir", str(settings.data_dir.resolve()), "--job-key", str(job_key),
        "--buffer-url", settings.base_url, "--heartbeat-fd", str(heartbeat_fd),
    ]  # fmt: skip
    if generator_file is not None:
        command += ["--generator-file", generator_file]
    for folder in settings.generator_dirs:
        command += ["--generator-dir", str(folder)]
    for file in skip:
        command += ["--skip-generator", file]
    if settings.max_data_bytes is not None:
        command += ["--max-data-bytes", str(settings.max_data_bytes)]
    if ray_address is not None:
        command += ["--ray-address", ray_address]
    return command


def runner_environment(settings: ServeSettings, *, needs_ray: bool) -> dict[str, str]:
    """Returns a runner's environment: the tokens of this buffer and of the local Ray.

    Generators in slime's plain form write to this buffer as HTTP clients.

    Raises:
        OSError: a token cannot be read or written.
    """
    environment = local_ray_token(settings) if needs_ray else {}
    if settings.token_file is not None:
        try:
            environment["ROLLOUT_BUFFER_TOKEN"] = read_token(settings.token_file)
        except ConfigError as error:
            raise OSError(error.message) from error
    return environment


def local_ray_command(settings: ServeSettings, address_fd: int) -> list[str]:
    """Returns the command line of the local Ray, which writes its address to ``address_fd`` when it is ready."""
    command = [sys.executable, "-m", "slime_plugins.rollout_buffer.supervisor.local_ray"]
    command += ["--address-fd", str(address_fd)]
    if settings.ray_num_cpus is not None:
        command += ["--num-cpus", str(settings.ray_num_cpus)]
    return command


def local_ray_token(settings: ServeSettings) -> dict[str, str]:
    """Returns the variables that name the file with the local Ray's token; creates the file if it is missing.

    The local Ray needs a token because it listens on every interface. An external cluster (``--ray-address``) has its
    own token in the supervisor's environment.

    Raises:
        OSError: the token cannot be written.
    """
    if settings.ray_address is not None:
        return {}
    path = settings.data_dir.resolve() / "ray_token"
    if not path.exists() or not path.stat().st_size:  # empty after a write on a full disk
        partial = path.with_suffix(".partial")
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        partial.replace(path)
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}
