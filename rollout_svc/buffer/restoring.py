"""Going on from a snapshot: what may be wrong with it, told as what is wrong with a configuration.

Invariant: a restoring that is refused has changed nothing: no journal is there, and the snapshot is as it was.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

from rollout_svc.buffer.journal.fingerprint import Fingerprint
from rollout_svc.buffer.snapshots import NotASnapshotError, Restored, WrongStepError, restore
from rollout_svc.errors import ConfigError

__all__ = ["restore_journal"]

_JOURNAL: Final = "buffer.path"
_SNAPSHOT: Final = "--restore"
_STEP: Final = "--restore-step"


def restore_journal(snapshot: Path, journal: Path | None, fingerprint: Fingerprint, step: int | None) -> Restored:
    """Make a snapshot the journal; blocks. See `snapshots.restore`.

    Raises:
        ConfigError: why it cannot be done, in one line.
    """
    if journal is None:
        raise ConfigError.at(_JOURNAL, f"is not set: it names the journal that {snapshot} is to become")
    if not journal.parent.is_dir():
        raise ConfigError.at(_JOURNAL, f"there is no folder {journal.parent}")
    try:
        return restore(snapshot, journal, fingerprint, step)
    except FileExistsError as error:
        message = f"{error} is there already, and {snapshot} is restored only where there is no journal: move one away"
        raise ConfigError.at(_JOURNAL, message) from None
    except NotASnapshotError as error:
        raise ConfigError.at(_SNAPSHOT, str(error)) from None
    except WrongStepError as error:
        raise ConfigError.at(_STEP, str(error)) from None
    except (OSError, sqlite3.Error) as error:
        message = f"cannot write {journal}: {getattr(error, 'strerror', None) or error}"
        raise ConfigError.at(_JOURNAL, message) from None
