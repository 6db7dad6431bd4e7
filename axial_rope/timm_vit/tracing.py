"""What torch.fx sees of rotary models: calls that a trace doesn't go into."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import Proxy

__all__ = ["call_untraced"]


def call_untraced(function: Callable[..., Any], arguments: tuple[Any, ...], options: Mapping[str, Any] | None = None) -> Any:
    """The function's result; while torch.fx traces, a call of it, into which the trace doesn't go."""
    proxy = next((argument for argument in arguments if isinstance(argument, Proxy)), None)
    if proxy is None:
        return function(*arguments, **(options or {}))
    return proxy.tracer.create_proxy("call_function", function, arguments, dict(options or {}))
