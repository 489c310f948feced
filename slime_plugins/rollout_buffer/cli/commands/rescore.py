"""``rollout-buffer rescore``: adds a new reward version to stored trajectories.

``--with`` names a scorer. The code calls a loaded scorer a ``Judge``: it is called with each trajectory and returns the
trajectory's reward of the new version.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slime_plugins.rollout_buffer.cli.common import (
    AsJson,
    ServedDataDir,
    console,
    opened_store,
    print_json,
    report_errors,
)
from slime_plugins.rollout_buffer.credentials import redacted
from slime_plugins.rollout_buffer.errors import ConfigError, JudgeError, network_reason
from slime_plugins.rollout_buffer.extensions import Group, installed, load, missing

if TYPE_CHECKING:
    from slime_plugins.rollout_buffer.state.reward_versions import Judge


def rescore(
    job_id: Annotated[str, typer.Argument(help="The job whose trajectories are scored.")],
    scorer: Annotated[
        str, typer.Option("--with", help="module:function, /path/file.py:function, or the http address of a service.")
    ],
    name: Annotated[str | None, typer.Option(help="Name of the version; by default the scorer.")] = None,
    data_dir: ServedDataDir = Path("rollout_buffer_data"),
    retries: Annotated[int, typer.Option(min=0, max=100, help="Number of retries after a failure of the scorer.")] = 3,
    timeout_s: Annotated[float, typer.Option(min=0.01, help="Time limit of each call, in seconds.")] = 60.0,
    at_once: Annotated[int, typer.Option(min=1, max=256, help="Trajectories that are scored at the same time.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Score the stored trajectories of a job again, as another version of their rewards; earlier versions are kept.

    The same name continues with trajectories that have no reward of that version yet. Exit code 1: a call failed.
    """
    from slime_plugins.rollout_buffer.state import reward_versions

    with report_errors():
        judge = judge_of(scorer, timeout_s)
        settings = reward_versions.RescoreSettings(retries=retries, timeout_s=timeout_s, at_once=at_once)
        with opened_store(data_dir) as store:
            shown = redacted(scorer)
            result = reward_versions.rescore(store, job_id, judge, name=name or shown, scorer=shown, settings=settings)
    failed = sum(result.failures.values())
    if as_json:
        numbers = {"version": result.version, "name": result.name, "scored": result.scored, "failed": failed}
        print_json({"job_id": job_id, **numbers, "failures": dict(result.failures.most_common(20))})
    else:
        console.print(f"version {result.version} ({result.name}): {result.scored} trajectories scored, {failed} failed")
        for failure, count in result.failures.most_common(5):
            console.print(f"{count} x {failure}")
    if failed:
        raise typer.Exit(1)


def judge_of(scorer: str, timeout_s: float) -> Judge:
    """Returns the judge that ``--with`` names: a function, or one that posts each trajectory to an HTTP service.

    Raises:
        ConfigError: the scorer does not exist, or cannot be loaded.
    """
    if scorer.startswith(("http://", "https://")):
        return _service(scorer, timeout_s)
    module_name, _, function_name = scorer.rpartition(":")
    if scorer in installed(Group.SCORERS):
        return load(Group.SCORERS, scorer)  # type: ignore[no-any-return]  # a package's function; its results are checked
    if not module_name or not function_name:
        forms = "name module:function, /path/file.py:function, an http address, or a scorer of a package"
        raise ConfigError(f"--with {scorer!r}: {forms}: {missing(Group.SCORERS, scorer)}")
    try:
        function = getattr(_module(module_name), function_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise ConfigError(f"--with {scorer}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ConfigError(f"--with {scorer}: {function_name} is no function")
    return function  # type: ignore[no-any-return]  # the user's function; its results are checked


def _module(name: str) -> Any:
    if not name.endswith(".py"):
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(f"rollout_buffer_scorer_{Path(name).stem}", name)
    if spec is None or spec.loader is None:
        raise ImportError(f"{name} is no Python file")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


def _service(url: str, timeout_s: float) -> Judge:
    """Returns a judge that posts ``{"trajectory": …}``; the reply holds ``reward`` and optionally ``turn_rewards``."""
    import requests

    def judge(trajectory: dict[str, Any]) -> Any:
        try:
            reply = requests.post(url, json={"trajectory": trajectory}, timeout=timeout_s, allow_redirects=False)
        except requests.RequestException as error:
            raise JudgeError(f"the scoring service cannot be reached: {network_reason(error)}") from error
        answer = None
        with suppress(ValueError):
            answer = reply.json()
        if reply.status_code != 200 or not isinstance(answer, dict):
            raise JudgeError(f"the scoring service answered {reply.status_code}: {reply.text[:200]}")
        return answer

    return judge
