"""The settings of one engine: one that runs already, or one that is launched."""

import ipaddress
import sys
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, field_validator, model_validator

from rollout_svc.config.base import Count, Listed, Seconds, Secret, Settings, refuse
from rollout_svc.config.cluster import Resources
from rollout_svc.config.placement import BUNDLES_VARIABLE, PlacementConfig

__all__ = ["LOG_FOLDER", "LaunchConfig", "WorkerConfig", "address_of", "launch_misfit"]

_LAST_PORT: Final = 65535
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}

LOG_FOLDER: Final = "engine-logs"
"""Where the logs of launched engines go unless a configuration says otherwise, below the folder the service runs in."""

Dialect = Literal["auto", "sglang", "vllm", "lmdeploy"]


def _quoted(value: Any) -> Any:
    """Say how to write a number where a text is needed: environments hold texts."""
    if isinstance(value, bool | int | float):
        raise ValueError(f"expected a text: write it in quotes, {str(value).lower()!r}")  # noqa: TRY004 - pydantic maps this one
    return value


def _port(value: Any) -> Any:
    """Refuse in one sentence what is neither."""
    if value != "auto" and not (type(value) is int and 1 <= value <= _LAST_PORT):
        raise ValueError(f"expected auto, or a port from 1 to {_LAST_PORT}")
    return value


Text = Annotated[str, Field(pattern=r"^[^\x00]*$"), BeforeValidator(_quoted)]
"""Goes to the system as an argument or a variable: no zero byte."""


