"""Conversations: turns of users and answers of a chat model, with published shares of short prompts (LAPS Figure 2)."""

from repro.workloads.conversations.card import ConversationCard, known_conversation_cards, load_conversation_card
from repro.workloads.conversations.workload import ConversationConfig, Conversations, draw_conversations

__all__ = [
    "ConversationCard",
    "ConversationConfig",
    "Conversations",
    "draw_conversations",
    "known_conversation_cards",
    "load_conversation_card",
]
