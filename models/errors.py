"""The exceptions of pagedjax: one small hierarchy rooted at `PagedJaxError`.

They live in the lowest package that needs them, so that imports point down; users catch them as
`pagedjax.PagedJaxError` and so on. Each also derives from the built-in error a caller would expect.
"""


class PagedJaxError(Exception):
    """Root of every error that pagedjax raises on purpose."""


class ConfigError(PagedJaxError, ValueError):
    """A model or engine configuration is invalid or not supported."""


class CheckpointError(PagedJaxError, ValueError):
    """A checkpoint is missing, truncated, incomplete, or does not fit its configuration."""
