-- Causes have codes; those of before get theirs by the sentences that were written then.
ALTER TABLE jobs ADD COLUMN cause_code TEXT NOT NULL DEFAULT '';
ALTER TABLE groups ADD COLUMN cause_code TEXT NOT NULL DEFAULT '';
UPDATE groups SET cause_code = CASE
    WHEN cause LIKE 'is_valid_group refused%' THEN 'not_valid'
    WHEN cause LIKE 'filter_item kept%' THEN 'items_filtered'
    WHEN cause LIKE 'timed out%' THEN 'timed_out'
    WHEN cause LIKE 'slots failed%' THEN 'slots_failed'
    WHEN cause LIKE 'stale:%' THEN 'stale'
    WHEN cause LIKE 'damaged:%' THEN 'damaged'
    WHEN cause = 'in the skip list' THEN 'skip_list'
    WHEN cause = 'cancelled by request' THEN 'cancelled'
    WHEN cause LIKE 'a fresh start took%' THEN 'superseded'
    WHEN state = 'failed' THEN 'group_function'
    ELSE ''
END WHERE cause != '';
UPDATE jobs SET cause_code = CASE
    WHEN cause LIKE 'nobody polls it%' THEN 'idle'
    WHEN cause LIKE 'the engine is away%' THEN 'engine_away'
    WHEN cause = 'cancelled by request' THEN 'cancelled'
    WHEN cause LIKE 'a fresh start took%' THEN 'superseded'
    WHEN cause LIKE 'none of % groups could be delivered%' OR cause LIKE 'all % groups were filtered%' THEN 'no_group_ready'
    WHEN cause LIKE '% of % attempts failed%' THEN 'attempts_failed'
    ELSE 'not_played'
END WHERE cause != '';
DROP INDEX groups_by_cause;
CREATE INDEX groups_by_cause ON groups (job_key, state, cause_code, cause) WHERE state IN ('filtered', 'failed');
