"""`python -m hf_posenc` is `hf-posenc`."""

from hf_posenc.cli import main

if __name__ == "__main__":
    main(prog_name="hf-posenc")
