"""Adapters for other libraries; each needs the extra of its name."""
