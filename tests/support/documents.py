"""Code blocks of documents, and command lines as the command line would read them."""

from collections.abc import Sequence

from support.command import commands


def parsed(name: str, words: Sequence[str]) -> dict[str, object]:
    """What a command is given by these words; nothing runs. Fails where there is no such command, option or value."""
    command = commands()[name]
    with command.make_context(name, [*words]) as context:
        return dict(context.params)
