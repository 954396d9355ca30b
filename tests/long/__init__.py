"""Tests that wait for real processes to start and end, again and again: `make test-long`."""
