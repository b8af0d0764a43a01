"""API-exact prompts, tokens and parsing for DeepSeek models. It never needs torch.

The short way is `encode_chat` and `parse_completion`. The long way has the names and the behaviour of the API's own
package: requests of three protocols, encodings, and a stream processor. Every name is loaded when it is first used, so
that the import is fast and nothing is needed that is not used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from deepseek_recipe.chat_request import ChatCompletionRequest
    from deepseek_recipe.conversation import (
        AssistantMessage,
        BytesImageSource,
        Conversation,
        DataUrlImageSource,
        ImageDetail,
        ImageSource,
        ImageSourceKind,
        LatestReminderMessage,
        Message,
        ReasoningEffort,
        RenderedPrompt,
        ResponseFormat,
        Role,
        SystemMessage,
        ToolCall,
        ToolChoice,
        ToolDefinition,
        ToolMessage,
        UrlImageSource,
        UserMessage,
    )
    from deepseek_recipe.echo import ResponsesEcho
    from deepseek_recipe.encoding import DeepseekV4Encoding, DeepseekV41Encoding
    from deepseek_recipe.errors import CalcResizeError, ConversionError, ImageError
    from deepseek_recipe.generator_chat import ChatCompletionChunk, ChatCompletionChunkGenerator
    from deepseek_recipe.generator_messages import MessagesChunkGenerator, MessagesStreamEvent
    from deepseek_recipe.generator_responses import ResponsesChunkGenerator, ResponsesStreamEvent
    from deepseek_recipe.image_fetch import ReqwestImageFetcher
    from deepseek_recipe.image_sizes import ImageInfo, MultiModalData
    from deepseek_recipe.images import ImageQuota, ImageResolver, OpenCvImagePreprocessor, PreprocessOptions
    from deepseek_recipe.inference_chunk import InferenceChunk, InferenceFinishReason, PromptUsage
    from deepseek_recipe.messages_request import MessagesRequest
    from deepseek_recipe.options import (
        ConversationRequest,
        ConversionOptions,
        InferenceOptions,
        ModelVersion,
        OutputConstraint,
        ReasoningContentBehavior,
        WebSearchBehavior,
    )
    from deepseek_recipe.parsing_options import ParsingOptions, ThinkingInitialStage
    from deepseek_recipe.replay import ReplayMemory
    from deepseek_recipe.request_body import RequestBody
    from deepseek_recipe.response_chat import ChatCompletionResponse
    from deepseek_recipe.response_messages import MessagesResponse
    from deepseek_recipe.response_responses import ResponsesResponse
    from deepseek_recipe.responses_request import ResponsesRequest
    from deepseek_recipe.simple import (
        CompletionParser,
        EncodedPrompt,
        Increment,
        IncrementKind,
        encode_chat,
        encode_request,
        parse_completion,
    )
    from deepseek_recipe.special_tokens import IMAGE_SPECIAL_TOKEN_ID, SpecialToken, SpecialTokens
    from deepseek_recipe.stream_processor import StreamProcessor
    from deepseek_recipe.tokenizer import Tokenizer

__version__ = "0.3.0"

_NAMES: Final = {
    "chat_request": ("ChatCompletionRequest",),
    "conversation": (
        "AssistantMessage",
        "BytesImageSource",
        "Conversation",
        "DataUrlImageSource",
        "ImageDetail",
        "ImageSource",
        "ImageSourceKind",
        "LatestReminderMessage",
        "Message",
        "ReasoningEffort",
        "RenderedPrompt",
        "ResponseFormat",
        "Role",
        "SystemMessage",
        "ToolCall",
        "ToolChoice",
        "ToolDefinition",
        "ToolMessage",
        "UrlImageSource",
        "UserMessage",
    ),
    "echo": ("ResponsesEcho",),
    "encoding": (
        "DeepseekV4Encoding",
        "DeepseekV41Encoding",
    ),
    "errors": (
        "CalcResizeError",
        "ConversionError",
        "ImageError",
    ),
    "generator_chat": (
        "ChatCompletionChunk",
        "ChatCompletionChunkGenerator",
    ),
    "generator_messages": (
        "MessagesChunkGenerator",
        "MessagesStreamEvent",
    ),
    "generator_responses": (
        "ResponsesChunkGenerator",
        "ResponsesStreamEvent",
    ),
    "image_fetch": ("ReqwestImageFetcher",),
    "image_sizes": (
        "ImageInfo",
        "MultiModalData",
    ),
    "images": (
        "ImageQuota",
        "ImageResolver",
        "OpenCvImagePreprocessor",
        "PreprocessOptions",
    ),
    "inference_chunk": (
        "InferenceChunk",
        "InferenceFinishReason",
        "PromptUsage",
    ),
    "messages_request": ("MessagesRequest",),
    "options": (
        "ConversationRequest",
        "ConversionOptions",
        "InferenceOptions",
        "ModelVersion",
        "OutputConstraint",
        "ReasoningContentBehavior",
        "WebSearchBehavior",
    ),
    "parsing_options": (
        "ParsingOptions",
        "ThinkingInitialStage",
    ),
    "replay": ("ReplayMemory",),
    "request_body": ("RequestBody",),
    "response_chat": ("ChatCompletionResponse",),
    "response_messages": ("MessagesResponse",),
    "response_responses": ("ResponsesResponse",),
    "responses_request": ("ResponsesRequest",),
    "simple": (
        "CompletionParser",
        "EncodedPrompt",
        "Increment",
        "IncrementKind",
        "encode_chat",
        "encode_request",
        "parse_completion",
    ),
    "special_tokens": (
        "IMAGE_SPECIAL_TOKEN_ID",
        "SpecialToken",
        "SpecialTokens",
    ),
    "stream_processor": ("StreamProcessor",),
    "tokenizer": ("Tokenizer",),
}
_HOME: Final = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "IMAGE_SPECIAL_TOKEN_ID",
    "AssistantMessage",
    "BytesImageSource",
    "CalcResizeError",
    "ChatCompletionChunk",
    "ChatCompletionChunkGenerator",
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "CompletionParser",
    "Conversation",
    "ConversationRequest",
    "ConversionError",
    "ConversionOptions",
    "DataUrlImageSource",
    "DeepseekV4Encoding",
    "DeepseekV41Encoding",
    "EncodedPrompt",
    "ImageDetail",
    "ImageError",
    "ImageInfo",
    "ImageQuota",
    "ImageResolver",
    "ImageSource",
    "ImageSourceKind",
    "Increment",
    "IncrementKind",
    "InferenceChunk",
    "InferenceFinishReason",
    "InferenceOptions",
    "LatestReminderMessage",
    "Message",
    "MessagesChunkGenerator",
    "MessagesRequest",
    "MessagesResponse",
    "MessagesStreamEvent",
    "ModelVersion",
    "MultiModalData",
    "OpenCvImagePreprocessor",
    "OutputConstraint",
    "ParsingOptions",
    "PreprocessOptions",
    "PromptUsage",
    "ReasoningContentBehavior",
    "ReasoningEffort",
    "RenderedPrompt",
    "ReplayMemory",
    "RequestBody",
    "ReqwestImageFetcher",
    "ResponseFormat",
    "ResponsesChunkGenerator",
    "ResponsesEcho",
    "ResponsesRequest",
    "ResponsesResponse",
    "ResponsesStreamEvent",
    "Role",
    "SpecialToken",
    "SpecialTokens",
    "StreamProcessor",
    "SystemMessage",
    "ThinkingInitialStage",
    "Tokenizer",
    "ToolCall",
    "ToolChoice",
    "ToolDefinition",
    "ToolMessage",
    "UrlImageSource",
    "UserMessage",
    "WebSearchBehavior",
    "encode_chat",
    "encode_request",
    "parse_completion",
]


def __getattr__(name: str) -> Any:
    """Load the module of a public name, and keep the name."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
