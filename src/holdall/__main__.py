"""`python -m holdall`, which does what the `holdall` script does."""

from holdall.cli import main

if __name__ == "__main__":
    main()
