"""Checks that look at nothing."""

from dataclasses import dataclass

from repro.gpu_suite.checks import Check, CheckSystem, Facts


@dataclass(frozen=True, kw_only=True)
class Told(Check):
    """Finds what it was told to find."""

    code = ("support.fake_checks",)
    finds: str = "nothing"
    fails: bool = False

    def look(self) -> Facts:
        facts = {"note": self.finds, "limit_s": self.limit_s}
        return {**facts, "failed": f"{self.finds} is wrong"} if self.fails else facts


@dataclass(frozen=True, kw_only=True)
class ToldApart(Told):
    """The same, of a process of its own."""

    is_apart = True


TOLD = CheckSystem("told", Told)
TOLD_APART = CheckSystem("told-apart", ToldApart)
