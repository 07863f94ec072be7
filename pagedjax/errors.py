"""Errors of the engine; the root and the loading errors come from `pagedjax.models.errors`."""

from pagedjax.models.errors import CheckpointError, ConfigError, PagedJaxError

__all__ = [
    "CheckpointError",
    "CompilerNotInstalledError",
    "ConfigError",
    "EngineAsleepError",
    "EngineDeadError",
    "InvalidRequestError",
    "KernelCheckError",
    "ModelNotFoundError",
    "PagedJaxError",
    "TokenizerError",
]


class CompilerNotInstalledError(PagedJaxError, ModuleNotFoundError):
    """The compiler for a chip that is to be compiled for is not installed here."""


class InvalidRequestError(PagedJaxError, ValueError):
    """A request was refused at the door: its prompt or its sampling parameters cannot be served."""


class EngineAsleepError(PagedJaxError, RuntimeError):
    """A step was asked of an engine that sleeps; `wake` it first."""


class EngineDeadError(PagedJaxError, RuntimeError):
    """The engine behind an `AsyncLLM` failed (then that is the cause) or was closed."""


class KernelCheckError(PagedJaxError, RuntimeError):
    """The attention kernel that the configuration names does not compute the right thing here."""


class ModelNotFoundError(PagedJaxError, FileNotFoundError):
    """The `model` argument names no directory, GGUF file or packaged model."""


class TokenizerError(PagedJaxError, ValueError):
    """A tokenizer or chat template is missing, malformed, or of an unsupported kind."""
