"""From a conversation to a prompt: the model's own chat template, or a built-in one.

A template that came with a checkpoint is a program by someone else. It runs in Jinja's sandbox, in a child
process with a memory limit, and under a deadline (``chat_worker``), so that the worst one can do is to fail
its own request. The built-in formats are plain Python and run here.
"""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jaxrl_sync.inference.tokenizer import Tokenizer
from jaxrl_sync.sharding.errors import UserError

RENDER_DEADLINE_S = 5.0
START_DEADLINE_S = 30.0
MAX_TEMPLATE_BYTES = 1 << 20
MAX_PROMPT_BYTES = 16 << 20

Message = Mapping[str, Any]


class ChatError(UserError, ValueError):
    """A conversation that cannot be made into a prompt: by the template's own word, or by a limit."""


class ChatFormat(Protocol):
    """Makes prompts of conversations. ``render`` may block for RENDER_DEADLINE_S: call it in a thread."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end an assistant's turn in this format, besides the tokenizer's EOS."""
        ...

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """The prompt, up to where the assistant's answer begins. Raises ChatError."""
        ...

    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class ChatMLFormat:
    """``<|im_start|>role``, newline, content, ``<|im_end|>``, newline; then the assistant's header."""

    stop: tuple[str, ...] = ("<|im_end|>",)

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return turns + "<|im_start|>assistant\n"

    def close(self) -> None:
        """Nothing to close."""


@dataclasses.dataclass(frozen=True)
class PlainFormat:
    """The contents alone, between separators: for alphabets that cannot write ChatML's markers."""

    separator: str
    stop: tuple[str, ...] = ()

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        return self.separator.join(str(m["content"]) for m in messages)

    def close(self) -> None:
        """Nothing to close."""


def chat_format(tokenizer: Tokenizer) -> ChatFormat:
    """The format for a tokenizer: its own template; without one ChatML; without letters for that, plain.

    The caller closes it.
    """
    if tokenizer.chat_template is not None:
        return TemplateFormat(tokenizer.chat_template, tokenizer.special_tokens())
    if tokenizer.can_encode("<|im_start|>system user assistant tool developer\n<|im_end|>"):
        return ChatMLFormat()
    return PlainFormat(next((s for s in ("\n", " ") if tokenizer.can_encode(s)), ""))


class TemplateFormat:
    """A Jinja chat template in a child process. Thread-safe; one rendering at a time.

    The child starts with the first rendering, is killed when it misses the deadline (the next rendering
    starts another), and ends by itself when this process ends, however it ends.
    """

    stop: tuple[str, ...] = ()

    def __init__(
        self, source: str, specials: Mapping[str, str], deadline_s: float = RENDER_DEADLINE_S
    ) -> None:
        size_bytes = len(source.encode())
        if size_bytes > MAX_TEMPLATE_BYTES:
            raise ChatError(f"chat template has {size_bytes} bytes, at most {MAX_TEMPLATE_BYTES} are taken")
        self._source = source
        self._specials = dict(specials)
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        scope = {**self._specials, **variables, "messages": list(messages), "add_generation_prompt": True}
        line = json.dumps({"variables": scope}).encode() + b"\n"
        with self._lock:
            try:
                child = self._started()
                reply = self._exchange(child, line, self._deadline_s)
            except (OSError, TimeoutError) as error:
                self._kill()
                raise ChatError(f"chat template gave no prompt: {error}") from None
        if "error" in reply:
            raise ChatError(f"chat template refused the conversation: {reply['error']}")
        return str(reply["text"])

    def close(self) -> None:
        """Ends the child, if there is one."""
        with self._lock:
            self._kill()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            command = [sys.executable, "-m", "jaxrl_sync.inference.chat_worker"]
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            hello = json.dumps({"template": self._source}).encode() + b"\n"
            self._exchange(self._child, b"{}\n", START_DEADLINE_S)
            reply = self._exchange(self._child, hello, self._deadline_s)
            if "error" in reply:
                self._kill()
                raise ChatError(f"chat template does not compile: {reply['error']}")
        return self._child

    def _exchange(self, child: subprocess.Popen[bytes], line: bytes, deadline_s: float) -> dict[str, Any]:
        """One line out, one line back. Raises TimeoutError, or OSError when the child died."""
        assert child.stdin is not None and child.stdout is not None
        end = time.monotonic() + deadline_s
        self._write(child.stdin.fileno(), line, end)
        answer = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            while not answer.endswith(b"\n"):
                left_s = end - time.monotonic()
                if left_s <= 0 or not selector.select(left_s):
                    raise TimeoutError(f"no answer within {deadline_s:g} s")
                chunk = os.read(child.stdout.fileno(), 1 << 16)
                if not chunk:
                    raise OSError("its process ended (memory limit, or killed)")
                answer += chunk
        return dict(json.loads(answer))

    def _write(self, fd: int, data: bytes, end: float) -> None:
        os.set_blocking(fd, False)
        view = memoryview(data)
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_WRITE)
            while view:
                left_s = end - time.monotonic()
                if left_s <= 0 or not selector.select(left_s):
                    raise TimeoutError("its process does not read")
                view = view[os.write(fd, view[: 1 << 16]) :]

    def _kill(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait(timeout=START_DEADLINE_S)
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()
