"""Filters: what may drop a finished group before it is stored."""

from rollout_svc.filtering.desk import FILTER_FAILED, FilterDesk
from rollout_svc.filtering.views import GroupView, SampleView, view_of

__all__ = ["FILTER_FAILED", "FilterDesk", "GroupView", "SampleView", "view_of"]
