"""`python -m exitwave.workflows` is the same as `exitwave`."""

from exitwave.workflows.cli import main

if __name__ == "__main__":
    main()
