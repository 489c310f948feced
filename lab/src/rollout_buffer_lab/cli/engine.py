"""The command ``engine``: SGLang's HTTP interface without SGLang."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from slime_plugins.rollout_buffer.cli.commands.serve import LogFormatOption
from slime_plugins.rollout_buffer.cli.common import errors, report_errors
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.install_hints import install_lab
from slime_plugins.rollout_buffer.observability.logs import LogFormat, set_up_logging
from slime_plugins.rollout_buffer.serve_settings import DEFAULT_HOST

EngineToken = Annotated[
    Path | None, typer.Option("--token-file", help="File whose first line is the token that requests must bring.")
]
Host = Annotated[str, typer.Option(help="Address to serve on; anything but loopback needs --token-file.")]
Port = Annotated[int, typer.Option(help="Port to serve on.")]
EngineModel = Annotated[
    Path | None,
    typer.Option(
        "--model",
        help="Folder of a small model in Hugging Face layout: serves it, by transformers, for laptops and tests.",
        show_default="none: the stand-in",
    ),
]
EngineDevice = Annotated[str, typer.Option(help="Where the model runs: auto, cpu, cuda or mps.")]
EngineDtype = Annotated[
    str, typer.Option(help="The model's numbers: float32, bfloat16 or float16. A trainer's log-probs need float32.")
]
ContextLength = Annotated[
    int | None, typer.Option(min=1, help="Most tokens of a request of the model's.", show_default="the model's own")
]
MaxRunning = Annotated[int, typer.Option(min=1, help="Requests of the model's at once; others wait.")]
EngineThreads = Annotated[int | None, typer.Option(min=1, help="Threads of the model's.", show_default="torch's own")]
EngineTokenizer = Annotated[Path, typer.Option(help="Tokenizer folder.", show_default="the project's demo tokenizer")]
Skill = Annotated[float, typer.Option(min=0.0, max=1.0, help="How well the scripted policy plays.")]
Seed = Annotated[
    int | None, typer.Option(help="Seed of what is sampled.", show_default="0; a model's: another each time")
]
Latency = Annotated[float, typer.Option(min=0.0, help="Seconds before the first token of an answer.")]
TokenLatency = Annotated[float, typer.Option(min=0.0, help="Seconds before each further token.")]
Script = Annotated[
    Path | None,
    typer.Option(
        help="JSONL of replies to give in place of the scripted policy's: a line is a text, a message with tool_calls, "
        "or a list of them, one for each turn of a conversation.",
        show_default="none",
    ),
]
TokenRecords = Annotated[
    bool,
    typer.Option("--token-records", help="Tell made-up experts and ids that top_p kept, where asked."),
]


def engine(
    host: Host = DEFAULT_HOST,
    port: Port = 30000,
    token_file: EngineToken = None,
    tokenizer: EngineTokenizer = DEMO_TOKENIZER_PATH,
    skill: Skill = 0.7,
    script: Script = None,
    seed: Seed = 0,
    latency_s: Latency = 0.0,
    token_latency_s: TokenLatency = 0.0,
    model: EngineModel = None,
    device: EngineDevice = "auto",
    dtype: EngineDtype = "float32",
    context_length: ContextLength = None,
    max_running: MaxRunning = 32,
    threads: EngineThreads = None,
    token_records: TokenRecords = False,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Serve SGLang's HTTP interface without SGLang: a small model (--model), or a scripted policy that is no model.

    Both are for laptops and tests.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would warn that torch is missing: it is not needed
    if model is not None:
        _serve_model(
            log_format,
            model_path=model,
            host=host,
            port=port,
            token_file=token_file,
            seed=seed,
            device=device,
            dtype=dtype,
            context_length=context_length,
            max_running=max_running,
            threads=threads,
        )
        return
    from rollout_buffer_lab.scripted_engine import server as scripted_engine
    from rollout_buffer_lab.scripted_engine.given_replies import read_script
    from rollout_buffer_lab.scripted_engine.policy import reply_to
    from rollout_buffer_lab.scripted_engine.settings import ScriptedEngineSettings

    set_up_logging(log_format)
    with report_errors():
        if not (tokenizer / "tokenizer.json").is_file():
            raise ConfigError(
                f"--tokenizer {tokenizer} holds no tokenizer.json: give a model's or a tokenizer's folder"
            )
        settings = ScriptedEngineSettings(
            host=host,
            port=port,
            token_file=token_file,
            tokenizer_path=tokenizer,
            skill=skill,
            seed=seed or 0,
            latency_s=latency_s,
            token_latency_s=token_latency_s,
            token_records=token_records,
        )
        scripted_engine.serve(settings, reply_to if script is None else read_script(script))


def _serve_model(log_format: LogFormat, **settings: Any) -> None:
    """The embedded engine: what ``engine --model`` serves."""
    try:
        from rollout_buffer_lab.embedded_engine import server as embedded
        from rollout_buffer_lab.embedded_engine.settings import EmbeddedEngineSettings
    except ImportError as error:
        message = f"the embedded engine needs the extra 'embedded-engine' ({error}): {install_lab('embedded-engine')}"
        errors.print(f"rollout-buffer: {message}", style="red", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    set_up_logging(log_format)
    with report_errors():
        embedded.serve(EmbeddedEngineSettings(**settings))
