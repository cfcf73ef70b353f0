"""Models on dilated attention."""

from .cache import KVCache
from .longnet import LongNet, LongNetConfig, LongNetDecoderLayer, LongNetEncoderLayer, LongNetLM

__all__ = ["KVCache", "LongNet", "LongNetConfig", "LongNetDecoderLayer", "LongNetEncoderLayer", "LongNetLM"]
