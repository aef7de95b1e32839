"""``python -m spheret`` is the ``spheret`` command; ``torchrun -m spheret train`` needs this form."""

from spheret.cli.main import main

if __name__ == "__main__":
    main()
