"""Graded tasks: problems, prompts and graders. No torch here."""
