"""Which replica serves a request: one small file a policy, by name or `path/to/file.py:ClassName`."""

from .registry import available_routers as available_routers
from .registry import create_router as create_router
from .router import Router as Router
