-- What was said in attempts that failed, shortened: the newest of each job. None of it is ever trained.
CREATE TABLE failed_transcripts (
    key           INTEGER PRIMARY KEY,
    job_key       INTEGER NOT NULL REFERENCES jobs (key),
    group_key     INTEGER NOT NULL REFERENCES groups (key),
    slot          INTEGER NOT NULL,
    attempt       INTEGER NOT NULL,
    kept_at       REAL    NOT NULL,
    messages      BLOB    NOT NULL,             -- JSON
    UNIQUE (group_key, slot, attempt)
);
CREATE INDEX failed_transcripts_by_job ON failed_transcripts (job_key, key);
