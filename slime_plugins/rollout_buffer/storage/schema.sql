-- The schema of 0.1.0, which is version 1 and never changes. A later version is a file beside it, migration_to_2.sql
-- and so on, and raises SCHEMA_VERSION in migrations.py: a new database is made of this file and all of those. Times are
-- seconds since the epoch.

CREATE TABLE jobs (
    key            INTEGER PRIMARY KEY,
    job_id         TEXT    NOT NULL UNIQUE,
    task_type      TEXT    NOT NULL,
    state          TEXT    NOT NULL,
    cause          TEXT    NOT NULL DEFAULT '',
    cause_code     TEXT    NOT NULL DEFAULT '',
    identity       TEXT    NOT NULL,            -- digest of the payload without what may change between starts
    trainer_identity TEXT,                      -- that of the trainer's payload; NULL: no trainer has started it yet
    engine_url     TEXT,
    settings       TEXT    NOT NULL,            -- what the job keeps of its payload beside its options, as JSON
    has_runner     INTEGER NOT NULL,            -- 0: filled through /buffer/write alone
    takes_items    INTEGER NOT NULL DEFAULT 1,  -- 0: its runner plays every slot itself, /buffer/write is refused
    has_input      INTEGER NOT NULL,            -- 0: the items that are written name its instances
    group_size     INTEGER NOT NULL,
    instance_count INTEGER NOT NULL,
    num_epoch      INTEGER NOT NULL,
    fence          INTEGER NOT NULL DEFAULT 0,  -- number of the runner that may write
    trainer_run    INTEGER NOT NULL DEFAULT 1,  -- weight versions are ordered within one; each start opens the next
    run_began_at   REAL,
    weight_version INTEGER,                     -- the newest that is known in this run
    first_weight_version   INTEGER,             -- the oldest that is known in this run
    earlier_weight_version INTEGER,             -- the newest of the run before
    lone_versions  INTEGER NOT NULL DEFAULT 0,  -- how often a version was named that is absurdly far ahead
    lone_version   INTEGER,                     -- the last of them
    refused_items  INTEGER NOT NULL DEFAULT 0,  -- written items that were refused, and the answer to the last
    last_refusal   TEXT    NOT NULL DEFAULT '',
    meta_info      TEXT    NOT NULL DEFAULT '{}', -- what the generator's own get_group_data_meta_info said last
    created_at     REAL    NOT NULL,
    updated_at     REAL    NOT NULL,
    finished_at    REAL,
    last_poll_at   REAL,
    waiting_since  REAL,                        -- since when a trainer has polled and got nothing; NULL when it got some
    portion        INTEGER NOT NULL DEFAULT 1   -- what is written now belongs to it
);

-- What only the job's generator understands. It may be large, and is read by who plays the job or looks at it alone.
CREATE TABLE job_options (
    job_key INTEGER PRIMARY KEY REFERENCES jobs (key),
    options BLOB    NOT NULL                    -- as JSON; of a BLOB, SQLite knows the size without reading it
);

-- The groups that a job will have of its input: each line is one in each epoch. A group gets a row when it is opened.
CREATE TABLE plans (
    job_key        INTEGER PRIMARY KEY REFERENCES jobs (key),
    first_position INTEGER NOT NULL,            -- of the first line; those below were named by items before it came
    lines          INTEGER NOT NULL,
    epochs         INTEGER NOT NULL,
    digest         TEXT    NOT NULL,            -- of the input
    passed         INTEGER NOT NULL DEFAULT 0,  -- groups that have rows, or had them already, in playing order
    unopened       INTEGER NOT NULL,            -- groups that are to come and have no row
    skipped        INTEGER NOT NULL DEFAULT 0   -- groups that were skipped and have no row
);
CREATE TABLE input_chunks (
    job_key        INTEGER NOT NULL REFERENCES jobs (key),
    first_position INTEGER NOT NULL,
    lines          BLOB    NOT NULL,            -- deflated JSON: a list of [instance_id, line]
    PRIMARY KEY (job_key, first_position)
);
CREATE TABLE input_index (
    job_key      INTEGER NOT NULL REFERENCES jobs (key),
    bucket       INTEGER NOT NULL,              -- of the hash of an instance_id
    line_numbers BLOB    NOT NULL,              -- deflated JSON: the number of the line of each id
    PRIMARY KEY (job_key, bucket)
);

