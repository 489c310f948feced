"""The connection type, and the limit of parameters in one statement."""

from __future__ import annotations

import sqlite3

MAX_MARKS = 500
Connection = sqlite3.Connection
