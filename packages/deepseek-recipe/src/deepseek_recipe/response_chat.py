"""Owns adding up the events of a Chat Completions stream to the response without streaming.

The events are made in `generator_chat`.
"""

from io import StringIO

from deepseek_recipe.generator_chat import ChatCompletionChunk
from deepseek_recipe.json_writer import quote


class ChatCompletionResponse:
    """A Chat Completions response under construction. The prompt counts are taken from the events."""

    def __init__(self, id: str, model: str, created: int, prompt_tokens: int, prompt_cache_hit_tokens: int) -> None:
        self._head = f'{{"id":{quote(id)},"object":"chat.completion","created":{created:d},"model":{quote(model)}'
        self._started = False
        self._fingerprint: str | None = None
        self._content: StringIO | None = None
        self._reasoning: StringIO | None = None
        self._calls: dict[int, tuple[str, StringIO]] | None = None
        self._content_logprobs: list[str] = []
        self._reasoning_logprobs: list[str] = []
        self._finish_reason = "null"
        self._usage: str | None = None

    def accumulate(self, chunk: ChatCompletionChunk) -> None:
        """Add an event, which is used up by it.

        Raises:
            TypeError: for an event of another protocol. RuntimeError: for an event that was used before.
        """
        if not isinstance(chunk, ChatCompletionChunk):
            raise TypeError(f"expected a ChatCompletionChunk, got {type(chunk).__name__}")
        text = chunk.text
        frame = chunk.use()
        self._started = True
        fingerprint, data = frame.data
        self._fingerprint = self._fingerprint if fingerprint is None else fingerprint
        match frame.kind:
            case "open":
                self._add(*data)
            case "content":
                self._add(text, None)
                self._content_logprobs += [data] if data else []
            case "reasoning":
                self._add(None, text)
                self._reasoning_logprobs += [data] if data else []
            case "call":
                index, call_id, name = data
                head = f'{{"index":{index},"id":{quote(call_id)},"type":"function","function":{{"name":{quote(name)}'
                self._calls = self._calls or {}
                self._calls[index] = (head, StringIO())
            case "arguments":
                self._calls = self._calls or {}
                if data in self._calls:
                    self._calls[data][1].write(text or "")
            case "finish":
                reason, self._usage = data
                self._finish_reason = quote(reason)
                self._add("", None)

    def _add(self, content: str | None, reasoning: str | None) -> None:
        if content is not None:
            self._content = self._content or StringIO()
            self._content.write(content)
        if reasoning is not None:
            self._reasoning = self._reasoning or StringIO()
            self._reasoning.write(reasoning)

    def to_json(self) -> str:
        """The response so far as compact JSON."""
        usage = "" if self._usage is None else f',"usage":{self._usage}'
        fingerprint = "null" if self._fingerprint is None else quote(self._fingerprint)
        choices = f"[{self._choice()}]" if self._started else "[]"
        return f'{self._head},"choices":{choices}{usage},"system_fingerprint":{fingerprint}}}'

    def _choice(self) -> str:
        message = f'"role":"assistant","content":{_text(self._content)}'
        if self._reasoning is not None:
            message += f',"reasoning_content":{_text(self._reasoning)}'
        if self._calls is not None:
            calls = (f'{head},"arguments":{_text(arguments)}}}}}' for head, arguments in self._calls.values())
            message += f',"tool_calls":[{",".join(calls)}]'
        lists = [
            f'"{name}":[{",".join(entries)}]'
            for name, entries in (("content", self._content_logprobs), ("reasoning_content", self._reasoning_logprobs))
            if entries
        ]
        logprobs = f"{{{','.join(lists)}}}" if lists else "null"
        return f'{{"index":0,"message":{{{message}}},"logprobs":{logprobs},"finish_reason":{self._finish_reason}}}'

    @staticmethod
    def sse_event_name(chunk: ChatCompletionChunk) -> str | None:
        """None: Chat Completions events have no name."""
        chunk.frame()
        return None

    @staticmethod
    def sse_done_data() -> str | None:
        """What is sent after the last event."""
        return "[DONE]"


def _text(buffer: StringIO | None) -> str:
    return "null" if buffer is None else quote(buffer.getvalue())
