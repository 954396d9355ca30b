"""Histories of a coordinator over several services, each with engines, prompts and a journal of its own."""
