"""Who may call what: a data key and an admin key.

Invariants:
- Health routes are open to all.
- Admin routes want the admin key and no other once there is one; before that, the data key if there is one.
- Every other route wants the data key if there is one; the admin key does not open it.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from typing import Final

OPEN_ROUTES: Final = frozenset({"/health", "/health_generate", "/ready"})

ADMIN_ROUTES: Final = frozenset(
    {
        "/abort_request",
        "/pause_generation",
        "/continue_generation",
        "/update_weights_from_disk",
        "/update_weight_version",
        "/begin_weight_update",
        "/update_weights_from_shared_memory",
        "/init_weights_update_group",
        "/update_weights_from_distributed",
        "/destroy_weights_update_group",
        "/end_weight_update",
        "/abandon_weight_update",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/flush_cache",
    }
)

_SCHEME: Final = "Bearer "


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a server; None where there is none."""

    api_key: str | None = field(default=None, repr=False)
    admin_api_key: str | None = field(default=None, repr=False)

    def admits(self, path: str, authorization: str | None) -> bool:
        """Decide whether a request may proceed.

        Args:
            path: The request's path.
            authorization: Its `Authorization` header.
        """
        if path in OPEN_ROUTES:
            return True
        wanted = self.admin_api_key or self.api_key if path in ADMIN_ROUTES else self.api_key
        if not wanted:
            return True
        given = authorization or ""
        return given.startswith(_SCHEME) and hmac.compare_digest(given[len(_SCHEME) :].encode(), wanted.encode())
