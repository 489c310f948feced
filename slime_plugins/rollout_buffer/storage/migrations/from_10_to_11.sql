-- How far the machine's clock was set, and when: what is older than that looks older by as much.
CREATE TABLE clock_jumps (
    key     INTEGER PRIMARY KEY,
    at      REAL NOT NULL,
    seconds REAL NOT NULL
);
