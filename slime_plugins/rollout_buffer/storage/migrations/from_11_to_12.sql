-- Weight versions are ordered within one run of the trainer; refused rewards are counted; causes are counted by an index.
ALTER TABLE jobs ADD COLUMN trainer_run INTEGER NOT NULL DEFAULT 1;
ALTER TABLE jobs ADD COLUMN run_began_at REAL;
ALTER TABLE jobs ADD COLUMN first_weight_version INTEGER;
ALTER TABLE jobs ADD COLUMN earlier_weight_version INTEGER;
ALTER TABLE jobs ADD COLUMN lone_versions INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN lone_version INTEGER;
ALTER TABLE jobs ADD COLUMN refused_items INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN last_refusal TEXT NOT NULL DEFAULT '';
ALTER TABLE trajectories ADD COLUMN trainer_run INTEGER NOT NULL DEFAULT 1;
ALTER TABLE jobs ADD COLUMN takes_items INTEGER NOT NULL DEFAULT 1;
CREATE INDEX groups_by_cause ON groups (job_key, state, cause) WHERE state IN ('filtered', 'failed');
UPDATE jobs SET first_weight_version = weight_version;
