-- Any process of a gateway continues any session, and any rollout of the remote rollout protocol.

-- Sessions that were open in a gateway of schema 2, whose turns are read no more; the trigger deletes them.
UPDATE attempts SET state = 'given_up', ended_at = strftime('%s', 'now'), error_code = 'gateway_restarted',
    error_message = 'the gateway was upgraded while the session was open; its slot is open again'
WHERE state = 'running' AND group_key IN
    (SELECT groups.key FROM groups JOIN jobs ON jobs.key = job_key WHERE has_runner = 0);

ALTER TABLE attempts ADD COLUMN used_at REAL;         -- latest use of a gateway session, to a few seconds
ALTER TABLE attempts ADD COLUMN refusal TEXT;         -- JSON: why the latest request of a session got no turn

ALTER TABLE turns ADD COLUMN writer TEXT NOT NULL DEFAULT '';  -- token of the gateway process that sampled it
ALTER TABLE turns ADD COLUMN sent INTEGER;            -- 0: the answer did not reach its client; 1: it did later

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
