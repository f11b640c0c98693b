#!/bin/sh
# Usage: system-libraries.sh PYTHON
# The libraries that napari's window needs on Debian and Ubuntu. Root gets them installed, everyone
# else gets the one command that does it. Never fails: all but the window works without them.
set -u
python=${1:-python3}
command -v dpkg >/dev/null 2>&1 && command -v apt-get >/dev/null 2>&1 || exit 0

# libglib2.0-bin stands for the GLib library, whose own package name differs between releases.
wanted="xvfb xauth libegl1 libgl1 libgl1-mesa-dri libxkbcommon-x11-0 libxcb-cursor0 libxcb-icccm4
libxcb-keysyms1 libxcb-shape0 libdbus-1-3 libfontconfig1 libglib2.0-bin"
if ! command -v uv >/dev/null 2>&1 && ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    wanted="$wanted python3-venv"
fi

missing=""
for package in $wanted; do
    dpkg -s "$package" 2>/dev/null | grep -q '^Status: install ok installed' ||
        missing="$missing $package"
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" -eq 0 ]; then
    echo "Installing system libraries:$missing"
    if apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
        apt-get install -qq -y --no-install-recommends $missing >/dev/null; then
        exit 0
    fi
    echo "That did not work; going on without." >&2
fi
echo "napari's window needs some system libraries that are missing here. Install them with:" >&2
echo "    sudo apt-get update && sudo apt-get install -y$missing" >&2
exit 0
