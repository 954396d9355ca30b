"""An engine process that answers canned bodies after a delay, at the least CPU: `python -m bench.canned`.

It speaks the dialect it is told, on as many ports as it is told: each port is an engine of its own. It believes its
clients: bodies are searched for the few fields needed, not validated.
"""
