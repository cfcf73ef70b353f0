"""Models on dilated attention."""

from .longnet import LongNet, LongNetConfig, LongNetDecoderLayer, LongNetEncoderLayer, LongNetLM

__all__ = ["LongNet", "LongNetConfig", "LongNetDecoderLayer", "LongNetEncoderLayer", "LongNetLM"]
