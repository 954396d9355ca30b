"""Tests of the subscribers."""
