"""Our systems as a model of the LM Evaluation Harness."""
