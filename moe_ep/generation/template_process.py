"""Renders chat templates in a process of their own, with bounds on memory, CPU time and output.

A chat template is code of a checkpoint. jinja's sandbox keeps it from the machine, not from using all of its memory
or time. `TemplateProcess` starts this file as a program, sends it one JSON object a line, and gets one back. The
program imports neither moe_ep nor torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
from typing import Any

# CPU time of one request; real templates take milliseconds.
CPU_SECONDS = 3
# Memory of a request, beyond what Python and its modules take.
MEMORY_BYTES = 512 * 2**20
# The length of a rendered text.
MOST_CHARACTERS = 16 * 2**20
# Elapsed time of one request: on a busy machine a CPU second takes longer.
_DEADLINE_S = 60.0
_START_S = 120.0


class TemplateError(ValueError):
    """A template did not render; the message says why."""


class TemplateLimitError(TemplateError):
    """A template went beyond a bound."""


class TemplateProcess:
    """Starts the program when it is first needed, and again where it was ended; `close` ends it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def ask(self, **request: Any) -> Any:
        """The program's answer to a request; the keys are the arguments of `_answer`.

        Raises:
            TemplateError: the template raised.
            TemplateLimitError: it went beyond a bound; where that ended the program, `is_running` is False.
        """
        try:
            if self._process is None:
                # -P: this file's folder has modules that may be called as others of Python are.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env=os.environ | {"USE_TORCH": "0", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
                )
                self._exchange(self._process, "{}", _START_S)
            answer = self._exchange(self._process, json.dumps(request), _DEADLINE_S)
        except TemplateError:
            self.close()
            raise
        if "error" in answer:
            raise (TemplateLimitError if answer["is_limit"] else TemplateError)(answer["error"])
        return answer["result"]

    def close(self) -> None:
        """Ends the program; a second time does no harm."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError), process:  # closes the pipes, and waits
                process.kill()

    @staticmethod
    def _exchange(process: subprocess.Popen[bytes], request: str, deadline_s: float) -> dict[str, Any]:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the process of chat templates was started without pipes")
        line = b""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(request.encode("ascii") + b"\n")
            process.stdin.flush()
            if not select.select([process.stdout], [], [], deadline_s)[0]:
                raise TemplateLimitError(f"it did not end within {deadline_s:.0f} s")
            line = process.stdout.readline()
        if line.endswith(b"\n"):
            return json.loads(line)
        code = process.wait()
        if code == -signal.SIGXCPU:
            raise TemplateLimitError(f"it takes more than {CPU_SECONDS} s of CPU time")
        raise TemplateLimitError(f"the process that runs it ended with code {code}")


def _main() -> None:
    """Answers requests until its stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # what modules print is no answer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _render("{{ messages[0].content }}", [{"role": "user", "content": ""}])
    _limit_memory()
    for line in sys.stdin:
        request = json.loads(line)
        _limit_time()
        answer: dict[str, Any] = {"is_limit": True}
        try:
            answer["result"] = _answer(**request) if request else None
        except MemoryError:
            answer["error"] = f"it takes more than {MEMORY_BYTES // 2**20} MiB of memory"
        except RecursionError:
            answer["error"] = "it nests too deeply"
        except TemplateLimitError as error:
            answer["error"] = str(error)
        except Exception as error:  # whatever a template does
            said = " ".join(str(error).split())[:500]
            # Errors of a template's own raise_exception speak for themselves.
            raised = type(error).__name__ == "TemplateError"
            answer = {"is_limit": False, "error": said if raised else f"{type(error).__name__}: {said}"}
        print(json.dumps(answer), file=answers, flush=True)


def _answer(
    template: str, messages: list[dict[str, Any]] | None = None, settings: dict[str, Any] | None = None
) -> str | list[str]:
    """The text of the messages, or, without any, the names of the template's variables."""
    return _variables(template) if messages is None else _render(template, messages, **(settings or {}))


def _render(template: str, messages: list[dict[str, Any]], **settings: Any) -> str:
    """The text of a conversation; settings are those of `render_jinja_template`, and variables of the template."""
    from transformers.utils.chat_template_utils import render_jinja_template

    texts: list[str] = render_jinja_template(conversations=[messages], chat_template=template, **settings)[0]  # type: ignore[assignment]
    text = texts[0]
    if len(text) > MOST_CHARACTERS:
        raise TemplateLimitError(f"it makes a text of {len(text)} characters, and {MOST_CHARACTERS} are the most")
    return text


def _variables(template: str) -> list[str]:
    """Names that the template reads from outside."""
    import jinja2.meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(template).environment
    return sorted(jinja2.meta.find_undeclared_variables(environment.parse(template)) - environment.globals.keys())


def _limit_time() -> None:
    """Bounds the CPU time from now on; the system ends the process at it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))


def _limit_memory() -> None:
    """Bounds the address space, where the system says how large it is."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, now + MEMORY_BYTES))


if __name__ == "__main__":
    _main()
