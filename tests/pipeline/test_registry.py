"""Every family of the registry by several stages against one process: the same bits, or a refusal that names why.

By default, one case of each model file that the other tests of stages leave out, by two stages; `make trials` takes all
cases of all families, by as many stages as they have layers, too."""

from pathlib import Path

import numpy as np
import pytest

from models.checking import PROMPT, TINY, random_model
from pipeline.stages_here import InStages
from pipeline.test_families import CASES as FAMILIES
from pipeline.test_states import CASES as STATES
from quire.core.errors import Unsupported
from quire.models.registry import ARCHITECTURES
from ranks.rank_threads import OneProcess, steps
from ranks.test_registry import CASES, FIRST, NAMES_BY_TYPE
from trials import LENGTH

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # in GPTBigCode

SHARED = ("gemma-3n", "gemma-4")  # layers of theirs share keys and values, all of which are few
ELSEWHERE = {ARCHITECTURES[str(NAMES_BY_TYPE[kind.model_type])] for kind, _ in (*FAMILIES.values(), *STATES.values())}
BY_FILE = {file: FIRST[name] for name, file in ARCHITECTURES.items() if name in FIRST and file not in ELSEWHERE}
NAMES = list(CASES) if LENGTH > 1 else sorted(BY_FILE.values())


@pytest.mark.trial
@pytest.mark.parametrize("name", NAMES)
def test_stages_give_the_bits_of_one_process(tmp_path: Path, name: str) -> None:
    kind, options = CASES[name]
    random_model(kind(**{**TINY, **options}), seed=len(name)).save_pretrained(tmp_path)
    whole = OneProcess("native", tmp_path)
    if name in SHARED:
        with pytest.raises(Unsupported, match="layers of this model share keys and values: no stage may begin"):
            InStages(tmp_path, 2)
        return
    alone = steps(whole.logits, PROMPT)
    for size in {2, whole.model.config.layers} if LENGTH > 1 else {2}:
        stages = InStages(tmp_path, size)
        for ours, theirs in zip(steps(stages.logits, PROMPT), alone, strict=True):
            np.testing.assert_array_equal(ours, theirs)
