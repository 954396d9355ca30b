"""Stopping: the ladder as a pure plan, the one function that climbs it, and who may ask for it."""
