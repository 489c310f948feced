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
