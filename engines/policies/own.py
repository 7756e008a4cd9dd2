"""A user's own policies: named as ``module:NAME``, or as an installed package names them, and made anew for every run.

NAME is a class or a function. It is called with those arguments that its kind offers and that it takes. If the policy is a dataclass,
its fields with a default are its knobs. If it has ``knobs``, it gets these settings as ``own``, as a scheduler of dLLM does.
"""

import inspect
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from typing import Any

from engines.data import ask, load_named
from engines.errors import UserError, require
from engines.knobs import Knob, free_knobs, with_knobs
from engines.policies.views import OpenQueue, PrefillQueue

_NUMBERS = ("no", "one", "two", "three", "four")


@dataclass(frozen=True, kw_only=True)
class Kind:
    name: str
    """The name of its knob."""
    method: str
    arguments: tuple[str, ...]
    """The positional arguments of ``method``."""
    offered: tuple[str, ...]
    """The keyword arguments that the class or function may take."""
    of: type = object
    """The base class that the policy must have besides."""

    @property
    def needs(self) -> str:
        required = f"an object with {self.method}({', '.join(self.arguments)})"
        if self.of is not object:
            required = f"an engines.policies.views.{self.of.__name__}"
        arguments = " and ".join(filter(None, (", ".join(self.offered[:-1]), *self.offered[-1:])))
        return f"name a class, or a function, that called {f'with {arguments} ' if arguments else ''}gives {required}"


ROUTER = Kind(
    name="router", method="route", arguments=("task", "home", "prefills", "now"), offered=("model", "slo", "seed")
)
INSTANCE_ROUTER = Kind(
    name="router", method="pick", arguments=("task", "instances", "now"), offered=("model", "slo", "seed")
)
BINDER = Kind(name="binder", method="bind", arguments=("decodes", "now"), offered=("model", "slo", "seed"))
BATCHER = Kind(
    name="batcher",
    method="next_step",
    arguments=("at", "now"),
    offered=("max_num_batched_tokens", "max_num_seqs", "model", "slo"),
)
QUEUE = Kind(name="queue", method="take", arguments=("now",), offered=("slo",), of=PrefillQueue)
OPEN_QUEUE = Kind(name="queue", method="take", arguments=("now",), offered=("slo",), of=OpenQueue)


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """A user's class or function by its ``module:NAME``. It can be pickled, and the process that receives it imports the module."""

    kind: Kind
    where: str
    given: tuple[tuple[str, Any], ...] = ()
    """Knobs of the run, including its own."""

    @cached_property
    def target(self) -> Any:
        return load_named(self.kind.name, self.where)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "target"}

    @property
    def knobs(self) -> Mapping[str, Knob]:
        return knobs_of_policy(self.target)

    def make(self, **offered: Any) -> Any:
        """Make the policy for a run with those of ``offered`` that its kind may take. If it raises, a RunError names the policy."""
        return self._with_knobs(ask(self.target, **self._arguments(offered)))

    def make_checked(self, **offered: Any) -> Any:
        """Make a policy to look at. Raises UserError if it is not of its kind."""
        kind, source = self.kind, self.where
        require(callable(self.target), f"{kind.name}={source!r} cannot be called: {kind.needs}")
        try:
            policy = self._with_knobs(self.target(**self._arguments(offered)))
        except (UserError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            message = " ".join(str(error).split())
            raise UserError(
                f"{kind.name}={source!r} fails when called ({type(error).__name__}: {message}): {kind.needs}"
            ) from error
        num = len(kind.arguments)
        require(
            _takes(getattr(policy, kind.method, None), num),
            f"{kind.name}={source!r} makes {type(policy).__name__}, which has no {kind.method}() of {_NUMBERS[num]} "
            f"argument{'s' if num > 1 else ''}: {kind.needs}",
        )
        require(isinstance(policy, kind.of), f"{kind.name}={source!r} makes {type(policy).__name__}: {kind.needs}")
        return policy

    @property
    def _own_values(self) -> dict[str, Any]:
        return {name: value for name, value in self.given if name in self.knobs}

    def _arguments(self, offered: Mapping[str, Any]) -> dict[str, Any]:
        # Copies, because other systems' runs, and the verdict on its own, depend on the shared objects.
        names = (name for name in self.kind.offered if name in offered)
        arguments = {name: deepcopy(offered[name]) for name in accepted_arguments(self.target, *names)}
        settings = settings_of(self.target)
        if settings is not None and settings is not self.target:
            arguments["own"] = with_knobs(settings(), self._own_values)
        return arguments

    def _with_knobs(self, policy: Any) -> Any:
        return with_knobs(policy, self._own_values) if settings_of(self.target) is self.target else policy


def plugins_in(requested: Mapping[str, Any], kinds: Iterable[Kind]) -> dict[str, Plugin]:
    """The plugins that the given knobs name, by kind."""
    knobs = tuple(requested.items())
    return {
        kind.name: Plugin(kind=kind, where=str(requested[kind.name]), given=knobs)
        for kind in kinds
        if requested.get(kind.name) is not None
    }


def check_replaced(
    plugins: Mapping[str, Plugin], replaced: Mapping[str, Iterable[str]], requested: Mapping[str, Any]
) -> None:
    """Raises UserError for knobs of the policies that a user's own replace, by kind, unless a user's own policy has that knob."""
    for kind, names in replaced.items():
        for name in names if kind in plugins else ():
            require(
                name not in requested or name in plugins[kind].knobs,
                f"{name}={requested.get(name)!r} has no effect with {kind}={plugins[kind].where!r}: keep one",
            )


def knobs_of_policy(policy: Any) -> Mapping[str, Knob]:
    """The knobs of a policy's class; none for a function, or a class without fields."""
    settings = settings_of(policy)
    return {} if settings is None else free_knobs(settings)


def settings_of(policy: Any) -> Any:
    """The dataclass whose fields are a policy's knobs: its ``knobs``, or the policy itself; None if it has no knobs."""
    for candidate in (getattr(policy, "knobs", None), policy):
        if isinstance(candidate, type) and is_dataclass(candidate):
            return candidate
    return None


def accepted_arguments(make: Any, *names: str) -> list[str]:
    """The ``names`` that ``make`` takes as arguments and that are not bound yet."""
    if not callable(make):
        return []
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        return []
    bound = getattr(make, "keywords", {})
    by_name = {each.name for each in parameters if each.kind not in (each.POSITIONAL_ONLY, each.VAR_POSITIONAL)}
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    return [name for name in names if name not in bound and (takes_all or name in by_name)]


def _takes(call: object, num: int) -> bool:
    """Whether ``call`` can be called with ``num`` arguments; True if Python does not know."""
    if not callable(call):
        return False
    try:
        inspect.signature(call).bind(*range(num))
    except TypeError:
        return False
    except ValueError:
        return True
    return True
