-- Jobs of very many groups are written in parts, under a key that is given once.
INSERT INTO counters SELECT 'job', coalesce(max(key), 0) FROM jobs;
CREATE TABLE starts (
    job_key    INTEGER PRIMARY KEY,
    identity   TEXT    NOT NULL,
    job_id     TEXT,
    touched_at REAL    NOT NULL,
    written    INTEGER NOT NULL
);
