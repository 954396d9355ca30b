"""The service's view of the engines: one worker each, and the pool that routes, limits and watches them."""