CREATE TABLE groups (
    key           INTEGER PRIMARY KEY,
    job_key       INTEGER NOT NULL REFERENCES jobs (key),
    epoch         INTEGER NOT NULL,
    position      INTEGER NOT NULL,
    instance_id   TEXT    NOT NULL,
    task          TEXT    NOT NULL,             -- what the instance is one of, for statistics
    state         TEXT    NOT NULL,
    cause         TEXT    NOT NULL DEFAULT '',
    cause_code    TEXT    NOT NULL DEFAULT '',
    opened_at     REAL,                         -- first attempt begun or first item written
    last_write_at REAL,
    closed_at     REAL,
    sequence      INTEGER,                      -- order of becoming ready, over all jobs
    delivery_key  INTEGER,                      -- the delivery it is in, or (filtered, failed) was reported in
    UNIQUE (job_key, epoch, position)
);
CREATE INDEX groups_by_state ON groups (job_key, state, sequence);
CREATE INDEX groups_by_sequence ON groups (sequence) WHERE sequence IS NOT NULL;
CREATE INDEX groups_unreported ON groups (job_key) WHERE state IN ('filtered', 'failed') AND delivery_key IS NULL;
CREATE UNIQUE INDEX groups_by_instance ON groups (job_key, instance_id, epoch);
CREATE INDEX groups_by_delivery ON groups (delivery_key) WHERE delivery_key IS NOT NULL;
CREATE INDEX groups_by_cause ON groups (job_key, state, cause_code, cause) WHERE state IN ('filtered', 'failed');
CREATE INDEX groups_by_closing ON groups (job_key, closed_at, state) WHERE closed_at IS NOT NULL;
CREATE INDEX groups_by_touch ON groups (
    job_key, coalesce(closed_at, last_write_at, opened_at, 0.0) DESC, key, state, instance_id
);

CREATE TABLE attempts (
    group_key     INTEGER NOT NULL REFERENCES groups (key),
    slot          INTEGER NOT NULL,
    attempt       INTEGER NOT NULL,
    fence         INTEGER NOT NULL,
    state         TEXT    NOT NULL,             -- running, finished, failed, given_up
    error_code    TEXT,
    error_message TEXT,
    started_at    REAL    NOT NULL,
    ended_at      REAL,
    PRIMARY KEY (group_key, slot, attempt)
) WITHOUT ROWID;
CREATE INDEX attempts_failed ON attempts (ended_at, error_code) WHERE state = 'failed';
CREATE INDEX attempts_running ON attempts (started_at) WHERE state = 'running';

-- How many attempts of a job are in which state, kept by triggers: who asks does not go through all of them.
CREATE TABLE attempt_counts (
    job_key    INTEGER NOT NULL REFERENCES jobs (key),
    state      TEXT    NOT NULL,
    error_code TEXT    NOT NULL,                -- empty when there was no error
    attempts   INTEGER NOT NULL,
    PRIMARY KEY (job_key, state, error_code)
) WITHOUT ROWID;
CREATE TRIGGER attempts_begun AFTER INSERT ON attempts BEGIN
    INSERT INTO attempt_counts VALUES (
        (SELECT job_key FROM groups WHERE key = NEW.group_key), NEW.state, coalesce(NEW.error_code, ''), 1
    ) ON CONFLICT (job_key, state, error_code) DO UPDATE SET attempts = attempts + 1;
END;
CREATE TRIGGER attempts_changed AFTER UPDATE OF state, error_code ON attempts BEGIN
    UPDATE attempt_counts SET attempts = attempts - 1 WHERE state = OLD.state
        AND error_code = coalesce(OLD.error_code, '')
        AND job_key = (SELECT job_key FROM groups WHERE key = OLD.group_key);
    INSERT INTO attempt_counts VALUES (
        (SELECT job_key FROM groups WHERE key = NEW.group_key), NEW.state, coalesce(NEW.error_code, ''), 1
    ) ON CONFLICT (job_key, state, error_code) DO UPDATE SET attempts = attempts + 1;
END;

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

