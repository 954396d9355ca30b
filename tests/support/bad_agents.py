"""Agent loops that each do one thing wrong, and some that do everything right in an unusual way."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from typing import Any, ClassVar

from rollout_svc.agent import AgentContext
from rollout_svc.sample import Sample

__all__: list[str] = []

NUDGE = [ord(letter) for letter in "Sure?"]


class Good:
    """Two turns, and a word between them."""

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        first = await ctx.generate()
        ctx.append(NUDGE)
        await ctx.generate([*sample.prompt_ids, *first.ids, *NUDGE])
        return sample


class GoodAborts(Good):
    """The same, and it is begun again after a pause."""

    on_pause = "abort"


class GoodWorks:
    """A tool that takes its time between two turns, in a task that is cleaned up."""

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        await ctx.generate()
        tool = asyncio.create_task(asyncio.sleep(5))

        async def end() -> None:
            tool.cancel()
            await asyncio.gather(tool, return_exceptions=True)

        ctx.work.on_end(end)
        await asyncio.wait({tool})
        ctx.append(NUDGE)
        await ctx.generate()
        return sample


class NotAsync:
    def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        return sample


class OddPause(Good):
    on_pause = "stop"


class NoRun:
    pass


class Raises:
    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        await ctx.generate()
        found: dict[str, Sample] = {}
        return found["sample"]


class Exits:
    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        await ctx.generate()
        sys.exit(3)


class ExitsBeside:
    """A task that it began exits."""

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        async def end() -> None:
            sys.exit(3)

        await asyncio.create_task(end())
        return sample


class Fragile(Good):
    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        turn = await ctx.generate()
        if (await ctx.words.text(turn.ids)).split()[0] == "never":
            raise AssertionError
        return sample


class NeverEnds:
    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        await ctx.generate()
        await asyncio.get_running_loop().create_future()
        return sample


class AsksForEver:
    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        while True:
            await ctx.generate()


class ReturnsText:
    async def run(self, sample: Sample, ctx: AgentContext) -> Any:
        return await ctx.words.text((await ctx.generate()).ids)


class NoTurn:
    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        return sample


class NotOneTurn(Good):
    one_turn = True


class Tokenises:
    """It encodes the whole conversation anew for each turn."""

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        first = await ctx.generate()
        text = await ctx.words.text(first.ids)
        await ctx.generate(sample.prompt_ids + list(text.encode()))
        return sample


class Unsaid:
    """It says something that it does not append."""

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        first = await ctx.generate()
        await ctx.generate([*sample.prompt_ids, *first.ids, *NUDGE])
        return sample


class LastWord:
    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        await ctx.generate()
        ctx.append(NUDGE)
        return sample


class Keeps:
    """It keeps the conversation on itself, where another sample finds it."""

    ids: list[int]

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        self.ids = list(sample.prompt_ids)
        turn = await ctx.generate(self.ids)
        self.ids += turn.ids
        await ctx.generate(self.ids)
        return sample


class Uncancellable:
    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        try:
            await ctx.generate()
        except asyncio.CancelledError:
            return sample
        return sample


class Renames:
    """It makes another error of its cancellation."""

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        try:
            await ctx.generate()
        except asyncio.CancelledError as error:
            raise ValueError("cancelled") from error
        return sample


class Clings:
    """Cancelled, it goes on for an hour."""

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        try:
            await ctx.generate()
        except asyncio.CancelledError:
            await asyncio.sleep(3600)
            raise
        return sample


class Swallows:
    """It takes a cut turn for an answer."""

    on_pause = "abort"

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        with contextlib.suppress(Exception):
            await ctx.generate()
        return sample


class TriesAgain:
    """It asks again whenever it was refused."""

    on_pause = "abort"

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        for _ in range(3):
            try:
                await ctx.generate()
            except Exception:  # noqa: BLE001 - that is what is wrong with it
                await asyncio.sleep(1)
            else:
                break
        return sample


class Wraps:
    """It makes an error of its own of those that say whose fault it was."""

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        try:
            await ctx.generate()
        except Exception as error:
            raise RuntimeError("the model failed") from error
        return sample


class Impatient:
    """It has no patience with a turn."""

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        async with asyncio.timeout(60):
            await ctx.generate()
        return sample


class LeavesTask:
    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        self.task = asyncio.create_task(asyncio.sleep(3600), name="forgotten")
        await ctx.generate()
        return sample


class LeavesJob:
    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        ended = threading.Event()
        asyncio.get_running_loop().run_in_executor(None, ended.wait, 1)
        await ctx.generate()
        return sample


class LeavesThread:
    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        threading.Thread(target=threading.Event().wait, args=(1,), name="forgotten", daemon=True).start()
        await ctx.generate()
        return sample


class LeavesProcess:
    """Its first run leaves a process; one is enough."""

    left: ClassVar[list[subprocess.Popen[bytes]]] = []

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        if not self.left:
            self.left.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"]))  # noqa: ASYNC220
        await ctx.generate()
        return sample


class LeavesWhenCancelled:
    """It ends what it began, unless it is cancelled."""

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        tool = asyncio.create_task(asyncio.sleep(3600), name="tool")
        await ctx.generate()
        tool.cancel()
        return sample


class BadCleanUp(Good):
    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        async def end() -> None:
            raise OSError("nothing to end")

        ctx.work.on_end(end)
        return await super().run(sample, ctx)


class Spins:
    """It never gives the event loop back."""

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        await ctx.generate()
        while True:
            pass


class Blocks(Good):
    """It computes in the event loop, once."""

    done = False

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        if not self.done:
            self.done = True
            time.sleep(0.4)  # noqa: ASYNC251 - that is what is wrong with it
        return await super().run(sample, ctx)
