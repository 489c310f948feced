-- Sums of trajectories by the minute.
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

INSERT INTO trajectory_minutes SELECT job_key, CAST(created_at / 60 AS INTEGER), count(*), total(reward), min(reward),
    max(reward), count(success), coalesce(sum(success >= 1), 0), sum(outcome = 'completed'), sum(outcome = 'truncated'),
    sum(outcome = 'aborted'), count(versions_behind), coalesce(sum(versions_behind), 0), max(versions_behind),
    count(turns), coalesce(sum(turns), 0), count(sampled_tokens), coalesce(sum(sampled_tokens), 0), total(generate_s),
    total(played_s) FROM trajectories WHERE late = 0 GROUP BY 1, 2;
