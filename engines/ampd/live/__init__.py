"""AMPD on real workers: the coordinator's queues and windows in Redis, prefill and decode processes around it (AMPD §3, §6).

Decisions are made by the simulator's own policy objects, over snapshots of what Redis holds.
"""
