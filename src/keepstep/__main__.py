"""`python -m keepstep` is `keepstep`: what torchrun and containers start."""

from keepstep.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
