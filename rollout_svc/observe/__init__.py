"""Subscribers to events: logs, metrics, progress. Nothing here decides anything."""
