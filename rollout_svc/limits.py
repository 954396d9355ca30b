"""The machine's limit on open files, raised to what the plan needs.

Invariants:

- The limit is only ever raised, and never beyond the hard limit.
"""

import resource

from rollout_svc.plan import Plan, check_open_files

__all__ = ["raise_open_file_limit"]


def raise_open_file_limit(plan: Plan) -> int:
    """Raise the soft limit on open files to what the plan needs, and return the limit now in force.

    Raises:
        ConfigError: If the plan needs more than the hard limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = check_open_files(plan, soft, hard)
    if needed != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return needed
