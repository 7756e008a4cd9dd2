"""What runs a step plan: a torch model, or a roofline."""
