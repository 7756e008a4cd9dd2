"""The GPU suite: everything to measure on a card, in calls of bounded time."""
