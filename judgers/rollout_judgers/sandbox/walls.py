"""The walls of the sandbox: bubblewrap, or `unshare` and a few mounts of our own; which of them works here.

Invariants, of both:

- Namespaces of its own for mounts, processes, network, IPC and host name: no network at all, not even loopback, and
  nobody to signal or to look at outside.
- The system is read-only, and of the machine's files it has only what programs need to run: no home, no service.
- What it writes is in memory, bounded, and gone at the end.
- No capabilities, and none to be had: not from files either.
- The first process of its namespace is not its own: when it dies, the kernel kills everybody in there.

Limits on processes do not bind root, whoever root is called inside. So under root the walls are built with root's
own rights, by `unshare`, and the program runs under a number that nobody else has.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from rollout_judgers.sandbox.limits import Limits

__all__ = ["ENVIRONMENT", "HOME", "READY", "Kind", "Walls", "choose"]

Kind = Literal["bubblewrap", "unshare", "none"]
HOME: Final = "/tmp"  # noqa: S108 - in there, a file system of its own
READY: Final = "ready"
"""Written to the status descriptor once the walls stand."""
ENVIRONMENT: Final = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": HOME, "LANG": "C.UTF-8"}

_SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_DEVICES: Final = ("null", "zero", "full", "random", "urandom")
_TOOLS: Final = ("unshare", "mount", "umount", "pivot_root", "prlimit", "setpriv", "sh", "cat", "mkdir", "touch", "ln")
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_UIDS: Final = 100_000_000  # numbers at the far end of those there are, where nobody is
_PROBE_S: Final = 20.0  # seconds that a first, empty run may take

# Run by the first process of the namespaces. $1: bytes of files; $2: the new root's place, an empty mount point
# afterwards; $3: the status descriptor; $4: what is bound, a line each; $5: files, `descriptor name` a line each; the
# rest: the command. The command is not exec'd: the first process has to stay ours.
_BUILD: Final = """
set -eu
size=$1 root=$2 status=$3 bound=$4 files=$5
shift 5
mount --make-rprivate /
mount -t tmpfs -o mode=755,size=1m,nosuid,nodev tmpfs "$root"
old=$root/.old
mkdir "$root/dev" "$root/proc" "$root/tmp" "$root/dev/shm" "$old"
printf '%s\\n' "$bound" | while IFS= read -r path; do
  if [ -L "$path" ]; then
    ln -s "$(readlink "$path")" "$root$path"
  elif [ -e "$path" ]; then
    if [ -d "$path" ]; then mkdir -p "$root$path"; else mkdir -p "$root${path%/*}"; touch "$root$path"; fi
    mount --bind "$path" "$root$path" || mount --rbind "$path" "$root$path"
    mount -o remount,bind,ro,nosuid,nodev "$root$path"
  fi
done
for device in null zero full random urandom; do
  touch "$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
ln -s /proc/self/fd "$root/dev/fd"
mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
mount -t tmpfs -o "mode=1777,size=$size,nr_inodes=65536,nosuid,nodev" tmpfs "$root/tmp"
mount -t tmpfs -o "mode=1777,size=$size,nr_inodes=4096,nosuid,nodev" tmpfs "$root/dev/shm"
printf '%s\\n' "$files" | while read -r descriptor name; do
  if [ -n "$descriptor" ]; then cat "/proc/self/fd/$descriptor" > "$root/tmp/$name"; fi
