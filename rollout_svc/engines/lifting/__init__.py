"""Values too big to be parsed with their body: taken out as it comes in, and read off the event loop."""

from rollout_svc.engines.lifting.base64 import Base64
from rollout_svc.engines.lifting.numbers import Numbers
from rollout_svc.engines.lifting.reading import Lifting, new_threads
from rollout_svc.engines.lifting.scanner import Part, Scanner

__all__ = ["Base64", "Lifting", "Numbers", "Part", "Scanner", "new_threads"]
