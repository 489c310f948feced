-- Turns of open gateway sessions are durable: any gateway process continues any session.

ALTER TABLE attempts ADD COLUMN idle_timeout_s REAL;  -- of a gateway session; NULL for other attempts
ALTER TABLE attempts ADD COLUMN used_at REAL;         -- latest use of a gateway session, to a few seconds
ALTER TABLE attempts ADD COLUMN refusal TEXT;         -- JSON: why the latest request of a session got no turn

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
    writer         TEXT    NOT NULL,            -- token of the gateway process that sampled it
    sent           INTEGER,                     -- 0: the answer did not reach its client; 1: it did later
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

-- Sessions of the remote rollout protocol, and what was sampled in them; ended ones are kept for some minutes.
CREATE TABLE rollouts (
    rollout_id     TEXT    PRIMARY KEY,
    job_id         TEXT    NOT NULL,
    instance_id    TEXT,                        -- NULL: it becomes known at the end
    expires_at     REAL    NOT NULL,            -- without another turn; when it ended
    opening        BLOB    NOT NULL,            -- JSON: the body that opened it, with the digest of its key
    ending         BLOB                         -- JSON: its state and result; NULL while it is open
);
CREATE TABLE rollout_turns (
    rollout_id     TEXT    NOT NULL REFERENCES rollouts ON DELETE CASCADE,
    counted_by     TEXT    NOT NULL,            -- how the agent counted the tokens that entered
    number         INTEGER NOT NULL,            -- this and the others as in turns
    created_at     REAL    NOT NULL,
    request        BLOB    NOT NULL,
    parent         INTEGER,
    writer         TEXT    NOT NULL,
    weight_version TEXT,
    context_ids    BLOB    NOT NULL,
    output_ids     BLOB    NOT NULL,
    log_probs      BLOB    NOT NULL,
    detail         BLOB    NOT NULL,
    PRIMARY KEY (rollout_id, number)
);

-- Sessions that a gateway of schema 1 held in its memory alone.
UPDATE attempts SET state = 'given_up', ended_at = strftime('%s', 'now'), error_code = 'gateway_restarted',
    error_message = 'the gateway ended while the session was open; its slot is open again'
WHERE state = 'running' AND group_key IN
    (SELECT groups.key FROM groups JOIN jobs ON jobs.key = job_key WHERE has_runner = 0);
