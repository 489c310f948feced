"""The file with a tool that ``docs/context_editing.md`` shows is a task type, and its episodes have the tool."""

from __future__ import annotations

import re
from pathlib import Path

from slime_plugins.rollout_buffer.generator import context_editing_generator
from slime_plugins.rollout_buffer.generator.context_editing.tool_specs import handler_of, unregister_tool
from slime_plugins.rollout_buffer.generator.registry import load_file

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "context_editing.md").read_text(encoding="utf-8")


async def test_a_runner_that_loads_only_the_file_of_its_task_type_has_the_tool(tmp_path: Path) -> None:
    (shown,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    file = tmp_path / "statelm_lines.py"
    file.write_text(shown, encoding="utf-8")
    try:
        plugin = load_file(file, "statelm_lines")
        handler = handler_of("countLines")
    finally:
        unregister_tool("countLines")

    assert plugin is not None
    assert plugin.create_generator is context_editing_generator.create_generator
    assert plugin.option_sections == context_editing_generator.OPTION_SECTIONS
    assert handler is not None
    assert await handler("a\nb", {}) == {"lines": 2}
