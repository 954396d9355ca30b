"""Producer shards: several services that are one to a trainer, and the coordinator that makes them so."""
