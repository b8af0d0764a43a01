"""Owns the JSON of a Responses answer: the response object and its output items.

Which events carry them is the business of `generator_responses`.
"""

from dataclasses import dataclass, field
from io import StringIO
from typing import Final, NamedTuple

from deepseek_recipe.echo import ResponsesEcho
from deepseek_recipe.json_reader import parse_object
from deepseek_recipe.json_writer import compact_json, f32_text, quote


class ItemHead(NamedTuple):
    """What is known of an output item when it starts; `kind` is its type in the protocol."""

    kind: str
    id: str
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    encrypted_content: str = ""


@dataclass(slots=True)
class Item:
    """An output item under construction."""

    head: ItemHead
    text: StringIO = field(default_factory=StringIO)
    logprobs: list[str] = field(default_factory=list)
    has_part: bool = False
    phase: str = "final_answer"
    status: str = "in_progress"

    def value(self) -> str:
        """The text as a JSON string."""
        return quote(self.text.getvalue())

    def part(self) -> str:
        """The content part."""
        return part_json(self.head.kind, self.value(), ",".join(self.logprobs))

    def json(self) -> str:
        """The item as compact JSON."""
        head = self.head
        start = f'{{"type":"{head.kind}","id":{quote(head.id)},"status":"{self.status}"'
        content = f"[{self.part()}]" if self.has_part else "[]"
        match head.kind:
            case "reasoning":
                encrypted = quote(head.encrypted_content)
                return f'{start},"content":{content},"summary":[],"encrypted_content":{encrypted}}}'
            case "message":
                return f'{start},"role":"assistant","phase":"{self.phase}","content":{content}}}'
        start += f',"call_id":{quote(head.call_id)}'
        match head.kind:
            case "tool_search_call":
                return f'{start},"execution":"client","arguments":{self.search_arguments()}}}'
            case "custom_tool_call":
                return f'{start},"name":{quote(head.name)},"input":{self.value()}}}'
        namespace = "" if head.namespace is None else f',"namespace":{quote(head.namespace)}'
        return f'{start},"name":{quote(head.name)}{namespace},"arguments":{self.value()}}}'

    def search_arguments(self) -> str:
        """The arguments of a finished tool search, `{}` while it runs and if they cannot be read."""
        if self.status == "in_progress":
            return "{}"
        return compact_json(parse_object(self.text.getvalue()) or {})


def part_json(kind: str, value: str, logprobs: str) -> str:
    """The content part of a reasoning or message item."""
    if kind == "reasoning":
        return f'{{"type":"reasoning_text","text":{value}}}'
    return f'{{"type":"output_text","annotations":[],"logprobs":[{logprobs}],"text":{value}}}'


EMPTY_ECHO: Final = ResponsesEcho()


class ResponseHead(NamedTuple):
    """The response object without its output."""

    id: str
    model: str
    created_at: int
    echo: ResponsesEcho = EMPTY_ECHO
    status: str = "in_progress"
    completed_at: int | None = None
    incomplete_reason: str | None = None
    usage: str = "null"

    def json(self, output: str) -> str:
        """The response object as compact JSON; `output` is the inside of its list of items."""
        echo, details = self.echo, self.echo.details
        completed = "null" if self.completed_at is None else str(self.completed_at)
        incomplete = "null" if self.incomplete_reason is None else f'{{"reason":"{self.incomplete_reason}"}}'
        reasoning = compact_json({"effort": details.effort, "summary": details.summary})
        text = compact_json({"format": details.text_format, "verbosity": details.verbosity})
        return (
            f'{{"id":{quote(self.id)},"object":"response","created_at":{self.created_at},"status":"{self.status}",'
            f'"background":false,"completed_at":{completed},"content_filters":null,"error":null,'
            f'"frequency_penalty":0.0,"incomplete_details":{incomplete},"instructions":{_text(echo.instructions)},'
            f'"max_output_tokens":{compact_json(echo.max_output_tokens)},"max_tool_calls":null,'
            f'"model":{quote(self.model)},"moderation":null,"output":[{output}],"parallel_tool_calls":true,'
            '"presence_penalty":0.0,"previous_response_id":null,"prompt_cache_key":null,'
            f'"prompt_cache_retention":null,"reasoning":{reasoning},"safety_identifier":null,'
            f'"service_tier":"default","store":false,"temperature":{f32_text(echo.temperature)},"text":{text},'
            f'"tool_choice":{compact_json(details.tool_choice)},"tools":{compact_json(list(details.tools))},'
            f'"top_logprobs":{echo.top_logprobs},"top_p":{f32_text(echo.top_p)},"truncation":"disabled",'
            f'"usage":{self.usage},"user":{_text(echo.user)},"metadata":{{}}}}'
        )


def _text(value: str | None) -> str:
    return "null" if value is None else quote(value)
