"""Functions whose answer a compiler may take as a constant."""

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable)


def compile_time_constant(function: Function) -> Function:
    """Let torch.compile call `function` once, while tracing, and keep its answer.

    What `torch.compiler.assume_constant_result` does, without importing the compiler: that takes seconds,
    more than all the rest of the library beyond torch. A test compiles through it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
