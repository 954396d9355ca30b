"""Tests of what the producer decides."""
