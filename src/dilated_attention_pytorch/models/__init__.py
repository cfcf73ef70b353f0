"""Models on dilated attention."""

from .longnet import KVCache, LongNet, LongNetConfig, LongNetDecoderLayer, LongNetEncoderLayer, LongNetLM

__all__ = ["KVCache", "LongNet", "LongNetConfig", "LongNetDecoderLayer", "LongNetEncoderLayer", "LongNetLM"]
