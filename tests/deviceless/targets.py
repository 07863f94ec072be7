"""Chips that tests compile for; without its compiler a test is skipped."""

import os
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")  # also where there is one: nothing is run

import pytest

from pagedjax import deviceless
from pagedjax.deviceless import Compiled, platform
from pagedjax.errors import CompilerNotInstalledError

__all__ = ["TARGETS", "Compiled", "compile_for", "need", "platform"]

TARGETS = ("cpu", "h200", "v5e", "v6e", "v7x")  # v5p compiles as v5e does


def compile_for(target: str, fn: Any, *args: Any, **options: Any) -> Compiled:
    """`pagedjax.deviceless.compile_for`, or skip."""
    need(target)
    return deviceless.compile_for(target, fn, *args, **options)


def need(target: str) -> None:
    """Skip without the compiler, unless `PAGEDJAX_REQUIRE_COMPILERS` says that it must be there."""
    try:
        deviceless.device(target)
    except CompilerNotInstalledError as error:
        if os.environ.get("PAGEDJAX_REQUIRE_COMPILERS"):
            pytest.fail(str(error))
        pytest.skip(str(error))
