"""What Optuna decides: the next trial's values, and whether a trial is given up. The only file that imports it.

Both are functions of what is known of the trials, and of nothing else: an in-memory study is made of them for each
question. Optuna's own stores are not used. A store of SQLite answers "database is locked" to several processes and
keeps trials of killed ones as running for ever; the lock of its journal outlives a killed process. Here one process
asks, and our own log, one synced line an event, is the truth.

The sampler of trial n is seeded by (seed, n): a search that was killed goes on with the values that it would have had,
and where trials run one after the other, the same seed gives the same trials.
"""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from exitwave.ingest.errors import UsageError
from exitwave.workflows.tune_record import Trial
from exitwave.workflows.tune_spec import PrunerSpec, Range, TuneSpec

__all__ = ["gives_up", "importance", "next_values", "require_optuna"]


def require_optuna() -> Any:
    """The library, quiet. UsageError where it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import optuna
    except ImportError:
        raise UsageError(
            "exitwave tune needs Optuna, which is not installed here: pip install 'exitwave[tune]', then give the same "
            "command again."
        ) from None
    logging.getLogger("optuna").setLevel(logging.ERROR)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def next_values(tune: TuneSpec, trials: Sequence[Trial], number: int) -> dict[str, Any]:
    """The values of trial `number`, after `trials` (numbers below it, in any state)."""
    optuna = require_optuna()
    seed = int(np.random.SeedSequence([tune.sampler.seed, number]).generate_state(1)[0])
    if tune.sampler.name == "random":
        sampler = optuna.samplers.RandomSampler(seed=seed)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what may change in later versions; ours is pinned
            sampler = optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=tune.sampler.startup, multivariate=True, constant_liar=True
            )
    study = _study(optuna, tune, trials, sampler, maximize=tune.objective.maximize)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ranges so wide that neighbours are one number
        asked = study.ask(_distributions(optuna, tune))
    return {key: _value(tune.space[key], asked.params[key]) for key in tune.space}


def gives_up(tune: TuneSpec, trials: Sequence[Trial], number: int, rung: int) -> bool:
    """Whether trial `number` is worse, at `rung`, than those that finished before this question."""
    done = [t for t in trials if t.state == "finished"]
    if tune.pruner.name == "none" or len(done) < tune.pruner.startup or rung <= tune.pruner.warmup:
        return False
    optuna = require_optuna()
    study = optuna.create_study(direction="minimize")
    for other in done:  # what they were at this point is all that counts: a question costs no more than it must
        seen = {rung: other.reports[rung]} if rung in other.reports else {}
        study.add_trial(optuna.trial.create_trial(value=other.value, intermediate_values=seen))
    trial = trials[number]
    asked = optuna.trial.FrozenTrial(
        number=len(study.trials), trial_id=len(study.trials), state=optuna.trial.TrialState.RUNNING, value=None,
        datetime_start=None, datetime_complete=None, params={}, distributions={}, user_attrs={}, system_attrs={},
        intermediate_values={rung: trial.reports[rung]},
    )  # fmt: skip
    return bool(_pruner(optuna, tune.pruner).prune(study, asked))


def importance(tune: TuneSpec, trials: Sequence[Trial]) -> dict[str, float]:
    """How much of the difference between good trials and all others each key explains, together 1 (PED-ANOVA, Watanabe
    et al., IJCAI 2023); empty where too few trials are finished, or Optuna is missing.
    """
    done = [t for t in trials if t.state == "finished"]
    if len(done) < 6 or len({t.value for t in done}) < 2:
        return {}
    try:
        optuna = require_optuna()
    except UsageError:
        return {}
    study = _study(optuna, tune, done, None, maximize=tune.objective.maximize)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = optuna.importance.get_param_importances(
                study, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
            )
    except (ValueError, RuntimeError, ZeroDivisionError):
        return {}  # all values alike: nothing to explain
    return {key: float(share) for key, share in found.items() if math.isfinite(share)}


def _pruner(optuna: Any, pruner: PrunerSpec) -> Any:
    # rungs are counted from 1, and the first `warmup` of them do not count
    return optuna.pruners.PercentilePruner(
        pruner.percentile, n_startup_trials=pruner.startup, n_warmup_steps=pruner.warmup + 1
    )


def _study(optuna: Any, tune: TuneSpec, trials: Sequence[Trial], sampler: Any, *, maximize: bool) -> Any:
    """A study in memory that knows these trials. Those that failed are told as what they are: without a value."""
    study = optuna.create_study(direction="maximize" if maximize else "minimize", sampler=sampler)
    distributions = _distributions(optuna, tune)
    states = {
        "finished": optuna.trial.TrialState.COMPLETE,
        "pruned": optuna.trial.TrialState.PRUNED,
        "failed": optuna.trial.TrialState.FAIL,
        "running": optuna.trial.TrialState.RUNNING,
    }
    for trial in trials:
        study.add_trial(
            optuna.trial.create_trial(
                state=states[trial.state],
                value=trial.value if trial.state == "finished" else None,
                params={key: _category(tune.space[key], trial.values[key]) for key in tune.space},
                distributions=distributions,
                intermediate_values=dict(trial.reports),
            )
        )
    return study


def _distributions(optuna: Any, tune: TuneSpec) -> dict[str, Any]:
    return {key: _distribution(optuna, values) for key, values in tune.space.items()}


def _distribution(optuna: Any, values: Range) -> Any:
    made = optuna.distributions
    if values.kind == "choice":
        return made.CategoricalDistribution([_text(value) for value in values.ends])
    low, high = values.ends
    kind = made.IntDistribution if values.kind.startswith("int") else made.FloatDistribution
    return kind(low, high, log="log" in values.kind)


def _text(value: Any) -> str:
    """A choice as Optuna knows it: of lists and null it knows nothing."""
    return json.dumps(value)


def _category(values: Range, value: Any) -> Any:
    return _text(value) if values.kind == "choice" else value


def _value(values: Range, drawn: Any) -> Any:
    return json.loads(drawn) if values.kind == "choice" else drawn
