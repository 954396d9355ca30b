"""What the service costs as the fleet and the requests in flight grow: `python -m tests.simulation.scale`."""
