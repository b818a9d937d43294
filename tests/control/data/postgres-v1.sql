CREATE TABLE migrations (version INTEGER PRIMARY KEY, applied TIMESTAMPTZ NOT NULL DEFAULT now());
CREATE TABLE events (number BIGINT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE metrics (
    number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job TEXT NOT NULL, attempt BIGINT NOT NULL, rank BIGINT NOT NULL, step BIGINT NOT NULL,
    body TEXT NOT NULL, UNIQUE (job, attempt, rank, step)
);
CREATE INDEX metrics_of_job ON metrics (job, number);
CREATE TABLE logs (
    number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job TEXT NOT NULL, attempt BIGINT NOT NULL, rank BIGINT NOT NULL,
    start BIGINT NOT NULL, stop BIGINT NOT NULL, body BYTEA NOT NULL
);
CREATE INDEX logs_of_job ON logs (job, number);
CREATE INDEX logs_of_rank ON logs (job, attempt, rank, stop);
CREATE TABLE tokens (
    digest TEXT PRIMARY KEY, role TEXT NOT NULL, name TEXT NOT NULL, created_s DOUBLE PRECISION NOT NULL
);
INSERT INTO migrations (version) VALUES (1);
INSERT INTO metrics (job, attempt, rank, step, body) VALUES
    ('tiny-00000001', 1, 0, 0, '{"job":"tiny-00000001","attempt":1,"rank":0,"step":0,"values":{"loss":5.5}}');
INSERT INTO logs (job, attempt, rank, start, stop, body) VALUES ('tiny-00000001', 1, 0, 0, 5, 'hello');
INSERT INTO tokens VALUES ('d', 'user', 'ann', 1.0);
