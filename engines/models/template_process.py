"""Renders a checkpoint's chat template; a program of its own, which knows nothing of this project.

A template is code of strangers. In Jinja's sandbox it cannot reach anything, but it can run for ever or fill the
memory: so it does both here, where the kernel bounds the memory and ``templates.render`` the time.

Reads one JSON object a line (template, variables), answers one: {"text": ...} or {"error": ...}.
"""

import json
import sys
import time
from typing import Any

MEMORY_BYTES = 1 << 30
_MOST_CHARS = 1 << 22


def main() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    except (ImportError, ValueError, OSError):  # no such limits here: the time is bounded all the same
        pass
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            text = render(asked["template"], asked["variables"])
            text.encode("utf-8")
            answer = {"text": text} if len(text) <= _MOST_CHARS else {"error": f"it renders {len(text)} characters"}
        except MemoryError:
            answer = {"error": "it takes more than a gigabyte of memory"}
        except RecursionError:
            answer = {"error": "it calls itself without end"}
        except Exception as error:
            is_said = "jinja2" in type(error).__module__  # which names what is wrong
            answer = {"error": str(error if is_said else f"{type(error).__name__}: {error}")[:500]}
        print(json.dumps(answer), flush=True)


def render(template: str, variables: dict[str, object]) -> str:
    """In the environment published templates are written for."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def as_json(value: object, indent: int | None = None, **how: Any) -> str:
        # Jinja's own filter escapes HTML, which would put "\u003c" for "<" into a prompt.
        return json.dumps(value, indent=indent, **{"ensure_ascii": False, **how})

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = time.strftime
    return environment.from_string(template).render(**variables)


if __name__ == "__main__":
    main()
