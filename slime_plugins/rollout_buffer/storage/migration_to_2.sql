-- Turns of open gateway sessions are durable: a restarted gateway continues the sessions of the one before.

ALTER TABLE attempts ADD COLUMN idle_timeout_s REAL;  -- of a gateway session; NULL for other attempts

-- What the engine sampled in a session, one row per answered turn. They are deleted with the end of their attempt.
CREATE TABLE turns (
    key            INTEGER PRIMARY KEY,
    group_key      INTEGER NOT NULL,
    slot           INTEGER NOT NULL,
    attempt        INTEGER NOT NULL,
    number         INTEGER NOT NULL,            -- from 1, without gaps: two processes cannot both add turn n
    created_at     REAL    NOT NULL,
    request        BLOB    NOT NULL,            -- digest of the request: a retry of it gets this turn
    parent         INTEGER,                     -- number of the turn whose ids it continues
    weight_version TEXT,
    context_ids    BLOB    NOT NULL,            -- int32: prompt ids after those of the parent
    output_ids     BLOB    NOT NULL,            -- int32
    log_probs      BLOB    NOT NULL,            -- float64
    detail         BLOB    NOT NULL,            -- JSON: the client's view since the turn before, hashes of images, …
    UNIQUE (group_key, slot, attempt, number),
    FOREIGN KEY (group_key, slot, attempt) REFERENCES attempts (group_key, slot, attempt)
);
CREATE TRIGGER turns_of_ended_attempts AFTER UPDATE OF state ON attempts
WHEN OLD.state = 'running' AND NEW.state <> 'running' BEGIN
    DELETE FROM turns WHERE group_key = NEW.group_key AND slot = NEW.slot AND attempt = NEW.attempt;
END;

-- Sessions that a gateway of schema 1 held in its memory alone.
UPDATE attempts SET state = 'given_up', ended_at = strftime('%s', 'now'), error_code = 'gateway_restarted',
    error_message = 'the gateway ended while the session was open; its slot is open again'
WHERE state = 'running' AND group_key IN
    (SELECT groups.key FROM groups JOIN jobs ON jobs.key = job_key WHERE has_runner = 0);
