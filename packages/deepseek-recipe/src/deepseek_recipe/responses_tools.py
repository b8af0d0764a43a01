"""Owns what the tools of a Responses request become: full names, namespaces, the patch tool, tool search.

The shape of a tool is in `responses_tool_shape`; rules of all protocols are in `request_tools`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Final

from deepseek_recipe.errors import ConversionError
from deepseek_recipe.options import ModelVersion, WebSearchBehavior
from deepseek_recipe.request_tools import RequestedTool, check_tool_name
from deepseek_recipe.responses_tool_shape import WEB_SEARCH_TYPES, ResponsesTool

APPLY_PATCH: Final = "apply_patch"
TOOL_SEARCH: Final = "tool_search"
_PATCH_INPUT: Final = "The entire contents of the apply_patch command (the *** Begin Patch ... *** End Patch envelope)."
_PATCH_PARAMETERS: Final = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"input": {"type": "string", "description": _PATCH_INPUT}},
    "required": ["input"],
}


@cache
def apply_patch_description(version: ModelVersion) -> str:
    """The description of the patch tool: what the model is told about the patch format."""
    data = resources.files(__package__).joinpath("data", "apply_patch_description.txt")
    text = data.read_text(encoding="utf-8")
    if version is ModelVersion.DeepseekV41Flash:
        return text
    return text.replace("\n\n*** Begin Patch", "\n*** Begin Patch", 1)


def check_static(tools: Sequence[ResponsesTool], web_search: WebSearchBehavior, path: str = "") -> None:
    """Check names, namespaces, custom tools and web search, tool by tool.

    Raises:
        ConversionError: at the first tool that is not allowed.
    """
    for index, tool in enumerate(tools):
        place = f"{path}tools[{index}]"
        if tool.kind in ("function", "namespace"):
            check_tool_name(tool.name, f"{place}.name")
        if tool.kind == "namespace":
            _check_members(tool, place)
        if tool.kind == "custom" and tool.name != APPLY_PATCH:
            raise ConversionError(f"Unsupported custom tool: '{tool.name}'. Only 'apply_patch' is supported.")
        if tool.kind in WEB_SEARCH_TYPES and web_search is WebSearchBehavior.Reject:
            raise ConversionError("Server tools are not supported")


def _check_members(namespace: ResponsesTool, place: str) -> None:
    names: set[str] = set()
    for index, member in enumerate(namespace.members):
        if member.kind == "custom":
            raise ConversionError(
                f"Currently custom tools are not allowed inside a namespace. Found custom tool '{member.name}' in "
                f"{place}.tools[{index}]."
            )
        check_tool_name(member.name, f"{place}.tools[{index}].name")
        if member.name in names:
            raise ConversionError("Tool names within a namespace must be unique.")
        names.add(member.name)


@dataclass
class ToolNames:
    """Gives tools their full names and remembers which namespace a name came from."""

    version: ModelVersion
    taken: set[str] = field(default_factory=set)
    origin: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Namespace and local name by full name."""
    assigned: dict[tuple[str, str], str] = field(default_factory=dict)
    """Full name by namespace and local name; the first declaration counts."""

    @property
    def is_v41(self) -> bool:
        """Whether names are V4.1's."""
        return self.version is ModelVersion.DeepseekV41Flash

    def requested(self, tools: Sequence[ResponsesTool], *, deferred: bool = False) -> list[RequestedTool]:
        """The tools that the model may call, with full names."""
        self.taken |= {tool.name for tool in tools if tool.kind in ("function", "custom")}
        if self.is_v41 and any(tool.is_client_search for tool in tools):
            self.taken.add(TOOL_SEARCH)
        return [requested for tool in tools for requested in self._expand(tool, deferred)]

    def _expand(self, tool: ResponsesTool, deferred: bool) -> list[RequestedTool]:
        match tool.kind:
            case "function":
                return [RequestedTool(tool.name, tool.description, tool.parameters, tool.strict, deferred)]
            case "custom":
                description = apply_patch_description(self.version)
                return [RequestedTool(APPLY_PATCH, description, _PATCH_PARAMETERS, defer_loading=deferred)]
            case "namespace":
                return [self._member(tool, member, deferred) for member in tool.members]
        if tool.is_client_search and self.is_v41:
            return [RequestedTool(TOOL_SEARCH, tool.description, tool.parameters)]
        return []

    def _member(self, namespace: ResponsesTool, member: ResponsesTool, deferred: bool) -> RequestedTool:
        plain = self.plain_name(namespace.name, member.name)
        name, suffix = plain, 0
        while name in self.taken:
            suffix += 1
            name = f"{plain}_{suffix}"
        self.taken.add(name)
        self.origin[name] = (namespace.name, member.name)
        self.assigned.setdefault((namespace.name, member.name), name)
        description = member.description
        if self.is_v41 and namespace.description:
            description = f"{namespace.description}\n{description or ''}"
        return RequestedTool(name, description, member.parameters, member.strict, deferred)

    def plain_name(self, namespace: str, name: str) -> str:
        """The full name of a namespace's tool, before any suffix."""
        return f"{namespace}::{name}" if self.is_v41 else f"{namespace}__{name}"

    def called(self, namespace: str | None, name: str) -> str:
        """The full name of a tool called in history."""
        if namespace is None:
            return name
        return self.assigned.get((namespace, name)) or self.plain_name(namespace, name)
