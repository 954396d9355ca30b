"""Fakes written by hand, and helpers that start real parts."""
