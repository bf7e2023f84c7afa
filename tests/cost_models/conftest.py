"""Examples may take as long as they need: how fast a shared machine is, is not what is tested."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
