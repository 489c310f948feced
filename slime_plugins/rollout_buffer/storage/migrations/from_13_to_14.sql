-- A trainer may say what it computed of each training row.
CREATE TABLE trainer_rows (
    job_key       INTEGER NOT NULL REFERENCES jobs (key),
    uid           TEXT    NOT NULL,
    row           INTEGER NOT NULL,
    step          INTEGER,                      -- the trainer's count
    reported_at   REAL    NOT NULL,
    advantage     REAL,
    entropy       REAL,                         -- mean over the trained tokens, in nats
    loss_share    REAL,
    clip_share    REAL,
    compared      INTEGER NOT NULL DEFAULT 0,   -- tokens of which trainer and engine have a log-prob
    gap_sum       REAL    NOT NULL DEFAULT 0,   -- of |train - rollout log-prob| over them
    gap_max       REAL,
    turns         TEXT    NOT NULL DEFAULT '[]', -- the same by turn, with how far its weights lagged
    log_probs     BLOB,                         -- the trainer's, of the trained tokens in order: float32, deflated
    PRIMARY KEY (job_key, uid, row)
) WITHOUT ROWID;
CREATE INDEX trainer_rows_by_gap ON trainer_rows (job_key, gap_max, compared, gap_sum);
CREATE INDEX trainer_rows_with_log_probs ON trainer_rows (reported_at) WHERE log_probs IS NOT NULL;
