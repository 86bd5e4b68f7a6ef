"""`python -m holdall`: the same as the `holdall` script."""

from holdall.cli import main

if __name__ == "__main__":
    main()
