"""Everything there is to measure on a card, a bounded call at a time."""
