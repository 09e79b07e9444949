"""ONNX's backend test data as cases, and cases as such data: a model of one node with its inputs and outputs.

https://github.com/onnx/onnx/blob/main/docs/OnnxBackendTest.md
"""

from attncheck.common.errors import UsageError


def require_onnx(command: str) -> None:
    """Raises ``UsageError`` where the package that reads and writes such files is not installed."""
    try:
        import onnx  # noqa: F401
    except ImportError:
        raise UsageError(f"{command} needs the extra onnx: pip install 'attncheck[onnx]'") from None
