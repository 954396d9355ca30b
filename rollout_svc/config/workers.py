"""The settings of one engine."""

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from rollout_svc.config.base import Count, Secret, Settings

__all__ = ["WorkerConfig"]

Dialect = Literal["auto", "sglang", "vllm", "lmdeploy"]


class WorkerConfig(Settings):
    """One inference engine, reached over HTTP."""

    url: str
    """`http://` or `https://` address of the engine, unique in the fleet."""
    dialect: Dialect = "auto"
    """Which engine it is; `auto` asks it."""
    api_key: Secret | None = Field(None, repr=False)
    """Sent with generation requests."""
    admin_key: Secret | None = Field(None, repr=False)
    """Sent with control requests: aborts and weights."""
    max_batch: Count | None = None
    """Requests the engine runs at once; null: `trainer.max_batch_per_worker`."""
    exclusive: bool = True
    """Nobody else uses this engine: an abort may then be for all of its requests."""
    stream: bool = False
    """Receive tokens as they are made, so that a cancelled call keeps those it had."""

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError("expected http://HOST[:PORT] or https://HOST[:PORT]")
        if parts.port == 0:
            raise ValueError("port 0 is no address to reach an engine at")
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError("an address only, please: no user, query or fragment; keys go to api_key and admin_key")
        return url.rstrip("/")
