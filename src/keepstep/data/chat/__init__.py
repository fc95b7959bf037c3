"""Conversations: read them, render them with chat templates, mask the loss and pack rows."""
