"""Chooses an operation's implementation by where its tensors are."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


def by_device(reference: Callable[P, R]) -> Callable[P, R]:
    """The operation that runs its Triton kernel for tensors on a GPU, and the reference elsewhere.

    The kernel's launcher has the reference's name and parameters and is found beside it, in the
    module ``<reference's module>_triton``, which is imported when first needed.
    """

    @functools.cache
    def kernel() -> Callable[P, R]:
        module = importlib.import_module(f"{reference.__module__}_triton")
        return cast(Callable[P, R], getattr(module, reference.__name__))

    @functools.wraps(reference)
    def operation(*args: P.args, **kwargs: P.kwargs) -> R:
        implementation = kernel() if _first_tensor(args[0]).is_cuda else reference
        return implementation(*args, **kwargs)

    return operation


def _first_tensor(argument: object) -> torch.Tensor:
    if isinstance(argument, torch.Tensor):
        return argument
    return cast(Sequence[torch.Tensor], argument)[0]
