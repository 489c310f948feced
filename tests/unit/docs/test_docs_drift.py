"""A setting, metric, command, variable or tool that the docs lack, or that only the docs have, is found."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer.main

from slime_plugins.rollout_buffer.cli.app import app
from slime_plugins.rollout_buffer.generator.context_editing.settings import ContextEditingSettings
from tools.wandb_dashboard import LAYOUT

ROOT = Path(__file__).resolve().parents[3]
Text = str
INTERNAL = {
    "ROLLOUT_BUFFER_DEVICE",
    "ROLLOUT_BUFFER_DEVICE_CHECKOUT",
    "ROLLOUT_BUFFER_SERVE_SETTINGS",
    "ROLLOUT_BUFFER_HEARTBEAT_FD",
    "ROLLOUT_BUFFER_READY_FD",
    "ROLLOUT_BUFFER_ANDROID_WORLD",
}
"""Variables that the project's processes set for each other; the last is only the beginning of other names."""


def page(*names: str) -> Text:
    return "\n".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in names)


def all_pages() -> Mapping[str, Text]:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    return {path.name: path.read_text(encoding="utf-8") for path in pages}


def commands(group: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in getattr(group, "commands", {}).items():
        yield f"{above}{name}", command
        yield from commands(command, f"{above}{name} ")


COMMANDS = dict(commands(typer.main.get_command(app)))


# --- what is, must be in the docs ------------------------------------------------------------------------------------


def lacking_trainer_metrics(text: Text) -> list[str]:
    names = [name for section in LAYOUT for panel in section.panels for name in panel.metrics]
    return [name for name in names if f"`{name}`" not in text]


def lacking_context_settings(text: Text) -> list[str]:
    return [name for name in ContextEditingSettings.model_fields if f"`{name}`" not in text]


def lacking_variables(text: Text) -> list[str]:
    folders = ("slime", "slime_plugins", "lab/src", "scripts", "tools", "examples")
    files = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".sh", ""))
    sources = "\n".join(path.read_text("utf-8") for path in files if path.is_file())
    found = set(re.findall(r"\bROLLOUT_BUFFER_[A-Z_]*[A-Z]\b", sources)) - INTERNAL
    return [name for name in sorted(found) if f"`{name}" not in text]


def lacking_programs(text: Text) -> list[str]:
    """Scripts, tools and benchmarks: each is named somewhere with its folder."""
    folders = {"scripts": "*", "tools": "*.py", "benchmarks": "bench_*.py"}
    programs = [path for folder, names in folders.items() for path in (ROOT / folder).glob(names) if path.is_file()]
    names = [str(path.relative_to(ROOT)) for path in programs if path.name not in ("environment", "__init__.py")]
    return [name for name in sorted(names) if name not in text and name.replace("/", ".")[:-3] not in text]


CHECKS: Mapping[str, tuple[Callable[[Text], list[str]], Callable[[], Text]]] = {
    "trainer metrics": (lacking_trainer_metrics, lambda: page("trainer")),
    "context editing settings": (lacking_context_settings, lambda: page("context_editing")),
    "environment variables": (lacking_variables, lambda: "\n".join(all_pages().values())),
    "programs": (lacking_programs, lambda: "\n".join(all_pages().values())),
}


@pytest.mark.parametrize("kind", CHECKS)
def test_everything_of_a_kind_is_in_the_docs(kind: str) -> None:
    lacking, text = CHECKS[kind]
    assert lacking(text()) == []


# --- what is in the docs, must be ------------------------------------------------------------------------------------


