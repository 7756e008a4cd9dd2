"""Graded tasks: problems, prompts and graders. This package does not import torch."""
