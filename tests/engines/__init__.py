"""Tests of dialects and the transport."""
