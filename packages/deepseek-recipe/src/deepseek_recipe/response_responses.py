"""Owns adding up the events of a Responses stream to the response without streaming.

The events are made in `generator_responses`.
"""

from deepseek_recipe.events import Frame
from deepseek_recipe.generator_responses import ResponsesStreamEvent
from deepseek_recipe.responses_output import Item, ResponseHead


class ResponsesResponse:
    """A Responses response under construction. The prompt counts are taken from the events."""

    def __init__(self, id: str, model: str, created: int, prompt_tokens: int, prompt_cache_hit_tokens: int) -> None:
        self._head = ResponseHead(id, model, created)
        self._items: list[Item | str] = []

    def accumulate(self, chunk: ResponsesStreamEvent) -> None:
        """Add an event, which is used up by it.

        Raises:
            TypeError: for an event of another protocol. RuntimeError: for an event that was used before.
        """
        if not isinstance(chunk, ResponsesStreamEvent):
            raise TypeError(f"expected a ResponsesStreamEvent, got {type(chunk).__name__}")
        text = chunk.text or ""
        frame = chunk.use()
        first, second = frame.data
        if isinstance(first, ResponseHead):
            self._head, self._items = first, list(second)
        elif frame.kind == "output_item.added":
            if first == len(self._items):
                self._items.append(Item(second))
        elif first < len(self._items):
            self._change(first, frame, text)

    def _change(self, index: int, frame: Frame, text: str) -> None:
        detail = frame.data[1]
        if frame.kind == "output_item.done":
            self._items[index] = detail
            return
        item = self._items[index]
        if isinstance(item, str):
            return
        if frame.kind == "content_part.added":
            item.has_part = True
        elif frame.kind.endswith(".delta"):
            item.text.write(text)
            item.logprobs += [detail] if detail else []

    def to_json(self) -> str:
        """The response so far as compact JSON."""
        return self._head.json(",".join(item if isinstance(item, str) else item.json() for item in self._items))

    @staticmethod
    def sse_event_name(chunk: ResponsesStreamEvent) -> str | None:
        """The type of the event."""
        return f"response.{chunk.frame().kind}"

    @staticmethod
    def sse_done_data() -> str | None:
        """None: nothing is sent after the last event."""
        return None
