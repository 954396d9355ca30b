"""Prompts answered and judged beside training, under one weight version: lane `eval`."""
