-- What the engines said of the prompts that they ran, summed over a job.
CREATE TABLE prompt_sums (
    job_key      INTEGER PRIMARY KEY REFERENCES jobs (key),
    equal        INTEGER NOT NULL,
    differing    INTEGER NOT NULL,
    unknown      INTEGER NOT NULL,
    untrained    INTEGER NOT NULL,
    forked       INTEGER NOT NULL,
    extra_tokens INTEGER NOT NULL,
    row_tokens   INTEGER NOT NULL
);
