"""The command line as ``python -m napari_beerlanet``."""

import sys

from napari_beerlanet.cli.main import main

sys.exit(main())
