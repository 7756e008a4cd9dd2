"""Varlen attention: one call for a whole batch of ragged sequences, whose keys lie anywhere in a KV pool.

``registry.attention_backend`` picks the implementation; all give the same numbers within rounding (tests/engines/test_attention.py).
"""
