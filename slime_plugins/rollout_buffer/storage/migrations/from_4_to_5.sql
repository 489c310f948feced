-- What charts and filters know of a trajectory, how long a poll waited, and indices to look by.
ALTER TABLE jobs ADD COLUMN waiting_since REAL;
ALTER TABLE deliveries ADD COLUMN waited_s REAL;
ALTER TABLE trajectories ADD COLUMN versions_behind INTEGER;
ALTER TABLE trajectories ADD COLUMN success REAL;
ALTER TABLE trajectories ADD COLUMN turns INTEGER;
ALTER TABLE trajectories ADD COLUMN sampled_tokens INTEGER;
ALTER TABLE trajectories ADD COLUMN generate_s REAL;
ALTER TABLE trajectories ADD COLUMN played_s REAL;
CREATE INDEX groups_by_closing ON groups (job_key, closed_at, state) WHERE closed_at IS NOT NULL;
CREATE INDEX groups_by_touch ON groups (
    job_key, coalesce(closed_at, last_write_at, opened_at, 0.0) DESC, key, state, instance_id
);
CREATE INDEX attempts_failed ON attempts (ended_at, error_code) WHERE state = 'failed';
CREATE INDEX attempts_running ON attempts (started_at) WHERE state = 'running';
CREATE INDEX trajectories_to_look_at ON trajectories (
    job_key, key, created_at, outcome, stop_reason, reward, success, late, oldest_version, versions_behind, turns,
    sampled_tokens, generate_s, played_s, instance_id, uid
);
CREATE INDEX deliveries_by_job ON deliveries (job_key, created_at, waited_s);
