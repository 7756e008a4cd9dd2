"""Static batching, as published code serves: its scheduler, executor, memory and largest batch."""
