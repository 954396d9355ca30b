"""What all proofs run under."""

from tests.embedded.conftest import one_torch_thread

__all__ = ["one_torch_thread"]
