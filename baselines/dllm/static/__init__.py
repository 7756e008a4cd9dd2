"""Static batching, as in published code: its scheduler, executor, memory and largest batch."""
