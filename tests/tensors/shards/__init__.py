"""Shards: their owner, their buffer, their way over the wire."""