CREATE TABLE trajectories (
    key          INTEGER PRIMARY KEY,
    job_key      INTEGER NOT NULL REFERENCES jobs (key),
    uid          TEXT    NOT NULL,
    group_key    INTEGER REFERENCES groups (key),
    slot         INTEGER,
    attempt      INTEGER,
    instance_id  TEXT    NOT NULL,
    outcome      TEXT    NOT NULL,
    stop_reason  TEXT    NOT NULL,
    reward       REAL    NOT NULL,
    raw_reward   REAL,
    trainer_run  INTEGER NOT NULL DEFAULT 1,    -- the run whose weights sampled it
    oldest_version INTEGER,                     -- of the weights that sampled it; NULL when nobody told
    versions_behind INTEGER,                    -- how far that was behind the job's newest when it was written
    success      REAL,                          -- what the environment said, before any shaping; NULL when unknown
    turns        INTEGER,
    sampled_tokens INTEGER,
    generate_s   REAL,                          -- seconds it waited for the engine
    played_s     REAL,                          -- seconds of all its phases but the wait for a device
    late         INTEGER NOT NULL DEFAULT 0,    -- came after its group had closed; never delivered
    body         BLOB,                          -- small payloads; large ones are in a pack file
    body_place   TEXT,                          -- their place there, pack:offset:length:owner
    body_bytes   INTEGER NOT NULL,
    damage       TEXT,                          -- why the payload could not be read when it was to be delivered
    portion      INTEGER,                       -- of what the job reports: see portion_sums
    created_at   REAL    NOT NULL,
    UNIQUE (job_key, uid)
);
CREATE INDEX trajectories_by_group ON trajectories (group_key);
-- Everything that lists and charts ask for, in order of writing: they never touch the rows with the payloads.
CREATE INDEX trajectories_to_look_at ON trajectories (
    job_key, key, created_at, outcome, stop_reason, reward, success, late, oldest_version, versions_behind, turns,
    sampled_tokens, generate_s, played_s, instance_id, uid
);
CREATE INDEX trajectories_damaged ON trajectories (job_key) WHERE damage IS NOT NULL;
CREATE INDEX trajectories_by_portion ON trajectories (job_key, portion, group_key, outcome, reward);

-- What deliveries report of the rewards, summed by a trigger: whatever is written between two reports is one portion.
CREATE TABLE portion_sums (
    job_key      INTEGER NOT NULL REFERENCES jobs (key),
    portion      INTEGER NOT NULL,
    outcome      TEXT    NOT NULL,
    samples      INTEGER NOT NULL,
    groups       INTEGER NOT NULL,              -- those that no other row of the portion counts
    total        REAL    NOT NULL,
    square_total REAL    NOT NULL,
    low          REAL    NOT NULL,
    high         REAL    NOT NULL,
    reported_in  INTEGER,                       -- the delivery whose meta_info counted it
    PRIMARY KEY (job_key, portion, outcome)
) WITHOUT ROWID;
CREATE INDEX portion_sums_unreported ON portion_sums (job_key) WHERE reported_in IS NULL;
CREATE INDEX portion_sums_by_delivery ON portion_sums (reported_in) WHERE reported_in IS NOT NULL;
CREATE TRIGGER trajectories_summed AFTER INSERT ON trajectories BEGIN
    INSERT INTO portion_sums VALUES (
        NEW.job_key, NEW.portion, NEW.outcome, 1, NEW.group_key IS NOT NULL AND NOT EXISTS (
            SELECT 1 FROM trajectories WHERE job_key = NEW.job_key AND portion = NEW.portion
            AND group_key = NEW.group_key AND key <> NEW.key
        ), NEW.reward, NEW.reward * NEW.reward, NEW.reward, NEW.reward, NULL
    ) ON CONFLICT (job_key, portion, outcome) DO UPDATE SET
        samples = samples + 1, groups = groups + excluded.groups, total = total + excluded.total,
        square_total = square_total + excluded.square_total, low = min(low, excluded.low),
        high = max(high, excluded.high);
END;

