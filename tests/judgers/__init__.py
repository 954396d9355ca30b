"""Tests of the judgers that come with the service."""
