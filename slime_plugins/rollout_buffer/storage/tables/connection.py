"""What every table shares: the open transaction, and how many marks one statement may have."""

from __future__ import annotations

import sqlite3

MAX_MARKS = 500
Connection = sqlite3.Connection
