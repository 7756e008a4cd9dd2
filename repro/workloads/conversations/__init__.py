"""Conversations: turns of users and answers of a chat model, with published shares of short prompts (LAPS Figure 2)."""
