"""The command line: one app, whose larger commands have rooms of their own. Exit codes: see ``cli_common``."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import orjson
import requests
import typer
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from slime_plugins.rollout_buffer import cli_eval, cli_export, cli_inspect, cli_prune, cli_skip_list
from slime_plugins.rollout_buffer.cli_common import (
    DEFAULT_URL,
    EXIT_CODES,
    AndroidConfig,
    AndroidSetting,
    AsJson,
    JobId,
    Url,
    connect,
    console,
    errors,
    local_time,
    print_json,
    print_page,
    said_plainly,
)
from slime_plugins.rollout_buffer.config import DEFAULT_HOST, DEFAULT_PORT, build_serve_settings, token_from_environment
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.errors import ConfigError, UnavailableError
from slime_plugins.rollout_buffer.gateway.settings import DEFAULT_GATEWAY_PORT
from slime_plugins.rollout_buffer.logs import LOG_FORMAT_VARIABLE, LogFormat, set_up_logging
from slime_plugins.rollout_buffer.progress import job_table

logger = logging.getLogger(__name__)

app = typer.Typer(
    name="rollout-buffer",
    help="A durable rollout buffer for training agents with slime.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
LogFormatOption = Annotated[
    LogFormat,
    typer.Option(
        "--log-format",
        envvar=LOG_FORMAT_VARIABLE,
        help="Lines of text, or of JSON with job, group and uid where known; children inherit it.",
    ),
]


class DemoTask(StrEnum):
    """What the demo plays."""

    ANDROID_WORLD = "android_world"
    STATELM = "statelm"


class RolloutModeName(StrEnum):
    """How an Android World episode becomes prompts."""

    INCREMENTAL = "incremental"
    HISTORY = "history"


def main() -> None:
    """Runs the command line."""
    app()


def _tell(text: str, log_format: LogFormat) -> None:
    """Says something at a server's start, as a line of its log where that is JSON."""
    if log_format is LogFormat.JSON:
        logger.info("%s", text)
    else:
        errors.print(text, highlight=False, soft_wrap=True)


@app.command()
def serve(
    data_dir: Annotated[
        Path, typer.Option(help="Everything that must survive: database, payloads, screenshots, logs.")
    ] = Path("rollout_buffer_data"),
    data_root: Annotated[
        list[Path] | None,
        typer.Option(help="Folder that input files may lie under; repeatable. [default: the working directory]"),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to serve on; anything but loopback needs --token-file.")
    ] = DEFAULT_HOST,
    port: Annotated[int, typer.Option(help="Port to serve on.")] = DEFAULT_PORT,
    workers: Annotated[int, typer.Option(help="gunicorn worker processes.")] = 2,
    threads: Annotated[int, typer.Option(help="Threads of each worker; waiting polls use at most half.")] = 16,
    token_file: Annotated[
        Path | None, typer.Option(help="File whose first line is the bearer token clients must send.")
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(help="Largest request body.")] = 256 * 1024 * 1024,
    retain_delivered_s: Annotated[
        float | None, typer.Option(help="Forget the bytes of what was delivered longer ago. [default: keep everything]")
    ] = None,
    max_data_bytes: Annotated[
        int | None, typer.Option(help="Most that --data-dir may hold; writes beyond answer 507. [default: unlimited]")
    ] = None,
    generator_dir: Annotated[
        list[Path] | None, typer.Option(help="Folder with generator files of your own; repeatable.")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="Ray cluster that holds the devices. [default: a local one, started when needed]")
    ] = None,
    ray_num_cpus: Annotated[int | None, typer.Option(help="CPUs of the local Ray cluster.")] = None,
    gateway_port: Annotated[
        int | None, typer.Option(help="Also serve the OpenAI-compatible gateway, on this port. [default: no gateway]")
    ] = None,
    scoring_host: Annotated[
        list[str] | None, typer.Option(help="Host that a gateway session's scoring_url may name; repeatable.")
    ] = None,
    log_format: LogFormatOption = LogFormat.TEXT,
    android_config: AndroidConfig = None,
    android: AndroidSetting = None,
) -> None:
    """Serve the buffer: the supervisor with its gunicorn workers and its runners, until SIGTERM or Ctrl-C."""
    from slime_plugins.rollout_buffer.supervisor import Supervisor

    set_up_logging(log_format)
    with said_plainly():
        settings = build_serve_settings(
            host=host,
            port=port,
            data_dir=data_dir,
            data_roots=tuple(data_root or ()),
            workers=workers,
            threads=threads,
            token_file=token_file,
            max_body_bytes=max_body_bytes,
            retain_delivered_s=retain_delivered_s,
            max_data_bytes=max_data_bytes,
            generator_dirs=tuple(generator_dir or ()),
            ray_address=ray_address,
            ray_num_cpus=ray_num_cpus,
            gateway_port=gateway_port,
            scoring_hosts=tuple(scoring_host or ()),
        )
        _set_android_settings(android_config, android)
        _tell(f"settings: {settings.model_dump_json()}", log_format)
        Supervisor(settings, on_ready=lambda url: _tell(f"rollout buffer serving on {url}", log_format)).run()


