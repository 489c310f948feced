"""Makes a W&B workspace for the rollout metrics: sections of panels, all over ``rollout/step``.

    python tools/wandb_dashboard.py --entity ENTITY --project PROJECT      saves a new view and prints its address
    python tools/wandb_dashboard.py --dry-run                              prints the layout without network access

Saving needs the network, an account that is logged in (``wandb login``) and ``pip install wandb-workspaces``.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

STEP = "rollout/step"
EXAMPLES = "rollout/examples"
COLUMNS = 24
PANEL_WIDTH = 8
PANEL_HEIGHT = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """A chart of these metrics. A last part in angle brackets matches every value."""

    title: str
    metrics: tuple[str, ...]

    def pattern(self) -> str | None:
        """Returns the regular expression of its metrics if one has a variable part; else None."""
        if not any("<" in name for name in self.metrics):
            return None
        return "|".join(f"^{re.sub(r'<[^>]+>', '[^/]+', re.escape(name))}$" for name in self.metrics)


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


def _panel(title: str, *metrics: str) -> Panel:
    return Panel(title=title, metrics=tuple(f"rollout/{name}" for name in metrics))


LAYOUT: tuple[Section, ...] = (
    Section(
        title="Reward",
        panels=(
            _panel("Reward", "reward/mean", "reward/min", "reward/max"),
            _panel("Spread of the reward", "reward/std"),
            _panel("Success", "success/mean"),
            _panel("Success by task", "success/task/<task>"),
            _panel("Success by app", "success/app/<app>"),
            _panel("One of k attempts succeeds", "pass_at/<k>"),
        ),
    ),
    Section(
        title="Before the filter",
        panels=(
            _panel("Reward", "no_filter/avg_reward", "no_filter/reward_min", "no_filter/reward_max"),
            _panel("Spread of the reward", "no_filter/reward_std"),
            _panel("Samples", "no_filter/total_samples"),
        ),
    ),
    Section(
        title="Episodes",
        panels=(
            _panel("Outcomes", "outcome/<outcome>"),
            _panel("Stop reasons", "stop_reason/<reason>"),
            _panel("Turns", "turns/mean", "turns/max"),
            _panel("Response length", "response_length/mean", "response_length/min", "response_length/max"),
            _panel("Cut by a limit", "truncated/mean"),
            _panel("Groups whose rewards are equal", "equal_rewards/mean"),
            _panel("Repetition", "repetition/mean"),
            _panel("Hits of the prefix cache", "prefix_cache/hit_rate"),
            _panel("Trained tokens", "trained_tokens/mean"),
            _panel("Staleness", "staleness/mean", "staleness/max"),
            _panel("Token drift", "token_drift/<kind>"),
        ),
    ),
    Section(
        title="What came",
        panels=(
            _panel("Waiting for groups", "buffer/wait_s"),
            _panel("Training rows", "buffer/rows"),
            _panel(
                "Tokens in all rows, and those of them repeated by branches",
                "buffer/row_tokens",
                "buffer/repeated_tokens",
            ),
            _panel("Prompts as the engine ran them", "buffer/prompts/<statistic>"),
            _panel("Forks of sessions", "buffer/forks/sum"),
            _panel("Where tokens came from", "buffer/tokens_from_generations", "buffer/tokens_from_messages"),
            _panel(
                "Not trained",
                "buffer/dummies",
                "buffer/malformed_items",
                "buffer/surplus_items",
                "buffer/untrained_trajectories",
                "buffer/left_out_trajectories",
                "buffer/without_log_probs",
                "buffer/record_problems",
                "buffer/old_trajectories",
            ),
            _panel("Groups with fewer members than asked for", "buffer/short_groups"),
            _panel("Tokens of old weights, masked", "buffer/old_tokens"),
            _panel("Trajectories with rewards of turns", "buffer/turn_rewards"),
            _panel("Screenshots", "buffer/images", "buffer/images_fetched"),
            _panel("Bytes of screenshots", "buffer/image_tensor_bytes"),
            _panel(
                "Screenshots that do not fit",
                "buffer/images_missing",
                "buffer/image_mismatches",
                "buffer/engine_image_mismatches",
            ),
        ),
    ),
    Section(
        title="The job in the buffer",
        panels=(
            _panel("Slots", "buffer/slots/<state>"),
            _panel("Trajectories", "buffer/trajectories/<outcome>"),
            _panel("Late and damaged", "buffer/trajectories/late", "buffer/trajectories/damaged"),
            _panel("Reward", "buffer/reward/<statistic>"),
            _panel("Success", "buffer/success/<statistic>"),
            _panel("Staleness", "buffer/staleness/<statistic>"),
            _panel("Trained against submitted", "bias/<statistic>"),
            _panel("Trainer and engine apart", "buffer/log/prob/gap/<statistic>"),
            _panel("Poll wait in seconds", "buffer/poll/wait/seconds/<statistic>"),
            _panel("Failed attempts: devices, engine, environment", "buffer/attempts/failed/<error>"),
        ),
    ),
)


def described(layout: Sequence[Section]) -> str:
    """Returns the layout as text: sections, their panels, the metrics of each."""
    lines = [f"Examples\n  {EXAMPLES} (table with screenshots)"]
    for section in layout:
        lines.append(section.title)
        lines += [f"  {panel.title}: {', '.join(panel.metrics)}" for panel in section.panels]
    return "\n".join(lines)


def workspace(entity: str, project: str, name: str) -> Any:
    """Returns the workspace object of W&B's library; nothing is sent.

    Raises:
        ImportError: ``wandb-workspaces`` is not installed.
    """
    import wandb_workspaces.reports.v2 as panels
    import wandb_workspaces.workspaces as workspaces

    examples = workspaces.Section(
        name="Examples",
        panels=[
            panels.WeavePanelSummaryTable(
                table_name=EXAMPLES, layout=panels.Layout(x=0, y=0, w=COLUMNS, h=2 * PANEL_HEIGHT)
            )
        ],
        is_open=True,
    )
    charts = [
        workspaces.Section(name=section.title, panels=_charts(section, panels), is_open=True) for section in LAYOUT
    ]
    return workspaces.Workspace(entity=entity, project=project, name=name, sections=[examples, *charts])


def _charts(section: Section, panels: Any) -> list[Any]:
    per_line = COLUMNS // PANEL_WIDTH
    charts = []
    for index, panel in enumerate(section.panels):
        place = panels.Layout(
            x=index % per_line * PANEL_WIDTH, y=index // per_line * PANEL_HEIGHT, w=PANEL_WIDTH, h=PANEL_HEIGHT
        )
        pattern = panel.pattern()
        chosen = {"y": list(panel.metrics)} if pattern is None else {"metric_regex": pattern}
        charts.append(panels.LinePlot(title=panel.title, x=STEP, layout=place, **chosen))
    return charts


def main(arguments: Sequence[str] | None = None) -> int:
    """Saves the workspace, or prints its layout; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--entity", help="W&B user or team")
    parser.add_argument("--project", help="W&B project of the training runs")
    parser.add_argument("--name", default="Rollouts", help="name of the view (default: Rollouts)")
    parser.add_argument("--dry-run", action="store_true", help="print the layout; needs neither network nor account")
    options = parser.parse_args(arguments)
    if options.dry_run:
        sys.stdout.write(described(LAYOUT) + "\n")
        return 0
    if not options.entity or not options.project:
        parser.error("--entity and --project say where to save; --dry-run prints the layout")
    try:
        view = workspace(options.entity, options.project, options.name)
    except ImportError as error:
        sys.stderr.write(f"saving needs W&B's own library ({error}): pip install wandb-workspaces\n")
        return 1
    try:
        view.save()
    except Exception as error:  # noqa: BLE001 - network, account, permissions: reported without a traceback
        sys.stderr.write(f"W&B refused the workspace: {type(error).__name__}: {error}\n")
        return 1
    sys.stdout.write(f"{view.url}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
