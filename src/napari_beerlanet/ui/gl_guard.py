"""Old software OpenGL crashes when layers go; this keeps the window alive there."""

from __future__ import annotations

from typing import Any

_SOFTWARE = ("llvmpipe", "softpipe", "swrast")


def guard_software_opengl(viewer: Any) -> None:
    """Where Mesa draws without a graphics card, never delete a shader program.

    Mesa 22 ends the process when an image is drawn after a Shapes layer was removed and another
    one added, because programs were deleted. They are small; there, and only there, they are kept.
    """
    try:
        from vispy.gloo import gl, glir

        viewer.window._qt_viewer.canvas._scene_canvas.set_current()
        renderer = str(gl.glGetParameter(gl.GL_RENDERER)).lower()
        if any(name in renderer for name in _SOFTWARE):
            glir.GlirProgram.delete = lambda self: None
    except Exception:  # no window, or another vispy: then there is nothing to guard
        return
