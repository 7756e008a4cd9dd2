"""lm-eval configurations of the tasks, one for each name of a task."""
