-- The options of a job's generator leave the row of the job, which is read with every write and poll.
CREATE TABLE job_options (
    job_key INTEGER PRIMARY KEY REFERENCES jobs (key),
    options BLOB    NOT NULL
);
INSERT INTO job_options
    SELECT key, CAST(json_remove(
        settings,
        '$.task_type', '$.input_file', '$.num_process', '$.num_process_min', '$.num_process_max', '$.num_epoch',
        '$.num_repeat_per_sample', '$.tokenizer_path', '$.max_tokens', '$.sampling_params', '$.evaluation',
        '$.engine_api', '$.engine_model', '$.sampling_seed', '$.min_valid_group_size_ratio',
        '$.min_valid_item_size_ratio', '$.min_timeout_group_size_ratio', '$.group_timeout_seconds',
        '$.reward_range', '$.normalize_rewards', '$.padding', '$.max_attempts', '$.attempt_timeout_seconds',
        '$.stop_hopeless_groups', '$.stop_after_failures', '$.max_groups_ahead', '$.max_weight_version_lag',
        '$.staleness_policy', '$.stale_groups', '$.pause_when_idle_s'
    ) AS BLOB) FROM jobs;
UPDATE jobs SET settings = (
    SELECT json_group_object(one.key, json(
        CASE WHEN one.type IN ('true', 'false') THEN one.type WHEN one.type IN ('object', 'array') THEN one.value
        ELSE json_quote(one.value) END
    )) FROM json_each(jobs.settings) AS one
    WHERE one.key IN (
        'task_type', 'input_file', 'num_process', 'num_process_min', 'num_process_max', 'num_epoch',
        'num_repeat_per_sample', 'tokenizer_path', 'max_tokens', 'sampling_params', 'evaluation', 'engine_api',
        'engine_model', 'sampling_seed', 'min_valid_group_size_ratio', 'min_valid_item_size_ratio',
        'min_timeout_group_size_ratio', 'group_timeout_seconds', 'reward_range', 'normalize_rewards', 'padding',
        'max_attempts', 'attempt_timeout_seconds', 'stop_hopeless_groups', 'stop_after_failures',
        'max_groups_ahead', 'max_weight_version_lag', 'staleness_policy', 'stale_groups', 'pause_when_idle_s'
    )
);
