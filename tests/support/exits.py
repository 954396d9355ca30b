"""A module that exits while it is imported, as scripts do."""

import sys

sys.exit(3)
