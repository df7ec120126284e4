"""`python -m engine_build` is `engine-build`."""

from engine_build.cli import main

main()
