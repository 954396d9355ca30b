"""What every test needs."""

import asyncio

# pytest-asyncio asks for the main thread's loop around each synchronous fixture; where none was ever set, Python 3.11
# makes one that nobody closes, and the run ends with a ResourceWarning. Once set, to None, it is not made.
asyncio.set_event_loop(None)
