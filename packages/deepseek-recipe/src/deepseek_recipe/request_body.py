"""Owns reading a request body, whatever it is given as, and the single use of a request.

The shapes of the three protocols are in their own modules.
"""

from collections.abc import Callable
from typing import Any

from deepseek_recipe.conversation import check_json_value
from deepseek_recipe.json_reader import JsonSyntaxError, parse_json
from deepseek_recipe.shapes import Reader, ShapeError

type RequestBody = bytes | str | dict[str, Any]


def read_body[T](body: RequestBody, reader: Reader[T]) -> T:
    """Read a request body with the shape of its protocol.

    Raises:
        ValueError: `invalid JSON request: ...` for bad text, `invalid request body: ...` for a wrong shape, the latter
            with a note that says where; and what `check_json_value` raises for a dict that is not JSON.
        TypeError: for other types of body.
    """
    if isinstance(body, bytes | bytearray | str):
        try:
            value = parse_json(body if isinstance(body, str) else bytes(body))
        except JsonSyntaxError as error:
            raise ValueError(f"invalid JSON request: {error}") from None
    elif isinstance(body, dict):
        value = check_json_value(body)
    else:
        raise TypeError(f"a request body must be bytes, str or dict, not {type(body).__name__}")
    try:
        return reader(value)
    except ShapeError as error:
        problem = ValueError(f"invalid request body: {error}")
        if error.path:
            problem.add_note(f"at {error.place()}")
        raise problem from None


class OneUse[T]:
    """Holds a value that can be taken once and looked at before."""

    def __init__(self, value: T, name: str) -> None:
        self._value: T | None = value
        self._name = name

    def look[R](self, at: Callable[[T], R]) -> R:
        """What `at` says about the value.

        Raises:
            RuntimeError: if the value has been taken.
        """
        if self._value is None:
            raise RuntimeError(f"{self._name} has been consumed")
        return at(self._value)

    def take(self) -> T:
        """The value, for the last time.

        Raises:
            RuntimeError: if it has been taken before.
        """
        value = self.look(lambda held: held)
        self._value = None
        return value
