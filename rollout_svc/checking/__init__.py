"""Whether a class of somebody's own keeps the contract of an agent loop or of a judger, found out by trying.

`agents.py` and `judgers.py` are what is tried; `findings.py` is what is said about it.
"""

from rollout_svc.checking.findings import Finding, Report

__all__ = ["Finding", "Report"]