-- What charts over long stretches add up, kept by a trigger in the transaction of each trajectory.
CREATE TABLE trajectory_minutes (
    job_key       INTEGER NOT NULL REFERENCES jobs (key),
    minute        INTEGER NOT NULL,             -- minutes since the epoch; of trajectories that were not late
    episodes      INTEGER NOT NULL,
    reward_total  REAL    NOT NULL,
    reward_min    REAL    NOT NULL,
    reward_max    REAL    NOT NULL,
    judged        INTEGER NOT NULL,             -- those of which success is known
    succeeded     INTEGER NOT NULL,
    completed     INTEGER NOT NULL,
    truncated     INTEGER NOT NULL,
    aborted       INTEGER NOT NULL,
    versioned     INTEGER NOT NULL,             -- those of which the weights are known
    behind_total  INTEGER NOT NULL,
    behind_max    INTEGER,
    turns_known   INTEGER NOT NULL,
    turns_total   INTEGER NOT NULL,
    sampled_known INTEGER NOT NULL,
    sampled_total INTEGER NOT NULL,
    generate_s    REAL    NOT NULL,
    played_s      REAL    NOT NULL,
    PRIMARY KEY (job_key, minute)
) WITHOUT ROWID;
CREATE TRIGGER trajectories_counted AFTER INSERT ON trajectories WHEN NEW.late = 0 BEGIN
    INSERT INTO trajectory_minutes VALUES (
        NEW.job_key, CAST(NEW.created_at / 60 AS INTEGER), 1, NEW.reward, NEW.reward, NEW.reward,
        NEW.success IS NOT NULL, coalesce(NEW.success >= 1, 0),
        NEW.outcome = 'completed', NEW.outcome = 'truncated', NEW.outcome = 'aborted',
        NEW.versions_behind IS NOT NULL, coalesce(NEW.versions_behind, 0), NEW.versions_behind,
        NEW.turns IS NOT NULL, coalesce(NEW.turns, 0), NEW.sampled_tokens IS NOT NULL, coalesce(NEW.sampled_tokens, 0),
        coalesce(NEW.generate_s, 0.0), coalesce(NEW.played_s, 0.0)
    ) ON CONFLICT (job_key, minute) DO UPDATE SET
        episodes = episodes + 1, reward_total = reward_total + excluded.reward_total,
        reward_min = min(reward_min, excluded.reward_min), reward_max = max(reward_max, excluded.reward_max),
        judged = judged + excluded.judged, succeeded = succeeded + excluded.succeeded,
        completed = completed + excluded.completed, truncated = truncated + excluded.truncated,
        aborted = aborted + excluded.aborted, versioned = versioned + excluded.versioned,
        behind_total = behind_total + excluded.behind_total,
        behind_max = max(coalesce(behind_max, excluded.behind_max), coalesce(excluded.behind_max, behind_max)),
        turns_known = turns_known + excluded.turns_known, turns_total = turns_total + excluded.turns_total,
        sampled_known = sampled_known + excluded.sampled_known, sampled_total = sampled_total + excluded.sampled_total,
        generate_s = generate_s + excluded.generate_s, played_s = played_s + excluded.played_s;
END;
CREATE INDEX trajectories_late ON trajectories (job_key) WHERE late = 1;

CREATE TABLE images (
    sha256 BLOB PRIMARY KEY,                    -- 32 bytes: a screenshot is kept once, whoever shows it
    place  TEXT NOT NULL,                       -- in a pack file, pack:offset:length:owner
    last_used REAL NOT NULL                     -- when a trajectory last named it
) WITHOUT ROWID;

CREATE TABLE packs (
    number  INTEGER PRIMARY KEY,
    used_to INTEGER NOT NULL                    -- no row names a byte of the pack from here on
);

-- Numbers that are given once and never again, whatever is lost or removed later.
CREATE TABLE counters (
    name TEXT    PRIMARY KEY,                   -- pack, job
    last INTEGER NOT NULL
) WITHOUT ROWID;
INSERT INTO counters VALUES ('pack', 0), ('job', 0);

-- A start that is sent again is the same start, however late: the newest start ids of each job.
CREATE TABLE start_ids (
    key      INTEGER PRIMARY KEY,               -- in the order of the starts
    job_key  INTEGER NOT NULL REFERENCES jobs (key),
    job_id   TEXT    NOT NULL,                  -- the job's name at that start
    start_id TEXT    NOT NULL,
    identity TEXT    NOT NULL                   -- of the payload that came with it
);
CREATE INDEX start_ids_by_id ON start_ids (start_id);
CREATE INDEX start_ids_by_job ON start_ids (job_key);

