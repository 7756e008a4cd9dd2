"""Policies, and the plain data that they see. Simulated, torch and live workers ask the same objects. Nothing here knows who asks."""
