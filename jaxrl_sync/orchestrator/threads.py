"""Blocking calls (hub, sockets, tasks, packing) off the event loop, each with a deadline.

Threads are daemons: one that hangs can't keep the process alive. A call that passes its deadline is left to
itself and counted; its late result goes nowhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from jaxrl_sync.orchestrator.errors import DeadlineError

T = TypeVar("T")


async def in_thread(call: Callable[..., T], *args: Any, timeout_s: float, what: str) -> T:
    """``call(*args)`` in a daemon thread of its own; ``DeadlineError`` naming ``what`` when late."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is None:
            result.set_result(value)  # type: ignore[arg-type]
        elif isinstance(error, StopIteration):  # a future refuses it
            result.set_exception(RuntimeError(f"{what}: StopIteration"))
        else:
            result.set_exception(error)

    def work() -> None:
        value: T | None = None
        error: BaseException | None = None
        try:
            value = call(*args)
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=work, name=f"call-{what[:24]}", daemon=True).start()
    done, _ = await asyncio.wait([result], timeout=timeout_s)
    if not done:
        result.cancel()
        raise DeadlineError(f"waited {timeout_s:g} s for {what}")
    return result.result()