def shell_lines(text: Text) -> Iterator[str]:
    """The commands in blocks of shell: continued lines joined, comments and prompts taken off."""
    for block in re.findall(r"^```(?:bash|console|sh)?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            yield re.sub(r"\s#.*$", "", line).strip().removeprefix("$ ")


def calls_of(text: Text) -> Iterator[str]:
    for line in shell_lines(text):
        yield from re.findall(r"(?:^|[;&|]\s*|\bdo |\bexec |\$\()(rollout-buffer [^;&|>)]*)", line)


COMMAND_OF_THE_EXAMPLE = "dice-input"
"""The command that docs/extending.md adds, by a package that its own test installs."""


def mistakes_in(call: str) -> list[str]:
    """Says what a call of the command line asks for that there is not."""
    words = call.split()[1:]
    name = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else (words[0] if words else "")
    flags = [word.split("=")[0] for word in words if word.startswith("--")]
    if name.startswith(("-", "[")) or not name or name in ("COMMAND", COMMAND_OF_THE_EXAMPLE):
        return []
    if name not in COMMANDS:
        return [f"no command {name!r}"]
    known = {opt for option in COMMANDS[name].params for opt in (*option.opts, *option.secondary_opts)} | {"--help"}
    return [f"{name} has no {flag}" for flag in flags if flag not in known]


def test_every_call_in_the_docs_can_be_made() -> None:
    calls = [(name, call) for name, text in all_pages().items() for call in calls_of(text)]
    assert len(calls) > 20
    wrong = {f"{name}: {call}": found for name, call in calls if (found := mistakes_in(call))}
    assert wrong == {}


def test_every_program_in_the_docs_is_there_with_its_options() -> None:
    wrong = []
    for name, text in all_pages().items():
        for line in shell_lines(text):
            for program, rest in re.findall(r"\b((?:tools|scripts|benchmarks|tests|examples)/[\w./]+)([^;&|>]*)", line):
                path = ROOT / program
                if not path.exists():
                    wrong.append(f"{name}: {program}")
                    continue
                source = path.read_text("utf-8") if path.suffix in (".py", "") else ""
                own = rest.split(" -- ")[0]
                wrong += [
                    f"{name}: {program} {flag}"
                    for flag in re.findall(r"--[a-z][\w-]+", own)
                    if source and flag not in source
                ]
    assert wrong == []


def test_code_in_the_docs_is_python() -> None:
    for name, text in all_pages().items():
        for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            compile(block, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


# --- troubleshooting -------------------------------------------------------------------------------------------------

KNOWN_CASES = {
    "emulators do not boot": "boot_attempts",
    "out of memory on the device host": "resources_per_worker.memory",
    "long sequences": "max_turns",
    "episodes wait for a device": "num_workers",
    "ports are taken": "base_console_port",
    "emulators are left after a crash": "cleanup.sh",
    "`video_embeds is None` with Megatron": "--context-parallel-size",
    "doubling the devices changes nothing": "ray.get",
    "one baseline for the whole batch": "post_process_rewards",
    "training stagnates": "mask 0",
    "training diverges": "mask 1",
    "mask and tokens differ in length": "wrong_response_mask",
    "the mask is missing after a tool ran": "There is no default",
    "the mask came one turn early": "null in turn 1",
    "the count is off by a few": "prompt ids",
    "token ids make no sense": "two tokenizers",
    "messages were cut or edited": "new training row",
    "a tokenizer needs code of its own": "--trust-remote-code",
    "rewards are high at first": "asynchronous",
    "rewards look normalised twice": "--disable-rewards-normalization",
    "the trainer polls for ever": "--fetch-trajectory-retry-times",
    "`instance_id is missing`": "assign_instance_id.py",
    "many episodes end as `max_context`": "max_model_length",
    "an episode ends after few turns": "max_context_len",
    "the document is in the prompt": "document_content",
}
"""What users of the designs that this one follows ran into, and a word of the remedy."""


@pytest.mark.parametrize("case", KNOWN_CASES)
def test_a_known_case_is_in_the_page_on_troubleshooting(case: str) -> None:
    rows = [row for row in page("troubleshooting").splitlines() if row.startswith("| ") and case in row.split(" | ")[0]]
    assert len(rows) == 1
    assert KNOWN_CASES[case] in rows[0]


def test_a_quoted_message_is_one_that_the_code_has() -> None:
    """What stands in backquotes as a symptom is searched for: it must be what the code says."""
    sources = (
        path.read_text("utf-8") for top in ("slime", "slime_plugins", "lab/src") for path in (ROOT / top).rglob("*.py")
    )
    said = re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources))
    symptoms = [row.split(" | ")[0] for row in page("troubleshooting").splitlines() if row.startswith("| ")]
    quoted = [piece.strip() for one in symptoms for text in re.findall(r"`([^`]+)`", one) for piece in text.split("…")]
    of_slime = {"video_embeds is None"}
    assert [piece for piece in quoted if len(piece) > 8 and piece not in said and piece not in of_slime] == []


def test_tables_are_not_torn() -> None:
    """A row after an empty line is no longer a row."""
    torn = []
    for name, text in all_pages().items():
        lines = text.splitlines()
        for number, (before, line, after) in enumerate(zip(lines, lines[1:], [*lines[2:], ""], strict=False), 2):
            if line.startswith("| ") and not before.startswith("|") and not after.startswith("|--"):
                torn.append(f"{name}:{number}")
    assert torn == []
