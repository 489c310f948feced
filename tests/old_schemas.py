"""Takes a database back to an earlier schema, for the tests of the migrations."""

from __future__ import annotations

from slime_plugins.rollout_buffer.tables.connection import Connection


def without_attempt_counts(connection: Connection) -> None:
    """Takes a database of version 8 back to version 7: attempts are counted row by row."""
    for trigger in ("attempts_begun", "attempts_changed"):
        connection.execute(f"DROP TRIGGER {trigger}")
    connection.execute("DROP TABLE attempt_counts")
    connection.execute("PRAGMA user_version=7")


def without_portions(connection: Connection) -> None:
    """Takes a database of version 8 back to version 6: each trajectory says itself which delivery reported it."""
    without_attempt_counts(connection)
    connection.execute("DROP TRIGGER trajectories_summed")
    connection.execute("DROP INDEX trajectories_by_portion")
    connection.execute("ALTER TABLE trajectories RENAME COLUMN portion TO reported_in")
    connection.execute(
        "UPDATE trajectories SET reported_in = (SELECT sums.reported_in FROM portion_sums sums "
        "WHERE sums.job_key = trajectories.job_key AND sums.portion = trajectories.reported_in LIMIT 1)"
    )
    connection.execute("DROP TABLE portion_sums")
    connection.execute("ALTER TABLE jobs DROP COLUMN portion")
    connection.execute("CREATE INDEX trajectories_unreported ON trajectories (job_key) WHERE reported_in IS NULL")
    connection.execute("PRAGMA user_version=6")
