"""`python -m linnet_export` is `linnet-export`."""

from linnet_export.cli import main

if __name__ == "__main__":
    main()
