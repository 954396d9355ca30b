"""One answer: its tokens, its status, and what is to survive of it; `sample.py` is the place to begin."""

from rollout_svc.sample.sample import Sample
from rollout_svc.sample.status import SETTLED_STATUSES, ResumeAt, SampleStatus

__all__ = ["SETTLED_STATUSES", "ResumeAt", "Sample", "SampleStatus"]
