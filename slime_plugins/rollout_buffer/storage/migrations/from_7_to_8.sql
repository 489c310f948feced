-- How many attempts of a job are in which state.
CREATE TABLE attempt_counts (
    job_key    INTEGER NOT NULL REFERENCES jobs (key),
    state      TEXT    NOT NULL,
    error_code TEXT    NOT NULL,                -- empty when there was no error
    attempts   INTEGER NOT NULL,
    PRIMARY KEY (job_key, state, error_code)
) WITHOUT ROWID;
CREATE TRIGGER attempts_begun AFTER INSERT ON attempts BEGIN
    INSERT INTO attempt_counts VALUES (
        (SELECT job_key FROM groups WHERE key = NEW.group_key), NEW.state, coalesce(NEW.error_code, ''), 1
    ) ON CONFLICT (job_key, state, error_code) DO UPDATE SET attempts = attempts + 1;
END;
CREATE TRIGGER attempts_changed AFTER UPDATE OF state, error_code ON attempts BEGIN
    UPDATE attempt_counts SET attempts = attempts - 1 WHERE state = OLD.state
        AND error_code = coalesce(OLD.error_code, '')
        AND job_key = (SELECT job_key FROM groups WHERE key = OLD.group_key);
    INSERT INTO attempt_counts VALUES (
        (SELECT job_key FROM groups WHERE key = NEW.group_key), NEW.state, coalesce(NEW.error_code, ''), 1
    ) ON CONFLICT (job_key, state, error_code) DO UPDATE SET attempts = attempts + 1;
END;

INSERT INTO attempt_counts SELECT job_key, attempts.state, coalesce(error_code, ''), count(*)
    FROM attempts JOIN groups ON groups.key = group_key GROUP BY 1, 2, 3;