@app.command()
def gateway(
    data_dir: Annotated[Path, typer.Option(help="The data directory of `serve`, on this host.")] = Path(
        "rollout_buffer_data"
    ),
    host: Annotated[
        str, typer.Option(help="Address to serve on; anything but loopback needs --token-file.")
    ] = DEFAULT_HOST,
    port: Annotated[int, typer.Option(help="Port to serve on.")] = DEFAULT_GATEWAY_PORT,
    public_url: Annotated[
        str | None, typer.Option(help="Where agents reach it. [default: the address they opened the session at]")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File whose first line is the bearer token that opens sessions.")
    ] = None,
    scoring_host: Annotated[
        list[str] | None, typer.Option(help="Host that a session's scoring_url may name; repeatable.")
    ] = None,
    max_sessions: Annotated[int, typer.Option(min=1, help="Sessions that may be open at once.")] = 4096,
    idle_timeout_s: Annotated[float, typer.Option(help="Seconds without a request after which one expires.")] = 900.0,
    session_timeout_s: Annotated[float, typer.Option(help="Seconds that one may live.")] = 14400.0,
    max_body_bytes: Annotated[int, typer.Option(help="Largest request body.")] = 64 * 1024 * 1024,
    max_data_bytes: Annotated[int | None, typer.Option(help="As of `serve`. [default: unlimited]")] = None,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Serve the OpenAI-compatible gateway alone, beside a buffer on this host, until SIGTERM or Ctrl-C."""
    from slime_plugins.rollout_buffer.gateway import main as gateway_main
    from slime_plugins.rollout_buffer.gateway.settings import build_gateway_settings

    set_up_logging(log_format)
    with said_plainly():
        settings = build_gateway_settings(
            data_dir=data_dir,
            host=host,
            port=port,
            public_url=public_url,
            token_file=token_file,
            scoring_hosts=tuple(scoring_host or ()),
            max_sessions=max_sessions,
            idle_timeout_s=idle_timeout_s,
            session_timeout_s=session_timeout_s,
            max_body_bytes=max_body_bytes,
            max_data_bytes=max_data_bytes,
        )
        gateway_main.serve(settings, on_ready=lambda url: _tell(f"gateway serving on {url}", log_format))


@app.command()
def remote_rollout(
    host: Annotated[
        str, typer.Option(help="Address to serve on; anything but loopback needs --token-file.")
    ] = DEFAULT_HOST,
    port: Annotated[int, typer.Option(help="Port to serve on.")] = 8891,
    token_file: Annotated[
        Path | None, typer.Option(help="File whose first line is the bearer token to ask for.")
    ] = None,
    callback_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Host (host, host:port, *.domain, network) that a server_url may name; repeatable. "
            "[default: this machine]"
        ),
    ] = None,
    tokenizer_root: Annotated[
        list[Path] | None, typer.Option(help="Folder that named tokenizers may lie under; repeatable.")
    ] = None,
    tokenizer: Annotated[
        list[str] | None, typer.Option(help="NAME=FOLDER: the folder of a tokenizer that requests name so; repeatable.")
    ] = None,
    default_tokenizer: Annotated[
        str | None, typer.Option(help="Name of the tokenizer where a request names none. [default: refused]")
    ] = None,
    trust_remote_code: Annotated[
        list[str] | None, typer.Option(help="Name of a tokenizer whose own code may run; repeatable.")
    ] = None,
    download_tokenizers: Annotated[
        bool, typer.Option("--download-tokenizers", help="Fetch named tokenizers from the model hub.")
    ] = False,
    engine_url: Annotated[
        str | None, typer.Option(help="SGLang: turns the trainer's side on. [default: the agent's side alone]")
    ] = None,
    buffer_url: Annotated[
        str | None, typer.Option(help="The buffer that the trainer's side writes trajectories to. [default: none]")
    ] = None,
    tools: Annotated[
        str | None,
        typer.Option(
            help="MODULE:NAME: the object that offers the tools that rollouts are played with. [default: a calculator]"
        ),
    ] = None,
    only_opened: Annotated[
        bool, typer.Option("--only-opened", help="Refuse turns of rollouts that were not opened by POST /rollouts.")
    ] = False,
    only_exact_counts: Annotated[
        bool, typer.Option("--only-exact-counts", help="Refuse the guide's count where re-tokenising made it differ.")
    ] = False,
    idle_s: Annotated[float, typer.Option(help="Seconds without a turn after which a rollout expires.")] = 3600.0,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Serve the remote rollout protocol: play rollouts for trainers, and with an engine be the trainer."""
    from slime_plugins.rollout_buffer.remote_rollout import main as remote
    from slime_plugins.rollout_buffer.remote_rollout.settings import TokenizerSettings

    set_up_logging(log_format)
    with said_plainly():
        tokenizers = TokenizerSettings(
            roots=tuple(tokenizer_root or ()),
            folders=remote.named_folders(tokenizer or []),
            remote_code_names=frozenset(trust_remote_code or ()),
            download=download_tokenizers,
            default_name=default_tokenizer,
        )
        settings = remote.RemoteRolloutSettings(
            host=host,
            port=port,
            token_file=token_file,
            engine_url=engine_url,
            buffer_url=buffer_url,
            buffer_token=token_from_environment(),
            tokenizers=tokenizers,
            open_unknown=not only_opened,
            text_counts=not only_exact_counts,
            idle_s=idle_s,
            tools=tools,
            **({"callback_hosts": tuple(callback_host)} if callback_host else {}),
        )
        remote.serve(settings, on_ready=lambda url: _tell(f"remote rollout serving on {url}", log_format))


def _set_android_settings(config: Path | None, assignments: list[str] | None) -> None:
    """Checks the settings and puts them into the environment, where the runners find them."""
    from slime_plugins.rollout_buffer.generator.android_world.config import environment_for

    os.environ.update(environment_for(config, assignments or []))


@app.command()
def jobs(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List the jobs, newest first."""
    with said_plainly():
        found = connect(url).jobs()
    if as_json:
        print_json(found)
        return
    table = Table("job", "task type", "state", "groups", "ready", "delivered", "filtered", "failed", "cause")
    for job in found:
        groups = job["groups"]
        total = sum(groups.values())
        numbers = [str(groups[state]) for state in ("ready", "delivered", "filtered", "failed")]
        table.add_row(job["job_id"], job["task_type"], job["state"], str(total), *numbers, job["cause"])
    console.print(table if found else "no jobs yet")


@app.command()
def status(
    job_id: Annotated[str | None, typer.Argument(help="One job; all open ones when left out.")] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing it until Ctrl-C.")] = False,
) -> None:
    """Show how far jobs are, every slot in exactly one state, and why nothing moves."""
    client = connect(url)

    def read() -> list[dict[str, Any]]:
        found = [client.job(job_id)] if job_id is not None else client.jobs()
        shown = [job for job in found if job_id is not None or job["state"] in ("running", "paused")]
        return [{**job, "now": client.explanation(job["job_id"])} for job in shown]

    with said_plainly():
        if as_json:
            print_json(read())
        elif watch:
            _watch(read)
        else:
            console.print(job_table(read()))


def _watch(read: Callable[[], list[dict[str, Any]]]) -> None:
    """Shows it anew every second; a buffer that goes away is waited for, once it has answered."""
    with Live(job_table(read()), console=console, refresh_per_second=4) as live, suppress(KeyboardInterrupt):
        while True:
            time.sleep(1.0)
            try:
                live.update(job_table(read()))
            except (requests.RequestException, UnavailableError):
                live.update(Text(f"no answer from the buffer since {local_time(time.time())}; asking again"))
                time.sleep(4.0)


def _change(verb: str) -> Callable[[str, str, bool], None]:
    def command(job_id: JobId, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
        with said_plainly():
            job = getattr(connect(url), verb)(job_id)
        if as_json:
            print_json(job)
        else:
            console.print(f"{job['job_id']} is {job['state']}")

    return command


app.command("cancel", help="End a job; what is finished stays and can still be fetched.")(_change("cancel"))
app.command("pause", help="Let running episodes end and start no new ones.")(_change("pause"))
app.command("resume", help="Go on after pause.")(_change("resume"))


@app.command()
def deliveries(
    job_id: JobId,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many at most.")] = 20,
    cursor: Annotated[int | None, typer.Option(help="Where the page before ended.")] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """List what was handed out of a job, newest first."""
    with said_plainly():
        page = connect(url).deliveries(job_id, limit=limit, cursor=cursor)
    if as_json:
        print_json(page)
        return
    table = Table("delivery", "state", "groups", "samples", "handed out", "consumer")
    for entry in page["deliveries"]:
        numbers = (str(entry["groups"]), str(entry["samples"]), local_time(entry["created_at"]))
        table.add_row(entry["delivery_id"], entry["state"], *numbers, entry["consumer_id"] or "")
    print_page(table if page["deliveries"] else "nothing was handed out yet", page)


@app.command()
def replay(
    delivery_id: Annotated[str, typer.Argument(help="A delivery's id, as `rollout-buffer deliveries` lists it.")],
    output: Annotated[Path, typer.Option(help="File that gets the reply, byte for byte as its poll got it.")],
    images: Annotated[str, typer.Option(help="Screenshots `inline` as data URIs, or by `hash`.")] = "inline",
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Write the groups of a past delivery to a file. Changes nothing in the buffer."""
    with said_plainly():
        body = connect(url).delivery_body(delivery_id, images=images)
        try:
            output.write_bytes(body)
        except OSError as error:
            raise ConfigError(f"--output {output} cannot be written: {error.strerror}") from error
    samples = len(orjson.loads(body)["data"]["data"])
    if as_json:
        print_json({"delivery_id": delivery_id, "samples": samples, "bytes": len(body), "output": str(output)})
    else:
        console.print(f"{samples} samples, {len(body)} bytes, in {output}")


@app.command()
def trajectories(
    job_id: Annotated[str | None, typer.Option(help="Only those of this job.")] = None,
    instance_id: Annotated[str | None, typer.Option(help="Only those of this instance.")] = None,
    outcome: Annotated[str | None, typer.Option(help="Only those that ended so, like `truncated`.")] = None,
    stop_reason: Annotated[str | None, typer.Option(help="Only those that stopped for this reason.")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Only those with at least this reward.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Only those with at most this reward.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many at most.")] = 20,
    cursor: Annotated[int | None, typer.Option(help="Where the page before ended.")] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Search trajectories, newest first."""
    with said_plainly():
        page = connect(url).trajectories(
            job_id=job_id,
            instance_id=instance_id,
            outcome=outcome,
            stop_reason=stop_reason,
            min_reward=min_reward,
            max_reward=max_reward,
            limit=limit,
            cursor=cursor,
        )
    if as_json:
        print_json(page)
        return
    table = Table("uid", "instance", "job", "outcome", "stop reason", "reward", "group", "written")
    for entry in page["trajectories"]:
        ended = (entry["outcome"], entry["stop_reason"], f"{entry['reward']:g}")
        group = "late" if entry["late"] else entry["group_state"] or ""
        names = (entry["uid"], entry["instance_id"], entry["job_id"])
        table.add_row(*names, *ended, group, local_time(entry["created_at"]))
    print_page(table if page["trajectories"] else "no such trajectory", page)


@app.command()
def health(url: Url = DEFAULT_URL, as_json: AsJson = True) -> None:
    """Ask the buffer how it is; the answer is JSON in any case. Exit code 1 when it is not well."""
    del as_json
    with said_plainly():
        try:
            print_json(connect(url).health())
        except UnavailableError as error:
            errors.print(f"rollout-buffer: {error.message}", style="red", highlight=False)
            raise typer.Exit(1) from error


@app.command()
def engine(
    host: Annotated[str, typer.Option(help="Address to serve on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to serve on.")] = 30000,
    tokenizer: Annotated[
        Path, typer.Option(help="Tokenizer folder.", show_default="the project's demo tokenizer")
    ] = DEMO_TOKENIZER_PATH,
    skill: Annotated[float, typer.Option(min=0.0, max=1.0, help="How well the scripted policy plays.")] = 0.7,
    seed: Annotated[int, typer.Option(help="Seed of its luck.")] = 0,
    latency_s: Annotated[float, typer.Option(min=0.0, help="Seconds before the first token of an answer.")] = 0.0,
    token_latency_s: Annotated[float, typer.Option(min=0.0, help="Seconds before each further token.")] = 0.0,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Serve the stand-in engine: SGLang's HTTP interface played by a scripted policy. It is no model."""
    try:
        from slime_plugins.rollout_buffer.stand_in_engine import server as stand_in
        from slime_plugins.rollout_buffer.stand_in_engine.settings import StandInSettings
    except ImportError as error:
        says = f"the stand-in engine needs the extra 'android' ({error}): pip install 'slime-rollout-buffer[android]'"
        errors.print(f"rollout-buffer: {says}", style="red", highlight=False, markup=False)
        raise typer.Exit(1) from error
    set_up_logging(log_format)
    with said_plainly():
        stand_in.serve(
            StandInSettings(
                host=host,
                port=port,
                tokenizer_path=tokenizer,
                skill=skill,
                seed=seed,
                latency_s=latency_s,
                token_latency_s=token_latency_s,
            )
        )


@app.command()
def doctor(
    data_dir: Annotated[Path, typer.Option(help="Folder that `serve` is to keep its data in.")] = Path(
        "rollout_buffer_data"
    ),
    engine_url: Annotated[
        str | None, typer.Option(help="Inference engine that must answer. [default: not asked]")
    ] = None,
    android_config: AndroidConfig = None,
    android: AndroidSetting = None,
    as_json: AsJson = False,
) -> None:
    """Say what this machine lacks for the devices that the Android World settings ask for. Exit code 1 when it does."""
    from slime_plugins.rollout_buffer.doctor import Examination, State, examine
    from slime_plugins.rollout_buffer.generator.android_world.config import load_settings

    with said_plainly():
        _set_android_settings(android_config, android)
        settings = load_settings({})
    findings = examine(Examination(settings=settings, data_dir=data_dir, engine_url=engine_url))
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        table = Table("what", "state", "found", "remedy", title=f"device: {settings.device}")
        for finding in findings:
            table.add_row(*map(escape, (finding.name, finding.state.value, finding.detail, finding.remedy)))
        console.print(table)
    if any(finding.state is State.MISSING for finding in findings):
        raise typer.Exit(1)


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Where the demo keeps its data, logs and results.")] = Path(".demo"),
    task: Annotated[
        DemoTask, typer.Option(help="Simulated phones, or questions over long documents.")
    ] = DemoTask.ANDROID_WORLD,
    rollouts: Annotated[int, typer.Option(min=1, max=20, help="How many rollouts the trainer asks for.")] = 3,
    skill: Annotated[float, typer.Option(min=0.0, max=1.0, help="Skill of the stand-in engine's policy.")] = 0.7,
    phones: Annotated[int, typer.Option(min=1, max=64, help="Simulated phones.")] = 4,
    rollout_mode: Annotated[
        RolloutModeName, typer.Option(help="One growing sequence per episode, or a prompt and a row for every turn.")
    ] = RolloutModeName.INCREMENTAL,
) -> None:
    """Play the whole thing on this machine: server, stand-in engine, phones or documents, and a trainer that polls."""
    try:
        from slime_plugins.rollout_buffer.demo import DemoSettings, run_demo
    except ImportError as error:
        says = f"the demo needs the extra 'android' ({error}): pip install 'slime-rollout-buffer[android]'"
        errors.print(f"rollout-buffer: {says}", style="red", highlight=False, markup=False)
        raise typer.Exit(1) from error
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would warn that torch is missing: it is not needed
    with said_plainly():
        settings = DemoSettings(
            folder=folder,
            task=task.value,
            rollouts=rollouts,
            skill=skill,
            phones=phones,
            rollout_mode=rollout_mode.value,
        )
        run_demo(settings, console)


for room in (cli_inspect, cli_export, cli_skip_list, cli_prune, cli_eval):
    room.register(app)