done
cd "$root"
pivot_root . .old
umount -l /.old
mount -o remount,ro,nosuid,nodev /
cd /tmp
echo ready > "/proc/self/fd/$status"
set +e
"$@"
exit $?
"""


@dataclass(frozen=True, slots=True)
class Walls:
    """How commands are walled off.

    Attributes:
        kind: by what; `none`: not at all.
        readable: further paths that programs may read.
    """

    kind: Kind
    readable: tuple[str, ...] = ()

    def command(
        self, command: Sequence[str], limits: Limits, files: Mapping[int, str], status: int, workplace: str
    ) -> list[str]:
        """Return the command line that runs `command` inside.

        Args:
            command: the program, as it is called in there.
            limits: what it may use.
            files: names of files it finds in its home, by the descriptors their content is read from.
            status: a descriptor that `READY` is written to once the walls stand.
            workplace: an empty directory, outside.
        """
        limited = ["prlimit", *limits.as_arguments(), "--"]
        if self.kind == "bubblewrap":
            return [*self._bubblewrap(limits, files), *limited, *_announced(status), *command]
        if self.kind == "unshare":
            listed = "\n".join(f"{descriptor} {name}" for descriptor, name in files.items())
            built = [str(limits.file_bytes), workplace, str(status), "\n".join(self._bound()), listed]
            return [*_unshared(), "sh", "-c", _BUILD, "sandbox", *built, *limited, *_dropped(), *command]
        return [*limited, *_announced(status), *command]

    def _bound(self) -> list[str]:
        python = [prefix for prefix in (sys.base_prefix, *self.readable) if not prefix.startswith("/usr/")]
        return [*_SYSTEM, *python]

    def _bubblewrap(self, limits: Limits, files: Mapping[int, str]) -> list[str]:
        walls = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
        for name, value in ENVIRONMENT.items():
            walls += ["--setenv", name, value]
        for path in self._bound():
            if Path(path).is_symlink():
                walls += ["--symlink", os.readlink(path), path]  # noqa: PTH115 - as it is written
            else:
                walls += ["--ro-bind-try", path, path]
        size = str(limits.file_bytes)
        walls += ["--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", HOME]
        for descriptor, name in files.items():
            walls += ["--file", str(descriptor), f"{HOME}/{name}"]
        return [*walls, "--chdir", HOME, "--remount-ro", "/", "--"]


def choose(wanted: Kind | Literal["auto"], readable: Sequence[str] = ()) -> Walls | str:
    """Return walls that stand here; or why there are none."""
    if wanted == "none":
        return Walls("none", tuple(readable))
    order: tuple[Kind, ...] = ("unshare", "bubblewrap") if os.geteuid() == 0 else ("bubblewrap", "unshare")
    problems = []
    for kind in order if wanted == "auto" else (wanted,):
        walls = Walls(kind, tuple(readable))
        problem = _problem(walls)
        if problem is None:
            return walls
        problems.append(f"{kind}: {problem}")
    return "; ".join(problems)


@functools.cache
def _problem(walls: Walls) -> str | None:
    """Why these walls do not stand here; None where they do, which was tried."""
    missing = [tool for tool in (("bwrap", "prlimit") if walls.kind == "bubblewrap" else _TOOLS) if not _found(tool)]
    if missing:
        return f"{', '.join(missing)} is not installed"
    from rollout_judgers.sandbox.run import Sandbox, SandboxError  # noqa: PLC0415 - it builds on this

    try:
        ran = Sandbox(walls).run(["cat", "/proc/net/dev"], limits=Limits(wall_s=_PROBE_S))
    except SandboxError as error:
        return str(error)
    if ran.exit_code != 0:
        return f"a first program ended with exit code {ran.exit_code}: {ran.stderr[-200:]}"
    return None


def _found(tool: str) -> bool:
    return shutil.which(tool, path=_PATH) is not None


def _unshared() -> list[str]:
    own = ["--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child=KILL"]
    return ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), *own, "--"]


def _dropped() -> list[str]:
    """The command that gives up all rights, and under root root's number."""
    rights = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    number = str(_nobody())
    other = ["--reuid", number, "--regid", number, "--clear-groups"] if os.geteuid() == 0 else []
    return ["setpriv", *other, *rights, "--"]


def _nobody() -> int:
    """A number for a user that nobody has: limits on processes are counted by it."""
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()]
    first, count = max(((int(first), int(count)) for first, _, count in ranges), key=lambda found: found[1])
    return first + count - 2 - int.from_bytes(os.urandom(4)) % max(1, min(_UIDS, count // 2))


def _announced(status: int) -> list[str]:
    return ["sh", "-c", f'echo ready > "/proc/self/fd/{status}"; exec "$@"', "sandbox"]
