"""dLLM-Cache: features of prompt and response are cached apart, each refreshed at its own interval, and
between refreshes the response rows whose values changed most are recomputed. Static batches only."""
