"""Tests of workers, breaker and routing."""
