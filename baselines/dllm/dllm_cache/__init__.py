"""dLLM-Cache: caches the features of prompt and response apart, each refreshed at its own interval. Between refreshes it recomputes the
response rows whose values changed most. Static batches only."""
