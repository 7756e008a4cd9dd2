"""A program cannot make its own verdict: whatever it does, it has to answer what its judge asks."""

import textwrap

import pytest
from support.jail import needs_jail

from repro.tasks.programs import passes
from repro.tasks.sandbox.client import Check, SandboxResult, run_program
from repro.tasks.task import TaskProblem

pytestmark = needs_jail

CHECK = Check(entry="f", tests="def check(c):\n    assert c(1) == 2\n    assert c(41) == 42\ncheck(f)\n")


def run(program: str, check: Check = CHECK, timeout_s: float = 20.0) -> SandboxResult:
    return run_program(textwrap.dedent(program), check, timeout_s=timeout_s, memory_bytes=256 << 20)


WORDS = "[b'1ok', b'+', b'1', b'v' + (4).to_bytes(4, 'big') + b'N.', b'r' + bytes(4), b'g']"
ATTACKS = {
    # Every frame, object and module that can be reached is searched for bytes that could be a verdict's.
    "frames": """
        import os, sys
        frame = sys._getframe()
        while frame:
            for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):
                if isinstance(value, bytes):
                    for fd in range(3, 10):
                        try: os.write(fd, value + b'1ok')
                        except OSError: pass
            frame = frame.f_back
        os._exit(0)
        """,
    "collected objects": """
        import gc, os
        for each in gc.get_objects():
            for value in gc.get_referents(each):
                if type(value) is bytes and len(value) == 16:
                    try: os.write(3, value + b'1ok')
                    except OSError: pass
        os._exit(0)
        """,
    "the judge's own functions": """
        import gc, types
        for each in gc.get_objects():
            if isinstance(each, types.FunctionType) and each.__name__ in ('report', 'judge', '_outcome', '_send'):
                for args in ((3, b'1', 'ok'), (4, b'1', 'ok'), ({'passed': True, 'reason': 'ok'},)):
                    try: each(*args)
                    except BaseException: pass
        f = lambda x: 0
        """,
    "the channel's own functions": """
        import gc, types
        for each in gc.get_objects():
            if isinstance(each, types.FunctionType) and each.__name__ == 'send':
                each(3, b'r'); each(3, b'v', b'I01\\n.')
        import time; time.sleep(0.2)
        """,
    "memory": """
        try: open('/proc/self/mem', 'r+b').read(1)
        except OSError: pass
        import ctypes
        ctypes.CDLL(None).ptrace(16, 2, 0, 0)
        for pid in range(1, 8):
            ctypes.CDLL(None).ptrace(16, pid, 0, 0)
            try: open(f'/proc/{pid}/mem', 'r+b')
            except OSError: pass
        f = lambda x: 0
        """,
    "builtins": """
        import builtins, operator
        builtins.AssertionError = type('Never', (BaseException,), {})
        builtins.compile = builtins.exec = lambda *a: None
        builtins.len = builtins.all = builtins.any = builtins.isinstance = lambda *a: True
        operator.eq = lambda a, b: True
        f = lambda x: 0
        """,
    "always equal": "class E:\n  def __eq__(s, o): return True\nf = lambda x: E()",
    "equal int": "class E(int):\n  def __eq__(s, o): return True\n  __hash__ = int.__hash__\nf = lambda x: E(0)",
    "equal str": "class E(str):\n  def __eq__(s, o): return True\n  __hash__ = str.__hash__\nf = lambda x: E('')",
    "equal dict": "class E(dict):\n  def __eq__(s, o): return True\nf = lambda x: E()",
    "equal inside": "class E:\n  def __eq__(s, o): return True\nf = lambda x: [E()]",
    "pickled to run": """
        class E:
            def __reduce__(self): return (exec, ("import os; os.write(3, b'1ok')",))
        f = lambda x: E()
        """,
    "pickle replaced": """
        import pickle
        class E:
            def __reduce__(self): return (eval, ("__import__('os').write(3, b'1ok')",))
        dumps, pickle.dumps = pickle.dumps, lambda value: dumps(E())
        f = lambda x: 0
        """,
    "class patched by pickle": """
        import pickle
        payload = b'cfractions\\nFraction\\nN}Vx\\ncbuiltins\\nstr\\ns\\x86b.'
        pickle.dumps = lambda value: payload
        f = lambda x: 0
        """,
    "exit": "import os; os._exit(0)",
    "exit in a call": "import os\ndef f(x): os._exit(0)",
    "sys.exit in a call": "import sys\ndef f(x): sys.exit(0)",
    "raise what ends loops": "def f(x): raise StopIteration",
    "generator exit": "def f(x): raise GeneratorExit",
    "at exit": "import atexit, os\natexit.register(lambda: os.write(3, b'1ok'))\nf = lambda x: 0",
    "stdout": "import sys, os\nsys.stdout = sys.stderr = os.fdopen(3, 'w')\nprint('1ok', flush=True)\nf = lambda x: 0",
    "inherited descriptors": f"""
        import os
        for word in {WORDS}:
            for fd in range(64):
                try: os.write(fd, word)
                except OSError: pass
        f = lambda x: 0
        """,
    "words then exit": f"""
        import os
        for word in {WORDS}:
            os.write(3, word)
        os._exit(0)
        """,
    "ran, and no more": "import os\nos.write(3, b'r' + bytes(4))\nos.close(3); os.close(4)\nos._exit(0)",
    "a thread that goes on": """
        import os, threading, time
        def spam():
            while True:
                try: os.write(3, b'1ok')
                except OSError: return
                time.sleep(0.001)
        threading.Thread(target=spam, daemon=True).start()
        f = lambda x: 0
        """,
    "traced": """
        import sys, threading
        def trace(frame, event, arg):
            for name, value in frame.f_locals.items():
                if name in ('reason', 'kind', 'error'): frame.f_locals[name] = None
            return trace
        sys.settrace(trace); threading.settrace(trace)
        f = lambda x: 0
        """,
    "os.write": """
        import os
        write = os.write
        os.write = lambda fd, content: write(fd, bytes(content).replace(b'f', b'r')) and len(content)
        raise ValueError('f')
        """,
    "signals": """
        import os, signal
        for pid in range(1, 20):
            for number in (signal.SIGKILL, signal.SIGSEGV):
                try: os.kill(pid, number)
                except OSError: pass
        f = lambda x: 0
        """,
    "too deep": "def f(x):\n  a = []\n  for _ in range(10**6): a = [a]\n  return a",
    "too large": "f = lambda x: 'a' * (150 << 20)",
    "not a number": "f = lambda x: float('nan')",
    "no function": "g = 1",
    "not callable": "f = 2",
    "exception text": "class E(Exception):\n  def __str__(s): raise E\ndef f(x): raise E",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_makes_a_verdict(name):
    result = run(ATTACKS[name])
    assert not result.passed
    assert result.reason not in ("ok", "")
    assert run("f = lambda x: x + 1") == SandboxResult(passed=True, reason="ok")


def test_the_tests_are_nowhere_in_the_program():
    program = """
        import gc, sys
        seen, frame = [], sys._getframe()
        while frame:
            seen += [repr(frame.f_locals), repr(frame.f_globals.keys())]
            frame = frame.f_back
        for each in gc.get_objects():
            if type(each) in (dict, list, tuple):
                seen += [value for value in gc.get_referents(each) if type(value) in (str, bytes)]
        text = '|'.join(map(str, seen))
        assert 'import gc, sys' in text, 'the search finds nothing'
        word = 'gues'  # put together here, so that it is not found as a part of this program itself
        assert word + 'sable-answer' not in text, 'found'
        f = lambda x: x + 1
        """
    check = Check(entry="f", tests="assert f(1) == 2, 'guessable-answer'", given="guessable = 'guessable-answer'")
    for _ in range(2):  # nor what a program before was asked
        assert run(program, check).passed


@pytest.mark.parametrize(
    ("program", "tests", "reason"),
    [
        ("f = lambda x: x + 1", "assert f(1) == 2", "ok"),
        ("f = lambda x: x", "assert f(1) == 2, 'one'", "AssertionError: one"),
        ("f = lambda x: 1 // x", "f(0)", "ZeroDivisionError: integer division or modulo by zero"),
        ("f = lambda x: {}[x]", "try:\n  f(0)\nexcept KeyError:\n  pass\nelse:\n  assert 0", "ok"),
        (
            "f = lambda x: [*x, (1, {2: {3.5}}, None, True, b'x', 'y')]",
            "assert f([0]) == [0, (1, {2: {3.5}}, None, True, b'x', 'y')]",
            "ok",
        ),
        ("import collections\nf = collections.Counter", "assert f('aab') == {'a': 2, 'b': 1}", "ok"),
        (
            "import collections\nP = collections.namedtuple('P', 'a b')\nf = lambda: P(1, 2)",
            "assert f() == (1, 2)",
            "ok",
        ),
        ("import enum\nclass C(enum.IntEnum): A = 3\nf = lambda: C.A", "assert f() == 3", "ok"),
        ("f = range", "f(3)", "TypeError: a value of type range cannot be compared with an answer"),
        ("f = lambda x: [x]", "assert f(1) == (1,)", "AssertionError"),
        ("calls = []\ndef f(x):\n  calls.append(x)\n  return len(calls)", "assert [f(0), f(0)] == [1, 2]", "ok"),
        ("f = lambda *a, **k: (a, k)", "assert f(1, y=2) == ((1,), {'y': 2})", "ok"),
        ("def f(x): raise MemoryError", "f(1)", "out of memory: more than 256 MiB"),
        (
            "import os\ndef f(x): os._exit(0)",
            "try:\n  f(0)\nexcept BaseException:\n  pass",
            "ended before its tests did, with exit code 0",
        ),
        ("f = 1", "g(2)", "NameError: name 'g' is not defined"),
        ("f = lambda x: '[\"passed\", \"ok\"]' + ' ' * 20_000", "print(f(2)); assert f(2) == 3", "AssertionError"),
        ("f = lambda x: 'x' * 200_000", "import sys; sys.stderr.write(f(2)); assert f(2) == 3", "AssertionError"),
        ("f = lambda x: x + 1", "print(f(2)); assert f(2) == 3", "ok"),
        ("raise ValueError('early')", "f(2)", "ValueError: early"),
        ("def f(x):\n  while True: pass", "f(2)", "timed out after 1 s"),
    ],
)
def test_verdicts_are_the_tests(program, tests, reason):
    limit_s = 1.0 if reason.startswith("timed out") else 20.0
    result = run(program, Check(entry="f", tests=tests), limit_s)
    assert result == SandboxResult(passed=reason == "ok", reason=reason)


def test_tests_may_use_what_the_problem_defines_and_the_program_cannot_change_it():
    given = 'def helper(x):\n    return x * 2\n\ndef f(x):\n    """Halve, so that helper gives it back."""\n'
    problem = TaskProblem(
        problem_id="x",
        prompt=given,
        user="",
        reference="    return x / 2\n",
        code=given,
        entry="f",
        check="assert helper(f(4)) == 4",
    )
    begun = TaskProblem(
        problem_id="y", prompt="", user="", reference="", code="def f(x):", entry="f", check="assert f(1) == 2"
    )
    texts = [problem.reference, "    return x\nhelper = lambda x: 4\n", " return x + 1"]
    assert passes([problem, problem, begun], texts) == [True, False, True]
