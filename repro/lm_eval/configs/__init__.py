"""lm-eval configurations of the tasks, one for each name that a task has."""
