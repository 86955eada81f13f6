"""From a description of electron-scattering experiments to shards of simulated samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exitwave.ingest.schema import FieldSpec
    from exitwave.simulate.campaign import CampaignResult, run_campaign
    from exitwave.simulate.cluster import make_cluster
    from exitwave.simulate.cost import calibrate
    from exitwave.simulate.own import OwnSimulator, own_simulator
    from exitwave.simulate.parametric import ParametricPlan, ParametricSpec, make_parametric_plan
    from exitwave.simulate.plan import Plan, make_plan
    from exitwave.simulate.simulator import Sample, get_simulator, simulate_sample
    from exitwave.simulate.spec import CampaignSpec
    from exitwave.simulate.state import campaign_failures, campaign_status
    from exitwave.simulate.tasks import SampleSpec, TaskSpec

__all__ = [
    "CampaignResult",
    "CampaignSpec",
    "FieldSpec",
    "OwnSimulator",
    "ParametricPlan",
    "ParametricSpec",
    "Plan",
    "Sample",
    "SampleSpec",
    "TaskSpec",
    "calibrate",
    "campaign_failures",
    "campaign_status",
    "get_simulator",
    "make_cluster",
    "make_parametric_plan",
    "make_plan",
    "own_simulator",
    "run_campaign",
    "simulate_sample",
]

_WHERE = {
    "CampaignResult": "campaign",
    "CampaignSpec": "spec",
    "FieldSpec": "exitwave.ingest.schema",
    "OwnSimulator": "own",
    "ParametricPlan": "parametric",
    "ParametricSpec": "parametric",
    "Plan": "plan",
    "Sample": "simulator",
    "SampleSpec": "tasks",
    "TaskSpec": "tasks",
    "calibrate": "cost",
    "campaign_failures": "state",
    "campaign_status": "state",
    "get_simulator": "simulator",
    "make_cluster": "cluster",
    "make_parametric_plan": "parametric",
    "make_plan": "plan",
    "own_simulator": "own",
    "run_campaign": "campaign",
    "simulate_sample": "simulator",
}


def __getattr__(name: str) -> Any:
    """Names are imported when first used: a worker that only simulates pays for nothing else."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    where = _WHERE[name]
    return getattr(import_module(where if "." in where else f"{__name__}.{where}"), name)
