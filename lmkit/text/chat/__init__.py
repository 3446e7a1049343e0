"""Conversations and tools as clients write them, in the form of a model, and its answers as events. No torch here."""
