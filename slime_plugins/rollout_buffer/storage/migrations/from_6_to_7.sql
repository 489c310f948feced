-- What deliveries report of the rewards, in portions that a trigger sums.
DROP INDEX trajectories_unreported;
ALTER TABLE jobs ADD COLUMN portion INTEGER NOT NULL DEFAULT 1;
UPDATE jobs SET portion = 1 + coalesce((SELECT max(key) FROM deliveries), 0);
ALTER TABLE trajectories RENAME COLUMN reported_in TO portion;
UPDATE trajectories SET portion = (SELECT jobs.portion FROM jobs WHERE key = job_key) WHERE portion IS NULL;
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

INSERT INTO portion_sums SELECT job_key, trajectories.portion, outcome, count(*), 0, total(reward),
    total(reward * reward), min(reward), max(reward), nullif(trajectories.portion, jobs.portion)
    FROM trajectories JOIN jobs ON jobs.key = job_key GROUP BY 1, 2, 3;
UPDATE portion_sums AS sums SET groups = (SELECT count(DISTINCT group_key) FROM trajectories
    WHERE job_key = sums.job_key AND portion = sums.portion) WHERE outcome = (SELECT min(outcome) FROM portion_sums
    WHERE job_key = sums.job_key AND portion = sums.portion);
