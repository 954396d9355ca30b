"""One-line bugs that the simulator has to find, each of a kind that was met before; put into the service in memory."""
