"""Tests of groups under way."""
