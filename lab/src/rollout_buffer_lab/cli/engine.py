"""The command ``engine``: SGLang's HTTP interface without SGLang."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from slime_plugins.rollout_buffer.cli.commands.serve import LogFormatOption
from slime_plugins.rollout_buffer.cli.common import errors, report_errors
from slime_plugins.rollout_buffer.cli.settings_options import with_options
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.install_hints import install_lab
from slime_plugins.rollout_buffer.observability.logs import LogFormat, set_up_logging
from slime_plugins.rollout_buffer.serve_settings import DEFAULT_HOST


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of the command. With ``--model`` the scripted policy's options are ignored, without it the model's."""

    host: Annotated[str, typer.Option(help="Address to serve on; anything but loopback needs --token-file.")] = (
        DEFAULT_HOST
    )
    port: Annotated[int, typer.Option(help="Port to serve on.")] = 30000
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="File whose first line is the token that requests must bring.")
    ] = None
    tokenizer: Annotated[
        Path, typer.Option(help="Tokenizer folder (scripted policy).", show_default="the project's demo tokenizer")
    ] = DEMO_TOKENIZER_PATH
    skill: Annotated[float, typer.Option(min=0.0, max=1.0, help="How well the scripted policy plays.")] = 0.7
    script: Annotated[
        Path | None,
        typer.Option(
            help="JSONL of replies to give in place of the scripted policy's: a line is a text, a message with "
            "tool_calls, or a list of them, one for each turn of a conversation.",
            show_default="none",
        ),
    ] = None
    seed: Annotated[
        int | None, typer.Option(help="Seed of what is sampled.", show_default="0; with --model another each time")
    ] = None
    latency_s: Annotated[float, typer.Option(min=0.0, help="Seconds before a scripted reply's first token.")] = 0.0
    token_latency_s: Annotated[float, typer.Option(min=0.0, help="Seconds between a scripted reply's tokens.")] = 0.0
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            help="Folder of a small model in Hugging Face layout: serves it, by transformers, for laptops and tests.",
            show_default="none: the scripted policy",
        ),
    ] = None
    device: Annotated[str, typer.Option(help="Where the model runs: auto, cpu, cuda or mps.")] = "auto"
    dtype: Annotated[
        str, typer.Option(help="The model's numbers: float32, bfloat16 or float16. A trainer's log-probs need float32.")
    ] = "float32"
    context_length: Annotated[
        int | None,
        typer.Option(min=1, help="Most tokens of prompt and reply (--model).", show_default="the model's own"),
    ] = None
    max_running: Annotated[int, typer.Option(min=1, help="Requests that the model serves at once; others wait.")] = 32
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads that the model runs on.", show_default="torch's own")
    ] = None
    token_records: Annotated[
        bool,
        typer.Option("--token-records", help="Scripted policy: return made-up experts and top_p ids if asked."),
    ] = False


@with_options(EngineOptions)
def engine(options: EngineOptions, log_format: LogFormatOption = LogFormat.TEXT) -> None:
    """Serve SGLang's HTTP interface without SGLang: a small model (--model), or a scripted policy that is no model.

    Both are for laptops and tests.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # without torch, which is not needed, it would warn
    serve = _serve_policy if options.model is None else _serve_model
    serve(options, log_format)


def _serve_policy(options: EngineOptions, log_format: LogFormat) -> None:
    from rollout_buffer_lab.scripted_engine import server as scripted_engine
    from rollout_buffer_lab.scripted_engine.given_replies import read_script
    from rollout_buffer_lab.scripted_engine.policy import reply_to
    from rollout_buffer_lab.scripted_engine.settings import ScriptedEngineSettings

    set_up_logging(log_format)
    with report_errors():
        if not (options.tokenizer / "tokenizer.json").is_file():
            raise ConfigError(
                f"--tokenizer {options.tokenizer} holds no tokenizer.json: give a model's or a tokenizer's folder"
            )
        settings = ScriptedEngineSettings(
            host=options.host,
            port=options.port,
            token_file=options.token_file,
            tokenizer_path=options.tokenizer,
            skill=options.skill,
            seed=options.seed or 0,
            latency_s=options.latency_s,
            token_latency_s=options.token_latency_s,
            token_records=options.token_records,
        )
        scripted_engine.serve(settings, reply_to if options.script is None else read_script(options.script))


def _serve_model(options: EngineOptions, log_format: LogFormat) -> None:
    try:
        from rollout_buffer_lab.embedded_engine import server as embedded
        from rollout_buffer_lab.embedded_engine.settings import EmbeddedEngineSettings
    except ImportError as error:
        message = f"the embedded engine needs the extra 'embedded-engine' ({error}): {install_lab('embedded-engine')}"
        errors.print(f"rollout-buffer: {message}", style="red", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    set_up_logging(log_format)
    assert options.model is not None
    with report_errors():
        settings = EmbeddedEngineSettings(
            model_path=options.model,
            host=options.host,
            port=options.port,
            token_file=options.token_file,
            seed=options.seed,
            device=options.device,
            dtype=options.dtype,
            context_length=options.context_length,
            max_running=options.max_running,
            threads=options.threads,
        )
        embedded.serve(settings)
