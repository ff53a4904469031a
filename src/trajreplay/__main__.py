"""`python -m trajreplay`: the command line."""

from trajreplay.cli.main import main

if __name__ == "__main__":
    main()
