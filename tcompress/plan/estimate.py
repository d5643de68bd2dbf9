"""stub"""
from __future__ import annotations
from pydantic import BaseModel
class Estimate(BaseModel):
    """x."""
    memory_bytes: int
    disk_bytes: int
    seconds: float
