-- Numbers of packs are given once: the next one is beyond all that any row names.
CREATE TABLE counters (
    name TEXT    PRIMARY KEY,
    last INTEGER NOT NULL
) WITHOUT ROWID;
INSERT INTO counters SELECT 'pack', coalesce(max(number), 0) FROM (
    SELECT number FROM packs
    UNION ALL SELECT CAST(substr(place, 1, instr(place, ':') - 1) AS INTEGER) FROM images
    UNION ALL SELECT CAST(substr(body_place, 1, instr(body_place, ':') - 1) AS INTEGER) FROM trajectories
        WHERE body_place IS NOT NULL
);
