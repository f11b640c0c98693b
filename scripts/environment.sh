#!/bin/sh
# Usage: environment.sh PYTHON VENV EXTRAS
# Make the virtual environment VENV if there is none, and install this project into it with EXTRAS.
# Uses uv where it is on the PATH, because it is faster, and plain venv and pip where it is not.
set -eu
python=$1 venv=$2 extras=$3

if [ ! -x "$venv/bin/python" ]; then
    found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || {
        echo "napari-beerlanet needs Python 3.11 or newer, and '$python' does not run here." >&2
        echo "Name another one with: make PYTHON=/path/to/python3" >&2
        exit 1
    }
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "napari-beerlanet needs Python 3.11 or newer; '$python' is Python $found." >&2
        echo "Name another one with: make PYTHON=/path/to/python3" >&2
        exit 1
    }
    echo "Making $venv with Python $found."
    if command -v uv >/dev/null 2>&1; then
        uv venv --quiet --python "$("$python" -c 'import sys; print(sys.executable)')" "$venv"
    else
        "$python" -m venv "$venv" || {
            rm -rf "$venv"
            echo "'$python -m venv' failed. On Debian and Ubuntu: apt-get install python3-venv" >&2
            exit 1
        }
    fi
fi

echo "Installing napari-beerlanet[$extras] into $venv; the first time this takes some minutes."
if command -v uv >/dev/null 2>&1; then
    uv pip install --quiet --python "$venv/bin/python" --editable ".[$extras]"
else
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[$extras]"
fi
