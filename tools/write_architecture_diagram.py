"""Draws ``docs/images/architecture.svg``: processes, their modules, and the calls between them.

``--check`` writes nothing and only checks that the picture is up to date. Its content is in ``BOXES`` and ``ARROWS``;
``tests/unit/docs/test_architecture_diagram.py`` compares both with the code.
"""

from __future__ import annotations

import argparse
import html
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "architecture.svg"
BUFFER = "slime_plugins/rollout_buffer"
LAB = "lab/src/rollout_buffer_lab"
WIDTH, HEIGHT = 1210, 790
LINE = 19


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A process (or a place on disk), and its modules. Sizes and positions in pixels of the picture."""

    title: str
    subtitle: str
    x: int
    y: int
    width: int
    height: int
    modules: tuple[str, ...] = ()
    frame: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrow:
    """A call from one box to another, along straight lines. ``label_at`` is the position of its label.

    ``route`` names the called HTTP route of the buffer; ``imports`` two packages of which the first imports the second,
    for a call within a process.
    """

    label: str
    points: tuple[tuple[int, int], ...]
    label_at: tuple[int, int]
    route: str = ""
    imports: tuple[str, str] = ("", "")
    both_ways: bool = False


BOXES: Mapping[str, Box] = {
    "trainer host": Box(title="trainer", subtitle="slime, its GPUs", x=12, y=12, width=300, height=596, frame=True),
    "buffer host": Box(
        title="buffer host", subtitle="rollout-buffer serve", x=412, y=12, width=440, height=596, frame=True
    ),
    "device hosts": Box(title="device hosts", subtitle="a Ray cluster", x=956, y=12, width=242, height=596, frame=True),
    "lab": Box(
        title="lab",
        subtitle="rollout-buffer-lab, a package of its own: stands in for engine, trainer and devices",
        x=12, y=628, width=1186, height=150, frame=True,
    ),
    "trainer": Box(
        title="rollout function",
        subtitle="in slime's RolloutManager",
        x=28, y=66, width=268, height=224,
        modules=(
            "slime/rollout/agent_rollout.py",
            f"{BUFFER}/trainer",
            "slime/rollout/agent_rollout_samples.py",
            "slime/utils/mask_generator.py",
        ),
    ),
    "samples": Box(
        title="slime trains", subtitle="Samples, data source, checkpoint", x=28, y=340, width=268, height=62,
    ),
    "engine": Box(title="SGLang router", subtitle="started by slime", x=28, y=530, width=268, height=62),
    "supervisor": Box(
        title="supervisor",
        subtitle="starts, restarts and ends the others",
        x=432, y=66, width=400, height=62,
        modules=(f"{BUFFER}/supervisor",),
    ),
    "server": Box(
        title="server",
        subtitle="gunicorn workers, no state",
        x=432, y=148, width=210, height=142,
        modules=(f"{BUFFER}/server/asgi.py", f"{BUFFER}/server/routes/write.py", f"{BUFFER}/server/routes/poll.py",
                 f"{BUFFER}/server/routes/jobs.py"),
    ),
    "gateway": Box(
        title="gateway",
        subtitle="for other agents",
        x=652, y=148, width=180, height=142,
        modules=(f"{BUFFER}/gateway/sessions.py", f"{BUFFER}/recording/turns.py"),
    ),
    "store": Box(
        title="store",
        subtitle="SQLite (WAL) and pack files, fsynced",
        x=432, y=340, width=400, height=104,
        modules=(f"{BUFFER}/buffer.py", f"{BUFFER}/storage/tables", f"{BUFFER}/state/deliveries.py",
                 f"{BUFFER}/storage/pack_writer.py"),
    ),
    "runner": Box(
        title="runner",
        subtitle="one process per job, asyncio",
        x=432, y=488, width=400, height=104,
        modules=(f"{BUFFER}/runner", f"{BUFFER}/generator", f"{BUFFER}/engine", f"{BUFFER}/rules/groups.py"),
    ),
    "manager": Box(
        title="device manager",
        subtitle="assigns devices to episodes",
        x=972, y=340, width=210, height=84,
        modules=(f"{BUFFER}/devices/device_manager.py",),
    ),
    "devices": Box(
        title="device worker",
        subtitle="one per device",
        x=972, y=488, width=210, height=104,
        modules=(f"{BUFFER}/devices/worker.py", f"{BUFFER}/devices/interface.py"),
    ),
    "engines of the lab": Box(
        title="engines",
        subtitle="rollout-buffer engine",
        x=28, y=680, width=268, height=84,
        modules=(f"{LAB}/scripted_engine", f"{LAB}/embedded_engine"),
    ),
    "trainers of the lab": Box(
        title="trainers",
        subtitle="rollout-buffer demo, rollout-buffer learn",
        x=432, y=680, width=400, height=84,
        modules=(f"{LAB}/mock_trainer.py", f"{LAB}/learning"),
    ),
    "phones of the lab": Box(
        title="simulated phone",
        subtitle="device: simulated",
        x=972, y=680, width=210, height=84,
        modules=(f"{LAB}/simulated_phone",),
    ),
}  # fmt: skip
"""Every box by its name; frames first, so that other boxes are drawn over them."""

ARROWS: tuple[Arrow, ...] = (
    Arrow(label="1 start_rollout", points=((296, 186), (432, 186)), label_at=(318, 180), route="/start_rollout"),
    Arrow(
        label="6 get_rollout_data", points=((432, 224), (296, 224)), label_at=(316, 218), route="/get_rollout_data"
    ),
    Arrow(label="8 ack", points=((296, 262), (432, 262)), label_at=(344, 256), route="/ack"),
    Arrow(label="7 Samples", points=((162, 290), (162, 340)), label_at=(172, 320)),
    Arrow(label="weights", points=((162, 402), (162, 530)), label_at=(172, 470)),
    Arrow(
        label="jobs, items, deliveries", points=((537, 290), (537, 340)), label_at=(547, 320),
        imports=("server", "buffer"), both_ways=True,
    ),
    Arrow(
        label="sessions", points=((742, 290), (742, 340)), label_at=(752, 320),
        imports=("gateway", "buffer"), both_ways=True,
    ),
    Arrow(
        label="5 slots; trajectories, judged groups", points=((537, 488), (537, 444)), label_at=(547, 470),
        imports=("runner", "buffer"), both_ways=True,
    ),
    Arrow(
        label="3 generate", points=((432, 561), (296, 561)), label_at=(328, 555),
        imports=("runner", "engine.factory"),
    ),
    Arrow(label="2 lease", points=((832, 516), (904, 516), (904, 382), (972, 382)), label_at=(910, 374)),
    Arrow(label="4 reset, act, score", points=((832, 566), (972, 566)), label_at=(838, 560)),
)  # fmt: skip
"""Numbered in the order of a rollout."""

STYLE = """
.page { fill: #ffffff; } .frame { fill: #f6f8fa; stroke: #d0d7de; } .box { fill: #ffffff; stroke: #57606a; }
text { font: 13px system-ui, -apple-system, 'Segoe UI', sans-serif; fill: #1f2328; }
.title { font-weight: 600; font-size: 14px; } .says { fill: #57606a; } .label { fill: #0550ae; font-size: 12.5px; }
.module { font: 12px ui-monospace, 'SF Mono', Menlo, Consolas, monospace; }
.arrow { fill: none; stroke: #0550ae; stroke-width: 1.6; } .head { fill: #0550ae; }
@media (prefers-color-scheme: dark) {
  .page { fill: #0d1117; } .frame { fill: #161b22; stroke: #30363d; } .box { fill: #0d1117; stroke: #8b949e; }
  text { fill: #e6edf3; } .says { fill: #9198a1; } .label { fill: #79c0ff; }
  .arrow { stroke: #79c0ff; } .head { fill: #79c0ff; }
}
"""


def architecture_svg() -> str:
    """Returns the picture as SVG text; deterministic."""
    parts = [part for box in BOXES.values() for part in _box(box)]
    parts += [part for arrow in ARROWS for part in _arrow(arrow)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="Processes of the rollout buffer">\n<style>{STYLE}</style>\n'
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path class="head" d="M0 0 L8 4 L0 8 z"/></marker></defs>\n'
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _box(box: Box) -> Iterator[str]:
    kind = "frame" if box.frame else "box"
    yield f'<rect class="{kind}" x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="6"/>'
    yield _text("title", box.x + 12, box.y + 22, box.title)
    yield _text("says", box.x + 12, box.y + 22 + LINE, box.subtitle)
    for number, module in enumerate(box.modules):
        yield _text("module", *_place_of_module(box, number), _short(module))


def _place_of_module(box: Box, number: int) -> tuple[int, int]:
    """Returns where a module stands: wide boxes have two columns of modules, flat ones have them beside the title."""
    if box.height < 80:
        return box.x + box.width // 2 + 72, box.y + 22
    columns = 2 if box.width > 300 else 1
    row, column = divmod(number, columns)
    line = LINE if box.height > 84 else LINE - 3
    return box.x + 12 + column * (box.width // 2), box.y + 24 + LINE + line * (row + 1)


def _short(module: str) -> str:
    name = module.removeprefix(f"{BUFFER}/").removeprefix(f"{LAB}/").removeprefix("slime/")
    return name if name.endswith(".py") else f"{name}/"


def _arrow(arrow: Arrow) -> Iterator[str]:
    points = " ".join(f"{x},{y}" for x, y in arrow.points)
    back = ' marker-start="url(#head)"' if arrow.both_ways else ""
    yield f'<polyline class="arrow" points="{points}" marker-end="url(#head)"{back}/>'
    yield _text("label", *arrow.label_at, arrow.label)


def _text(kind: str, x: int, y: int, text: str) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{html.escape(text)}</text>'


def main() -> int:
    """Writes the picture, or with ``--check`` checks that it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when it is out of date")
    wanted = architecture_svg()
    if not parser.parse_args().check:
        PICTURE.write_text(wanted, encoding="utf-8")
        return 0
    if not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != wanted:
        sys.stderr.write(f"{PICTURE.name} is out of date: python tools/write_architecture_diagram.py draws it\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
