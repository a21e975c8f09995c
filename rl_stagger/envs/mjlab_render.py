"""Pictures of mjlab environments, drawn by MuJoCo without a window; on a machine without a GPU by Mesa in software."""

# pyright: reportMissingImports=false

from __future__ import annotations

import ctypes.util
import functools
import os
import sys
import weakref
from typing import Any

from rl_stagger.errors import ConfigError

_OFF = ("disable", "disabled", "off", "false", "0")


@functools.lru_cache(maxsize=None)
def can_render() -> bool:
    """Whether this machine has something for MuJoCo to draw with."""
    chosen = os.environ.get("MUJOCO_GL", "").lower().strip()
    if chosen or not sys.platform.startswith("linux"):
        return chosen not in _OFF
    return bool(os.environ.get("DISPLAY")) or _windowless() is not None


def _windowless() -> Any:
    """ "egl" or "osmesa", whichever is installed; None without both."""
    return next((name for name, lib in (("egl", "EGL"), ("osmesa", "OSMesa")) if ctypes.util.find_library(lib)), None)


class MjlabRenderer:
    """mjlab's offscreen renderer on one `ManagerBasedRlEnv`, its camera following the environment that is asked for."""

    def __init__(self, env: Any) -> None:
        from mjlab.viewer.offscreen_renderer import OffscreenRenderer

        _use_windowless_gl()
        self._sim = env.sim
        self._renderer = OffscreenRenderer(
            env.sim.mj_model, env.cfg.viewer, env.scene, env.sim.model, env.sim.expanded_fields
        )
        try:
            self._renderer.initialize()
        except Exception as error:
            raise ConfigError(f"render: MuJoCo cannot draw here ({error}); see docs/mjlab.md, Pictures") from error
        # An OpenGL context that outlives the interpreter's modules complains when it goes.
        self.close = weakref.finalize(self, self._renderer.close)

    def draw(self, env_index: int) -> Any:
        """One picture, [height, width, 3] uint8; its size is mjlab's viewer.height and viewer.width."""
        self._renderer._env_ids = (env_index,)  # else the one in the config with its neighbours
        self._renderer.update(self._sim.data)
        return self._renderer.render()


def _use_windowless_gl() -> None:
    """MuJoCo chooses its OpenGL when it is imported, and by default one that needs a window system."""
    if not sys.platform.startswith("linux") or os.environ.get("MUJOCO_GL") or os.environ.get("DISPLAY"):
        return
    from mujoco.rendering.classic import gl_context

    kind = _windowless()
    if kind == "egl":
        from mujoco.egl import GLContext
    elif kind == "osmesa":
        from mujoco.osmesa import GLContext
    else:
        raise ConfigError("render: neither EGL nor OSMesa is installed; on Debian: apt-get install libegl1 libosmesa6")
    gl_context.GLContext = GLContext
