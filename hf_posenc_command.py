"""The `hf-posenc` command's front door: it reads hf_posenc/cli.py without importing the package around it.

Importing the package teaches transformers' Auto classes the patched models, which takes two seconds. A person who asks
for `--help`, or mistypes an option, should not wait for that; each command imports the package when it runs.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def main() -> None:
    """Run the command line."""
    package = importlib.util.find_spec("hf_posenc")
    assert package is not None and package.origin is not None
    spec = importlib.util.spec_from_file_location("hf_posenc_cli", Path(package.origin).with_name("cli.py"))
    assert spec is not None and spec.loader is not None
    cli = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = cli
    spec.loader.exec_module(cli)
    cli.main(prog_name="hf-posenc")


if __name__ == "__main__":
    main()
