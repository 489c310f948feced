-- Every start id of a job, not the last one alone, and with which payload a trainer started it.
CREATE TABLE start_ids (
    key      INTEGER PRIMARY KEY,             -- in the order of the starts
    job_key  INTEGER NOT NULL REFERENCES jobs (key),
    job_id   TEXT    NOT NULL,                -- the job's name at that start
    start_id TEXT    NOT NULL,
    identity TEXT    NOT NULL                 -- digest of the payload that came with it
);
CREATE INDEX start_ids_by_id ON start_ids (start_id);
CREATE INDEX start_ids_by_job ON start_ids (job_key);
INSERT INTO start_ids (job_key, job_id, start_id, identity)
    SELECT key, job_id, start_id, identity FROM jobs WHERE start_id IS NOT NULL ORDER BY key;
ALTER TABLE jobs ADD COLUMN trainer_identity TEXT; -- digest of the payload with which a trainer started it; NULL: none has
UPDATE jobs SET trainer_identity = identity
    WHERE start_id IS NOT NULL OR last_poll_at IS NOT NULL;
ALTER TABLE jobs DROP COLUMN start_id;
