"""AMPD on real workers: Redis holds the coordinator's queues and windows, for prefill and decode processes (AMPD §3, §6).

The simulator's own policy objects make the decisions, over snapshots of the state in Redis.
"""
