"""The ways in: HTTP control API and its clients."""