CREATE TABLE members (
    group_key     INTEGER NOT NULL REFERENCES groups (key),
    ordinal       INTEGER NOT NULL,
    uid           TEXT    NOT NULL,
    source_uid    TEXT,                         -- the trajectory that holds the payload; NULL for a dummy
    reward        REAL,
    raw_reward    REAL,
    remove_sample INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (group_key, ordinal)
) WITHOUT ROWID;

CREATE TABLE deliveries (
    key              INTEGER PRIMARY KEY,
    delivery_id      TEXT NOT NULL UNIQUE,
    job_key          INTEGER NOT NULL REFERENCES jobs (key),
    consumer_id      TEXT,
    poll_id          TEXT,
    state            TEXT NOT NULL,             -- leased, acked, popped, expired
    lease_s          REAL,
    lease_expires_at REAL,
    created_at       REAL NOT NULL,
    waited_s         REAL,                      -- how long the trainer had polled for it
    meta_info        TEXT NOT NULL
);
CREATE INDEX deliveries_by_job ON deliveries (job_key, created_at, waited_s);
CREATE UNIQUE INDEX deliveries_by_poll ON deliveries (job_key, consumer_id, poll_id) WHERE poll_id IS NOT NULL;
CREATE INDEX deliveries_expired ON deliveries (job_key) WHERE state = 'expired';
CREATE INDEX deliveries_leased ON deliveries (lease_expires_at) WHERE state = 'leased';

CREATE TABLE delivery_groups (
    delivery_key INTEGER NOT NULL REFERENCES deliveries (key),
    ordinal      INTEGER NOT NULL,
    group_key    INTEGER NOT NULL REFERENCES groups (key),
    PRIMARY KEY (delivery_key, ordinal)
) WITHOUT ROWID;

CREATE TABLE services (
    name         TEXT PRIMARY KEY,              -- as rules/heartbeats.py names it
    pid          INTEGER NOT NULL,
    heartbeat_at REAL    NOT NULL,
    detail       TEXT    NOT NULL DEFAULT '{}'
);

-- How far the machine's clock was set, and when: what is older than that looks older by as much.
CREATE TABLE clock_jumps (
    key     INTEGER PRIMARY KEY,
    at      REAL NOT NULL,                      -- by the clock after the jump
    seconds REAL NOT NULL
);

-- What a trainer said of the training rows of a step, beside their trajectories; of each row the last word counts.
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

-- Rewards that were given anew to trajectories that are stored. Rows are added and never changed: version 0 is what was
-- played, and stands with the trajectory.
CREATE TABLE reward_versions (
    job_key    INTEGER NOT NULL REFERENCES jobs (key),
    version    INTEGER NOT NULL,             -- from 1
    name       TEXT    NOT NULL,
    scorer     TEXT    NOT NULL,             -- what gave them: module:function, or the address of a service
    created_at REAL    NOT NULL,
    PRIMARY KEY (job_key, version),
    UNIQUE (job_key, name)
) WITHOUT ROWID;
CREATE TABLE trajectory_rewards (
    job_key       INTEGER NOT NULL,
    version       INTEGER NOT NULL,
    uid           TEXT    NOT NULL,
    reward        REAL    NOT NULL,
    turn_rewards  TEXT,                      -- JSON; NULL when it says nothing of turns
    token_rewards TEXT,                      -- as above
    scored_at     REAL    NOT NULL,
    PRIMARY KEY (job_key, version, uid),
    FOREIGN KEY (job_key, version) REFERENCES reward_versions (job_key, version)
) WITHOUT ROWID;
CREATE TRIGGER trajectory_rewards_stay BEFORE UPDATE ON trajectory_rewards BEGIN
    SELECT raise(ABORT, 'a reward that was given is never changed: give it another version');
END;

-- What the engines said of the prompts that they ran, summed over a job.
CREATE TABLE prompt_sums (
    job_key      INTEGER PRIMARY KEY REFERENCES jobs (key),
    equal        INTEGER NOT NULL,              -- turns of which the engine ran what it was sent
    differing    INTEGER NOT NULL,              -- turns of which it ran other ids
    unknown      INTEGER NOT NULL,              -- turns of which it does not say what it ran
    untrained    INTEGER NOT NULL,              -- of all these, turns that are not trained because nobody knows
    forked       INTEGER NOT NULL,              -- training rows that other ids made necessary
    extra_tokens INTEGER NOT NULL,              -- what those rows read again
    row_tokens   INTEGER NOT NULL
);
