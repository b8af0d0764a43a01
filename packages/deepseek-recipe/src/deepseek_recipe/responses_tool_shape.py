"""Owns the shape of a tool in a Responses request, and how answers repeat it.

What tools become is in `responses_tools`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from deepseek_recipe.json_reader import Json
from deepseek_recipe.shapes import (
    Field,
    Reader,
    Variant,
    anything,
    boolean,
    choice,
    list_of,
    may,
    optional,
    string,
    struct,
    tagged,
)

WEB_SEARCH_TYPES: Final = ("web_search", "web_search_2025_08_26")
_KINDS: Final = ("function", "custom", "tool_search", "namespace", *WEB_SEARCH_TYPES)


class ResponsesTool(NamedTuple):
    """A tool as requested; kinds that are not known are kept by kind only."""

    kind: str
    name: str = ""
    description: str | None = None
    parameters: Json = None
    strict: bool | None = None
    execution: str | None = None
    search_context_size: str | None = None
    user_location: Json = None
    members: "Sequence[ResponsesTool]" = ()

    @property
    def is_known(self) -> bool:
        """Whether the kind of tool is one that requests may have."""
        return self.kind in _KINDS

    @property
    def is_client_search(self) -> bool:
        """Whether this is a tool search that the client runs."""
        return self.kind == "tool_search" and self.execution == "client"

    def shown(self) -> Json:
        """The tool as answers repeat it; absent members are null."""
        match self.kind:
            case "function":
                return {
                    "type": "function",
                    "name": self.name,
                    "description": self.description,
                    "parameters": self.parameters,
                    "strict": self.strict,
                }
            case "custom":
                return {"type": "custom", "name": self.name}
            case "tool_search":
                return {
                    "type": "tool_search",
                    "execution": self.execution,
                    "description": self.description,
                    "parameters": self.parameters,
                }
            case "namespace":
                members = [member.shown() for member in self.members]
                return {"type": "namespace", "name": self.name, "description": self.description, "tools": members}
        return {
            "type": self.kind,
            "search_context_size": self.search_context_size,
            "user_location": self.user_location,
        }


def _location(city: str | None, country: str | None, region: str | None, timezone: str | None) -> Json:
    return {"city": city, "country": country, "region": region, "timezone": timezone}


_PLACES: Final = ("city", "country", "region", "timezone")
_user_location: Final = struct("ResponsesUserLocation", _location, {name: may(string) for name in _PLACES})


def _kind(kind: str) -> Callable[..., ResponsesTool]:
    def make(**members: Any) -> ResponsesTool:
        return ResponsesTool(kind, **members)

    return make


_FUNCTION: Final = Variant(
    _kind("function"),
    {
        "name": Field(string),
        "description": may(string),
        "parameters": Field(anything, None),
        "strict": may(boolean),
    },
)
_CUSTOM: Final = Variant(_kind("custom"), {"name": Field(string)})
_member: Final = tagged("ResponsesNamespaceTool", "type", {"function": _FUNCTION, "custom": _CUSTOM})
_WEB_SEARCH: Final = {
    "search_context_size": may(choice("low", "medium", "high")),
    "user_location": Field(optional(_user_location), None),
}
_known: Final[Reader[ResponsesTool]] = tagged(
    "ResponsesTool",
    "type",
    {
        "function": _FUNCTION,
        "custom": _CUSTOM,
        "tool_search": Variant(
            _kind("tool_search"),
            {
                "execution": may(choice("client", "server")),
                "description": may(string),
                "parameters": Field(anything, None),
            },
        ),
        "namespace": Variant(
            lambda name, description, tools: ResponsesTool("namespace", name, description, members=tools),
            {"name": Field(string), "description": may(string), "tools": Field(list_of(_member))},
        ),
        **{kind: Variant(_kind(kind), _WEB_SEARCH) for kind in WEB_SEARCH_TYPES},
    },
)


def read_tool(value: Json) -> ResponsesTool:
    """Read a tool; one of a type that is not known has only that."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in _KINDS:
        return ResponsesTool(kind)
    return _known(value)
