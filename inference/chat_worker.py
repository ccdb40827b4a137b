"""The child process that renders a checkpoint's chat template; ``chat.TemplateFormat`` starts it.

One JSON object per line. ``{}`` is answered by ``{}`` (it runs); ``{"template": source}`` by ``{}`` (it
compiles); then ``{"variables": {...}}`` by ``{"text": prompt}``; a failure by ``{"error": message}``. It ends
at the end of its input.
"""

from __future__ import annotations

import datetime
import json
import resource
import signal
import sys
from typing import Any, NoReturn

MAX_MEMORY_BYTES = 1 << 30
# The parent's deadline is shorter; this one is for a template that loops on after the parent died.
MAX_RENDER_S = 30.0


class _TemplateError(Exception):
    """What a template raises by ``raise_exception``."""


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which chat templates do not expect."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def compile_template(source: str) -> Any:
    """The template in an environment with the globals, filters and whitespace rules of published ones."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], autoescape=False
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = _tojson
    return environment.from_string(source)


def _render(template: Any, variables: dict[str, Any], max_bytes: int) -> dict[str, str]:
    chunks: list[str] = []
    size_bytes = 0
    for chunk in template.generate(**variables):
        size_bytes += len(chunk.encode())
        if size_bytes > max_bytes:
            return {"error": f"the prompt has over {max_bytes} bytes"}
        chunks.append(chunk)
    return {"text": "".join(chunks)}


def main() -> int:
    """Reads lines until the end of input. The parent's death is an end of input too."""
    from jaxrl_sync.inference.chat import MAX_PROMPT_BYTES

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    template: Any = None
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, MAX_RENDER_S)  # SIGALRM's default action ends the process
        reply: dict[str, str] = {}
        try:
            if "template" in request:
                template = compile_template(request["template"])
            elif "variables" in request:
                reply = _render(template, request["variables"], MAX_PROMPT_BYTES)
        except _TemplateError as error:
            reply = {"error": str(error)[:2000]}
        except ImportError:
            reply = {"error": "jinja2 is not installed: pip install 'jaxrl-sync[serve]'"}
        except Exception as error:  # whatever a foreign program does, it is this request's error
            reply = {"error": f"{type(error).__name__}: {error}"[:2000]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
