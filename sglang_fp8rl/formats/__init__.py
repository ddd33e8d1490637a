"""The formats that a weight may be held in. Nothing here needs torch."""

from __future__ import annotations

from .blockwise import Blockwise
from .format import FORMATS, BlockGrid, Format, scale_suffixes, weight_name_of
from .per_channel import PerChannel

__all__ = ["FORMATS", "BlockGrid", "Format", "scale_suffixes", "weight_name_of"]

FORMATS |= {one.name: one for one in (Blockwise(), PerChannel())}
