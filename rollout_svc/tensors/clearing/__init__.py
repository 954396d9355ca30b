"""The end of a step: every process that could have cached a shard lets go of it."""
