"""Device work: one verb, `step`, that runs a plan. Knows no queues."""
