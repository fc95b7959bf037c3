"""How long tests wait for what must happen: only a fault makes one wait so long, a slow machine never does."""

from __future__ import annotations

PATIENCE_S = 900.0