def _http_address(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("expected http://HOST[:PORT] or https://HOST[:PORT]")
    if parts.port == 0:
        raise ValueError("port 0 is no address to reach an engine at")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError("an address only, please: no user, query or fragment; keys go to api_key and admin_key")
    return url.rstrip("/")


def address_of(url: str) -> str:
    """The url as far as it says which engine is meant: two workers on one engine would abort each other's requests."""
    parts = urlsplit(url.lower())
    host = "127.0.0.1" if parts.hostname in ("localhost", "::1") else parts.hostname
    port = parts.port or _DEFAULT_PORTS.get(parts.scheme)
    return f"{parts.scheme}://{host}:{port}{parts.path}"


class LaunchConfig(Settings):
    """An engine that the service starts, restarts and ends."""

    command: Listed[Text]
    """The program and its arguments, run without a shell. `{port}` and `{host}` stand for where it has to listen,
    `{python}` for the interpreter that runs the service."""
    host: str = Field("127.0.0.1", min_length=1, pattern=r"^[^\s/]+$")
    """Where the engine listens and is reached; on a cluster its node's address, and not to be given."""
    port: Annotated[int | Literal["auto"], BeforeValidator(_port)] = "auto"
    """Where it listens; `auto` finds a free one, and `{port}` has to be in the command."""
    env: dict[Annotated[str, Field(pattern=r"^[^=\x00]+$")], Text] = Field(default_factory=dict, repr=False)
    """Variables laid over the service's own environment; `${NAME}` is the value of one of the service's."""
    log_dir: str | None = Field(None, min_length=1)
    """Folder of the engine's log, `WORKER.log`, which is kept and appended to; null: `engine-logs`, on a cluster the
    folder of Ray's own logs on its node."""
    restarts: int = Field(5, ge=0, le=1000)
    """How often it is started again in any `restart_window_s` when its process ends; then its worker stays DEAD."""
    restart_window_s: Seconds = 3600.0
    """Seconds after which a restart is forgotten."""
    resources: Resources | None = None
    """On a cluster, what its bundle of the placement group holds, as in `{CPU: 4, GPU: 1}`; null: one CPU."""
    placement: PlacementConfig | None = None
    """Where LMDeploy makes its Ray workers, in a placement group that it does not own."""

    @property
    def log_folder(self) -> str:
        """Where the log goes."""
        return self.log_dir or LOG_FOLDER

    @property
    def fixed_url(self) -> str | None:
        """Its address, where that does not wait for a free port."""
        return None if self.port == "auto" else self.url_at(self.port)

    def command_at(self, port: int | None, host: str | None = None, python: str = sys.executable) -> tuple[str, ...]:
        """The command, filled in for a place. Plain replacement: an argument may be JSON, full of braces."""
        places = {"{python}": python, "{host}": host or self.host, "{port}": str(port)}

        def filled(word: str) -> str:
            for name, value in places.items():
                word = word.replace(name, value)
            return word

        return tuple(map(filled, self.command))

    def url_at(self, port: int, host: str | None = None) -> str:
        """The address of the engine where it listens at this port; whoever listens everywhere is reached from here."""
        host = host or self.host
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return f"http://{host}:{port}"
        if address.is_unspecified:
            address = ipaddress.ip_address("::1" if address.version == 6 else "127.0.0.1")  # noqa: PLR2004
        return f"http://[{address}]:{port}" if address.version == 6 else f"http://{address}:{port}"  # noqa: PLR2004

    @field_validator("command")
    @classmethod
    def _some_program(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        if not command or not command[0]:
            raise ValueError("expected the program and its arguments")
        return command

    @model_validator(mode="after")
    def _port_is_passed_on(self) -> Self:
        if self.port == "auto" and not any("{port}" in word for word in self.command):
            raise refuse(("command",), "has no {port}: with port auto the engine must be told where to listen")
        return self

    @model_validator(mode="after")
    def _resources_can_be_set_aside(self) -> Self:
        if self.resources is not None and not self.resources:
            raise refuse(("resources",), "are empty: leave them out for one CPU")
        if self.resources is not None and self.placement is not None and not self.placement.owns_group:
            raise refuse(("resources",), "are set aside in placement.group already: leave them out")
        for name, amount in (self.resources or {}).items():
            if name == "GPU" and amount > 1 and amount != int(amount):
                raise refuse(("resources", name), f"{amount:g} cannot be set aside: a whole number, or a part of one")
        return self

    @model_validator(mode="after")
    def _bundles_are_said_once(self) -> Self:
        if self.placement is not None and BUNDLES_VARIABLE in self.env:
            raise refuse(("env", BUNDLES_VARIABLE), "is made from placement.bundles: leave one of the two out")
        return self


def launch_misfit(launch: LaunchConfig, *, on_cluster: bool) -> tuple[str, str] | None:
    """Say which setting of a launch means nothing where the engine is to run, and why; None where all do."""
    if on_cluster and "host" in launch.model_fields_set:
        return "host", "on a cluster an engine listens at the address of its node, {host} in the command: leave it out"
    if not on_cluster and launch.resources is not None:
        return "resources", "are set aside on a cluster only: give `cluster: ray`, or leave them out"
    return None


class WorkerConfig(Settings):
    """One inference engine, reached over HTTP: exactly one of `url`, `launch`."""

    url: str | None = None
    """`http://` or `https://` address of the engine, or of the router in front of `engines`; unique in the fleet."""
    engines: Listed[str] | None = None
    """Where `url` is a sglang-router: the engines it sends to; all but generation goes to them directly."""
    launch: LaunchConfig | None = None
    """How to start the engine, where the service is to do so."""
    dialect: Dialect = "auto"
    """Which engine it is; `auto` asks it."""
    api_key: Secret | None = Field(None, repr=False)
    """Sent with generation requests."""
    admin_key: Secret | None = Field(None, repr=False)
    """Sent with control requests: aborts and weights."""
    max_batch: Count | None = None
    """Requests the engine (each of `engines`, if given) runs at once; null: `trainer.max_batch_per_worker`."""
    exclusive: bool = True
    """Nobody else uses this engine: an abort may then be for all of its requests."""
    stream: bool = False
    """Receive tokens as they are made, so that a cancelled call keeps those it had."""

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str | None) -> str | None:
        return None if url is None else _http_address(url)

    @field_validator("engines")
    @classmethod
    def _are_http(cls, engines: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if engines is not None and not engines:
            raise ValueError("list the engines behind the router, or leave this out where there is no router")
        return None if engines is None else tuple(_http_address(url) for url in engines)

    @model_validator(mode="after")
    def _a_router_speaks_sglang(self) -> Self:
        if self.engines is not None and self.url is None:
            raise refuse(
                ("engines",), "are behind a router, whose address is url; what is launched is an engine itself"
            )
        if self.engines is not None and self.dialect not in {"auto", "sglang"}:
            raise refuse(("engines",), f"a router is for SGLang engines, and the dialect is {self.dialect!r}")
        return self

    @model_validator(mode="after")
    def _bundles_are_read_by_lmdeploy(self) -> Self:
        if self.launch is not None and self.launch.placement is not None and self.dialect not in {"auto", "lmdeploy"}:
            words = f"only LMDeploy reads it, and the dialect is {self.dialect!r}"
            raise refuse(("launch", "placement"), words)
        return self

    @property
    def behind(self) -> tuple[str, ...]:
        """The engines behind a router; none where it is the engine itself."""
        return self.engines or ()

    @model_validator(mode="after")
    def _one_way_to_have_it(self) -> Self:
        if (self.url is None) == (self.launch is None):
            raise ValueError("give exactly one of url, launch")
        return self
