-- The schema of version 4, as it was.

CREATE TABLE jobs (
    key            INTEGER PRIMARY KEY,
    job_id         TEXT    NOT NULL UNIQUE,
    task_type      TEXT    NOT NULL,
    state          TEXT    NOT NULL,
    cause          TEXT    NOT NULL DEFAULT '',
    identity       TEXT    NOT NULL,            -- digest of the payload without what may change between starts
    start_id       TEXT,                        -- of the last call that started or attached
    engine_url     TEXT,
    settings       TEXT    NOT NULL,            -- what the job keeps of its payload, as JSON
    has_runner     INTEGER NOT NULL,            -- 0: filled through /buffer/write alone
    has_input      INTEGER NOT NULL,            -- 0: the items that are written name its instances
    group_size     INTEGER NOT NULL,
    instance_count INTEGER NOT NULL,
    num_epoch      INTEGER NOT NULL,
    fence          INTEGER NOT NULL DEFAULT 0,  -- number of the runner that may write
    weight_version INTEGER,                     -- the newest that any of its trajectories was sampled with
    meta_info      TEXT    NOT NULL DEFAULT '{}', -- what the generator's own get_group_data_meta_info said last
    created_at     REAL    NOT NULL,
    updated_at     REAL    NOT NULL,
    finished_at    REAL,
    last_poll_at   REAL
);

CREATE TABLE instances (
    job_key     INTEGER NOT NULL REFERENCES jobs (key),
    position    INTEGER NOT NULL,
    instance_id TEXT    NOT NULL,
    line        BLOB    NOT NULL,
    PRIMARY KEY (job_key, position)
) WITHOUT ROWID;
CREATE UNIQUE INDEX instances_by_id ON instances (job_key, instance_id);

CREATE TABLE groups (
    key           INTEGER PRIMARY KEY,
    job_key       INTEGER NOT NULL REFERENCES jobs (key),
    epoch         INTEGER NOT NULL,
    position      INTEGER NOT NULL,
    instance_id   TEXT    NOT NULL,
    state         TEXT    NOT NULL,
    cause         TEXT    NOT NULL DEFAULT '',
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
CREATE INDEX groups_by_instance ON groups (job_key, instance_id, epoch);
CREATE INDEX groups_by_delivery ON groups (delivery_key) WHERE delivery_key IS NOT NULL;

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
    oldest_version INTEGER,                     -- of the weights that sampled it; NULL when nobody told
    late         INTEGER NOT NULL DEFAULT 0,    -- came after its group had closed; never delivered
    body         BLOB,                          -- small payloads; large ones are in a pack file
    body_place   TEXT,                          -- their place there, pack:offset:length
    body_bytes   INTEGER NOT NULL,
    damage       TEXT,                          -- why the payload could not be read when it was to be delivered
    reported_in  INTEGER,                       -- the delivery whose meta_info counted it
    created_at   REAL    NOT NULL,
    UNIQUE (job_key, uid)
);
CREATE INDEX trajectories_by_group ON trajectories (group_key);
CREATE INDEX trajectories_damaged ON trajectories (job_key) WHERE damage IS NOT NULL;
CREATE INDEX trajectories_unreported ON trajectories (job_key) WHERE reported_in IS NULL;

CREATE TABLE images (
    sha256 BLOB PRIMARY KEY,                    -- 32 bytes: a screenshot is kept once, whoever shows it
    place  TEXT NOT NULL,                       -- in a pack file, pack:offset:length
    last_used REAL NOT NULL                     -- when a trajectory last named it
) WITHOUT ROWID;

CREATE TABLE packs (
    number  INTEGER PRIMARY KEY,
    used_to INTEGER NOT NULL                    -- no row names a byte of the pack from here on
);

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
    meta_info        TEXT NOT NULL
);
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
    name         TEXT PRIMARY KEY,              -- supervisor, runner:<job key>
    pid          INTEGER NOT NULL,
    heartbeat_at REAL    NOT NULL,
    detail       TEXT    NOT NULL DEFAULT '{}'
);
