"""Where a worker listens, and what its requests carry.

Invariant: pure: addresses and headers, no socket.
"""

from __future__ import annotations

from yarl import URL

__all__ = ["Endpoint"]


class Endpoint:
    """Where a worker listens, and the headers its two lanes need."""

    __slots__ = ("_urls", "admin_headers", "data_headers", "url")

    def __init__(self, url: str, api_key: str | None, admin_key: str | None) -> None:
        self.url = url.rstrip("/")
        self._urls: dict[str, URL] = {}
        base = {"Content-Type": "application/json"}
        self.data_headers = base | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        key = admin_key or api_key
        self.admin_headers = base | ({"Authorization": f"Bearer {key}"} if key else {})

    @property
    def guarded(self) -> bool:
        """Whether its control requests carry a key."""
        return "Authorization" in self.admin_headers

    def moved(self, url: str) -> Endpoint:
        """The same keys at another address."""
        there = Endpoint(url, None, None)
        there.data_headers, there.admin_headers = self.data_headers, self.admin_headers
        return there

    def at(self, path: str) -> URL:
        """The address of a path here; parsed once, as one is used for every generation."""
        known = self._urls.get(path)
        if known is None:
            known = self._urls[path] = URL(self.url + path)
        return known
