"""`code`: run the code of an answer against tests, in a sandbox."""

from __future__ import annotations

import re
import secrets
import sys
import textwrap
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

from rollout_judgers.code_tests import ANSWER, read_tests
from rollout_judgers.sandbox import Limits, Sandbox, choose
from rollout_judgers.sandbox.limits import MIB
from rollout_svc.judging import JudgedSample, Reward

__all__ = ["Code"]

_FENCED: Final = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_LEAST_S: Final = 0.05  # seconds: with less left, a run is not begun


class Code:
    """Run Python code against tests; synchronous, so that it and all it started can be killed at any time.

    Args:
        block: which fenced block of the response is the code: `last`, `first`, or `whole` for the response as it is.
            A response without a fenced block is code as it is.
        reward: `share` of the tests that passed, or `all` of them or nothing.
        sandbox: `auto`, `bubblewrap`, `unshare`; or `none`: run without walls what nobody trusts.
        python: the interpreter; null: the service's own, without packages.
        readable: further paths that the code may read, such as those of packages.
        test_timeout_s: seconds for each test of a program, or for all asserts or cases; what takes longer fails.
        total_s: seconds for all tests of an answer; those left then fail. Keep it below the judger's `timeout_s`: a
            judge call that times out gives no reward at all.
        memory_mb: address space of each process.
        files_mb: size of what it may write.
        processes: processes and threads at once.
        output_kb: what it may print; one that prints more fails.

    Raises:
        RuntimeError: no sandbox works here.
    """

    def __init__(
        self,
        *,
        block: Literal["last", "first", "whole"] = "last",
        reward: Literal["share", "all"] = "share",
        sandbox: Literal["auto", "bubblewrap", "unshare", "none"] = "auto",
        python: str | None = None,
        readable: Sequence[str] = (),
        test_timeout_s: float = 10.0,
        total_s: float = 45.0,
        memory_mb: int = 1024,
        files_mb: int = 64,
        processes: int = 64,
        output_kb: int = 1024,
    ) -> None:
        _check(block, ("last", "first", "whole"), "block")
        _check(reward, ("share", "all"), "reward")
        _check(sandbox, ("auto", "bubblewrap", "unshare", "none"), "sandbox")
        walls = choose(sandbox, tuple(readable))
        if isinstance(walls, str):
            message = f"no sandbox works here ({walls}); install bubblewrap, allow user namespaces, or run it in a "
            raise RuntimeError(message + "container of its own with `sandbox: none`")  # noqa: TRY004 - not of a type
        if walls.kind == "none":
            warnings.warn("judger code: sandbox: none runs untrusted code without walls", RuntimeWarning, stacklevel=2)
        self._sandbox = Sandbox(walls)
        self._block = block
        self._all = reward == "all"
        bare = [str(Path(sys.base_prefix) / "bin" / "python3"), "-I", "-S"]
        self._python = bare if python is None else [python, "-I"]
        self._total_s = total_s
        self._limits = Limits(
            wall_s=test_timeout_s,
            cpu_s=test_timeout_s + 1,
            memory_bytes=memory_mb * MIB,
            file_bytes=files_mb * MIB,
            processes=processes,
            output_bytes=output_kb * 1024,
        )

    def judge(self, sample: JudgedSample) -> Reward:
        """Return the share of tests that passed."""
        if sample.response is None:
            raise ValueError("code needs text: set tokenizer.path")
        tests = read_tests(sample.ground_truth)
        files = {ANSWER: self._code(sample.response).encode(errors="replace")}
        mark = secrets.token_hex(16)
        end = time.monotonic() + self._total_s
        passed = 0
        for number, (arguments, stdin) in enumerate(tests.runs(mark)):
            left = end - time.monotonic()
            if left < _LEAST_S or (self._all and passed < number):
                break
            limits = replace(self._limits, wall_s=min(left, self._limits.wall_s))
            command = [*self._python, *arguments]
            ran = self._sandbox.run(command, stdin=stdin, files=files, limits=limits)
            passed += tests.passed(number, ran, mark)
        share = passed / tests.count
        return Reward(float(share == 1) if self._all else share, {"passed": passed, "tests": tests.count})

    def _code(self, response: str) -> str:
        found = [] if self._block == "whole" else _FENCED.findall(response)
        if not found:
            return response
        # One in a list is indented as a whole, which Python would not take.
        return textwrap.dedent(found[-1] if self._block == "last" else found[0])


def _check(value: str, known: tuple[str, ...], name: str) -> None:
    if value not in known:
        raise ValueError(f"{name}: {value!r} is none of {', '.join(known)}")
