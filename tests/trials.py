"""Tests marked `trial` draw at random. `make trials` runs them alone, LENGTH times as long as `make test` does."""

import os

LENGTH = int(os.environ.get("QUIRE_TRIAL_LENGTH", "1"))
