"""Owns the errors that a request, a conversation or an image can raise.

Exception
├── ConversionError      the request is well formed, but the API would refuse it
├── ImageError           an image could not be fetched or decoded
└── ValueError
    └── CalcResizeError  no patch grid was found for a size
"""

from deepseek_recipe.json_writer import quote


class ConversionError(Exception):
    """The API would answer this request with an error: `status_code` and `body` are that answer."""

    def __init__(self, message: str, status_code: int = 400) -> None:
        super().__init__(message)
        self.status_code = status_code

    @property
    def body(self) -> str:
        """The JSON body of the API's answer."""
        code = "invalid_request_error"
        return f'{{"error":{{"message":{quote(str(self))},"type":"{code}","param":null,"code":"{code}"}}}}'


class ImageError(Exception):
    """An image could not be used; `kind` names why and `is_retryable` whether another try may help."""

    def __init__(self, message: str, kind: str, is_retryable: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.is_retryable = is_retryable


class CalcResizeError(ValueError):
    """No grid of image patches was found for an image size."""
