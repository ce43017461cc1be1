"""`python -m anabranch` is the `anabranch` command."""

from anabranch.cli.main import main

if __name__ == "__main__":
    main()
