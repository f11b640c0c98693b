#!/bin/sh
# Usage: with-display.sh COMMAND …
# Run a command that opens windows: on the display where there is one, otherwise on a virtual one.
# Without either it runs all the same; tests that need a window then skip.
if [ "$(uname)" != Linux ] || [ -n "${DISPLAY:-}${WAYLAND_DISPLAY:-}" ]; then
    exec "$@"
fi
if command -v xvfb-run >/dev/null 2>&1 && command -v xauth >/dev/null 2>&1; then
    exec xvfb-run -a -s "-screen 0 1400x900x24" "$@"
fi
exec "$@"
