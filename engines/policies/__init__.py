"""Policies and what they see, as plain data: simulated, torch and live workers ask the same objects. Nothing here knows who asks."""
