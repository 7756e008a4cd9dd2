"""The kernels themselves; importing a module here imports triton."""
